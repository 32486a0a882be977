# SPDX-License-Identifier: Apache-2.0
"""ChunkAttention's experiments (section 5, figures 3 and 4) on our kernels: how many tokens must be
shared, in how large a batch, and for how long, before a rule pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_pat.bench.common.trees import Requests, Tree
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import options_of
from sglang_pat.bench.kernel.studies.engine import BASE, Study, StudyRow
from sglang_pat.bench.kernel.studies.ratios import MARGIN, by_family, faster, listed, mean

# The paper's: a prompt of so many shared tokens, then 64 of each sequence, then its completion.
SHARED = (0, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 4, 8, 16, 32, 48, 64, 96, 128)
COMPLETIONS = (64, 256, 512, 1024)
OWN_PROMPT = 64
# Of figure 3; of figure 4 the batches alone are given, so the shared tokens are our choice.
BATCH, COMPLETION, SHARED_BY_BATCH = 32, 64, 2048
DIVERGING = (1024, 8192)  # shared tokens, while completions grow


def _tree(shared: int, batch: int, completion: int) -> Tree:
    own = OWN_PROMPT + completion
    return Tree((1, batch), (shared, own)) if shared else Tree((batch,), (own,))


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    """By shared tokens, by completion tokens, by batch."""
    step = 3 if quick else 1
    found: list[tuple[str, Requests]] = []
    found += [("shared", _tree(n, BATCH, COMPLETION)) for n in SHARED[::-step]]
    found += [
        ("diverging", _tree(n, BATCH, completion))
        for n in DIVERGING
        for completion in COMPLETIONS[1::step]
    ]
    found += [("batch", _tree(SHARED_BY_BATCH, b, COMPLETION)) for b in BATCHES[::step]]
    return found


def _shared(row: StudyRow) -> int:
    tree = Tree.parse(row.spec)
    return tree.tokens[0] if tree.shares else 0


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    """From how many shared tokens on chunks pay, what they gain, and where they beat the
    default."""
    families = by_family(rows)
    swept = sorted(families.get("shared", []), key=_shared)
    gains = {_shared(row): gain for row in swept if (gain := mean([row], "paged", "chunk"))}
    if gains:
        paying = [n for n in gains if all(gains[m] > MARGIN for m in gains if m >= n)]
        first = f"from {paying[0]} shared tokens on" if paying else "at no length to the end"
        shown = listed({str(n): gain for n, gain in gains.items()})
        yield f"chunk is faster than paged {first}; paged over chunk by shared tokens: {shown}"
    for name in dict.fromkeys(name for row in rows for name in row.times):
        rates = {
            row.queries: row.queries / row.times[name]
            for row in families.get("batch", [])
            if name in row.times
        }
        if len(rates) > 1:
            best = max(rates, key=rates.__getitem__)
            yield f"{name}: most queries a microsecond with a batch of {best}, {rates[best]:.3f}"
    kinds = [name for name in RULES if name.startswith("chunk")]
    yield f"chunks are more than {MARGIN - 1:.0%} faster than default, {faster(rows, kinds)}"


# The paper runs its two phases one after the other: `serial` comes closest, a kernel a row tile.
RULES = {
    BASE: options_of("default", {})[0],
    "chunk": options_of("chunk", {})[0],
    "chunk-streams": options_of("chunk", {"launch": "streams"})[0],
    "chunk-serial": options_of("chunk", {"launch": "serial"})[0],
    "paged": options_of("paged", {})[0],
}

STUDY = Study(
    title="ChunkAttention: shared tokens, completions and batches of its figures 3 and 4",
    heads=(Heads(32, 32), Heads(32, 8)),
    batches=batches,
    rules=RULES,
    summary=summary,
    peers=("fa3", "flashinfer"),
)
