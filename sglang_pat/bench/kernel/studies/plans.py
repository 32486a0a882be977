# SPDX-License-Identifier: Apache-2.0
"""Plans that the default did not make: by a cost model with other numbers, in other pieces, with
and without branches. What they gain is what the default may learn. Series 25 and 26 of the
experiments timed such plans; cost model and simulation are fitted to their times."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_pat import _C, Target
from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import PatOptions, options_of
from sglang_pat.bench.kernel.studies import neighbours
from sglang_pat.bench.kernel.studies.engine import BASE, Study, StudyRow
from sglang_pat.bench.kernel.studies.regret import regrets

# Batches as servers have them: requests on one prefix, whose tails are drawn around a length, and
# agents of four roles behind one system prompt.
SERVED_REQUESTS, SERVED_PREFIXES = (8, 16, 32, 64, 128, 256), (512, 2048, 4096, 8192)
SERVED_TAILS = (20, 120, 300)
AGENTS, AGENTS_OWN = (16, 32, 64, 128), (100, 600, 2000)
SYSTEM, ROLE_END, ROLES = 3000, 4200, 4


@dataclass(frozen=True)
class Changed(PatOptions):
    """The default with another target. ``factors``: of numbers of the target, by name. ``parts``:
    if not 0, packs without branches, in pieces as long as the batch's tokens times KV heads over so
    many, in whole tiles."""

    factors: tuple[tuple[str, float], ...] = ()
    parts: int = 0

    def target(self, tree: Requests, heads: Heads) -> Target:
        if self.parts:
            tile = _C.CUDA_TILE_TOKENS
            tiles = -(-tree.unique_tokens * heads.kv // (self.parts * tile))
            return _pieces(tiles * tile).target(tree, heads)
        made = PatOptions.target(self, tree, heads)
        changes = {name: factor * getattr(made, name) for name, factor in self.factors}
        return replace(made, **changes)


def _factors(**factors: float) -> Changed:
    return Changed(factors=tuple(factors.items()))


def _given(**given: str) -> PatOptions:
    return options_of("default", given)[0]


def _pieces(tokens: int) -> PatOptions:
    """Packs without branches, in pieces of so many tokens."""
    return _given(split="fixed", split_tokens=str(tokens), branching="never")


ALTERNATIVES: dict[str, PatOptions] = {
    **{f"speed {factor}": _factors(sm_speedup=factor) for factor in (0.75, 1.4)},
    **{f"overhead {factor}": _factors(item_overhead_s=factor) for factor in (0.5, 1.5)},
    **{
        f"merge {factor}": _factors(merge_factor=factor, merge_round_s=factor)
        for factor in (0.5, 2.0)
    },
    **{f"products {factor}": _factors(flops_per_s=factor) for factor in (0.75, 1.33)},
    **{f"memory {factor}": _factors(bytes_per_s=factor) for factor in (0.85, 1.2)},
    "no branches": _given(branching="never"),
    **{
        f"groups {tokens}": _given(branching="groups", split_tokens=str(tokens))
        for tokens in (1024, 2048)
    },
    **{f"pieces {tokens}": _pieces(tokens) for tokens in (256, 512, 1024)},
    **{f"{parts} parts": Changed(parts=parts) for parts in (132, 264, 528)},
}


def served() -> Iterator[Forest]:
    """A batch of each size, prefix and tail, then of agents."""
    for count in SERVED_REQUESTS:
        for prefix in SERVED_PREFIXES:
            for tail in SERVED_TAILS:
                rng = random.Random(count * prefix + tail)
                tails = [max(1, int(tail * rng.uniform(0.7, 1.3))) for _ in range(count)]
                paths = [[(0, 0, prefix)]] * count
                lengths = [prefix + each for each in tails]
                yield Forest(f"served-{prefix}x{count}+{tail}", paths, lengths)
    for count in AGENTS:
        for own in AGENTS_OWN:
            rng = random.Random(count + own)
            paths = [
                [(0, 0, SYSTEM), (1 + agent % ROLES, SYSTEM, ROLE_END)] for agent in range(count)
            ]
            lengths = [ROLE_END + rng.randint(20, 2 * own) for _ in range(count)]
            yield Forest(f"agents-{count}+{own}", paths, lengths)


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    """As servers have them, then those of ``neighbours``."""
    as_served = list(served())[:: 7 if quick else 1]
    return [(each.family, each) for each in as_served] + neighbours.batches(heads, quick)


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    return regrets(rows, tuple(ALTERNATIVES))


STUDY = Study(
    title="Plans: the default's beside those of other numbers, pieces and branches",
    heads=(Heads(32, 8), Heads(8, 1), Heads(64, 8), Heads(16, 2), Heads(28, 4)),
    batches=batches,
    rules={BASE: _given(), **ALTERNATIVES},
    summary=summary,
)
