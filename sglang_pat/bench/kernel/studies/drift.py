# SPDX-License-Identifier: Apache-2.0
"""How much slower a plan gets while its sequences grow: PackInfer regroups requests once groups
have grown apart (its section 3.1), a server of pat makes a new plan where one no longer holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang_pat import _C
from sglang_pat.bench.common.forests import all_forests
from sglang_pat.bench.common.trees import PAPER_TREES, Requests, Tree
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import options_of
from sglang_pat.bench.kernel.studies.engine import BASE, Study, StudyRow, aged_name
from sglang_pat.bench.kernel.studies.ratios import listed, means

AGES = (16, 32, 64, 128)
GROWN = max(AGES)  # tokens that every sequence has more than those of the trees and forests
SEEDS = ("0", "1")  # of forests
FEW = ("4k", "32k")  # thousands of tokens of one or two requests
QUICK_SEEDS, QUICK_FEW = SEEDS[:1], FEW[:1]


def grown_tree(tree: Tree) -> Tree:
    return Tree(tree.nodes, (*tree.tokens[:-1], tree.tokens[-1] + GROWN))


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    """Uneven forests, in which branches can hold up the rest; then trees."""
    ends = (QUICK_SEEDS + QUICK_FEW) if quick else (SEEDS + FEW)
    trees = PAPER_TREES[::4] if quick else PAPER_TREES
    found: list[tuple[str, Requests]] = []
    for each in all_forests(None):
        if each.name.rpartition("-")[2] in ends:
            lengths = [length + GROWN for length in each.seq_lens]
            grown = replace(each, name=f"{each.name}+{GROWN}", seq_lens=lengths)
            found.append((each.family, grown))
    for tree in trees:
        found.append(("shared" if tree.shares else "private", grown_tree(tree)))
    return found


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    """By age, what an old plan takes over a new one, and where it is too much."""
    yield f"an old plan over a new one: {listed(means(rows))}"
    for age in AGES:
        name = aged_name(age)
        slow = [row for row in rows if row.over_base.get(name, 0.0) > _C.MOST_DRIFT]
        kept = [row for row in slow if name not in row.outgrown]
        said = "; ".join(f"{row.spec} {row.over_base[name]:.3f}" for row in kept) or "none"
        replaced = sum(name in row.outgrown for row in rows)
        yield (
            f"{age} tokens later {len(slow)} of {len(rows)} plans take more than "
            f"{_C.MOST_DRIFT:g} of a new one's time, of which a server would have kept "
            f"{len(kept)}: {said}; it would have replaced {replaced}"
        )


STUDY = Study(
    title="Drift: plans that were made some tokens ago, beside a new one",
    heads=(Heads(32, 8), Heads(8, 1)),
    batches=batches,
    rules={BASE: options_of("default", {})[0]},
    summary=summary,
    ages=AGES,
)
