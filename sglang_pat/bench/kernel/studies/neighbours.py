# SPDX-License-Identifier: Apache-2.0
"""Every preset beside the default, on the paper's trees and on batches whose requests differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_pat.bench.common.forests import SEEDS, all_forests
from sglang_pat.bench.common.trees import PAPER_TREES, Requests
from sglang_pat.bench.kernel.cases import QUICK_TREES
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import options_of
from sglang_pat.bench.kernel.studies.engine import BASE, Study, StudyRow
from sglang_pat.bench.kernel.studies.ratios import MARGIN, faster, listed, means
from sglang_pat.config import PRESETS

QUICK_FORESTS = tuple(
    f"{family}-0" for family in ("uniform", "bimodal", "zipf", "bucketed", "skew", "samples")
)


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    """Trees, then forests, a seed of all families before the next."""
    trees = QUICK_TREES if quick else PAPER_TREES
    found: list[tuple[str, Requests]] = [
        ("shared" if tree.shares else "private", tree) for tree in trees
    ]
    forests = [
        each
        for each in all_forests(None)
        if not quick or each.name in QUICK_FORESTS or each.name.endswith("-8k")
    ]
    ranks = {str(seed): rank for rank, seed in enumerate(SEEDS)}
    # Few long requests, which have sizes instead of seeds, come last.
    forests.sort(key=lambda each: ranks.get(each.name.rpartition("-")[2], len(ranks)))
    return found + [(each.family, each) for each in forests]


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    """Geometric means, beside those of each family in the table, and the rows in which a preset
    beats the default."""
    yield f"all {len(rows)} rows over {BASE}: {listed(means(rows))}"
    others = [name for name in PRESETS if name != BASE]
    yield f"a preset is more than {MARGIN - 1:.0%} faster than {BASE}, {faster(rows, others)}"


STUDY = Study(
    title="Neighbours: the rules of other papers, as presets, beside the default",
    heads=(Heads(32, 8),),
    batches=batches,
    rules={name: options_of(name, {})[0] for name in PRESETS},
    summary=summary,
)
