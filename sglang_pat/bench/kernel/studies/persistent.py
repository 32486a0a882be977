# SPDX-License-Identifier: Apache-2.0
"""PersistentKV: how well the cost model chooses, by the regret of the default over the best of a
list of fixed rules, on batches that it was not fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_pat.bench.common.forests import LENGTHS, forest
from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import options_of
from sglang_pat.bench.kernel.studies.engine import BASE, Study, StudyRow
from sglang_pat.bench.kernel.studies.lengths import long_contexts
from sglang_pat.bench.kernel.studies.regret import regrets

# Kernels, cost model and simulation were fitted to batches of seeds 0 to 12, also of this study.
HELD_OUT = range(13, 18)
FOREST_SEEDS = HELD_OUT[:3]
MAIN_HEADS = Heads(32, 8)  # with all batches; other GQA ratios have the first seed's, no forests
# The paper's workloads by requests and kind of lengths, its boundary among them; two more of few.
WORKLOADS = ((8, "bimodal"), (8, "uniform"), (8, "zipf"), (1, "bucketed"), (4, "uniform"))
FEW = ((2, "uniform"), (3, "bimodal"))
SPLIT_TOKENS = (128, 256, 512, 1024, 2048)


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    """A seed of all workloads before the next."""
    found: list[tuple[str, Requests]] = []
    first = HELD_OUT[0]
    for seed in HELD_OUT if heads == MAIN_HEADS and not quick else (first,):
        for count, kind in WORKLOADS + (FEW if seed == first else ()):
            found.append((f"{kind}-b{count}", long_contexts(kind, count, seed)))
        if heads == MAIN_HEADS and seed in FOREST_SEEDS:
            found += [(f"{kind}-forest", forest(kind, seed)) for kind in LENGTHS]
    return found


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    return regrets(rows, tuple(ALTERNATIVES))


ALTERNATIVES = {
    "no branches": options_of("default", {"branching": "never"})[0],
    "queries": options_of("default", {"policy": "queries"})[0],
    **{
        f"fixed-{tokens}": options_of("default", {"split": "fixed", "split_tokens": str(tokens)})[0]
        for tokens in SPLIT_TOKENS
    },
    "naive+cost": options_of("default", {"policy": "naive"})[0],
}

STUDY = Study(
    title="PersistentKV: the cost model's choice beside fixed rules, on held-out batches",
    heads=(Heads(32, 8), Heads(64, 8), Heads(32, 32)),
    batches=batches,
    rules={BASE: options_of("default", {})[0], **ALTERNATIVES},
    summary=summary,
    peers=("fa3", "flashinfer"),
)
