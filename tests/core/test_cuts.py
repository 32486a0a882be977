# SPDX-License-Identifier: Apache-2.0
"""The cuts of a batch into items, and that the judge's fastest is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.trees import (
    Batch,
    batches,
    check_plan,
    content,
    packed_rows,
    segments_of,
    target,
)

from benchmarks.common.forests import Tree
from sglang_pat import _C
from sglang_pat.planner import Planner, plan
from sglang_pat.target import CUTS, WITHOUT_BRANCHES


@settings(max_examples=80)
@given(batches(), st.sampled_from([8, 32, 40]), st.booleans(), st.sampled_from([1, 3, 132]))
def test_the_judge_takes_the_fastest_of_the_cuts(
    batch: Batch, num_q_heads: int, hopper: bool, num_sms: int
) -> None:
    made_for = target(num_q_heads=num_q_heads, hopper=hopper, num_sms=num_sms)
    for cuts in (CUTS, WITHOUT_BRANCHES):
        made = plan(batch.paths, batch.seq_lens, replace(made_for, cuts=cuts))
        each = [plan(batch.paths, batch.seq_lens, replace(made_for, cuts=(cut,))) for cut in cuts]
        assert made.seconds == min(other.seconds for other in each)
        assert content(made) in {content(other) for other in each}


@settings(max_examples=80)
@given(
    batches(), st.sampled_from(["branches", "half_branches", "short_branches"]), st.integers(1, 8)
)
def test_branches(batch: Batch, cut: str, group: int) -> None:
    """Wherever queries share anything that is short enough, and nowhere else."""
    made_for = target(num_q_heads=8 * group, cuts=(cut,))
    made = plan(batch.paths, batch.seq_lens, made_for)
    for index in np.flatnonzero(made.items["kind"] == _C.BRANCH):
        rows = made.items["num_queries"][index] * packed_rows(made_for)
        assert rows <= (64 if cut == "branches" else 32)
        if cut == "short_branches":
            assert (segments_of(made, index)["room"] <= 128 + 64).all()
    assert any(batch.paths) or not made.branch_tokens
    without = replace(made_for, cuts=WITHOUT_BRANCHES)
    assert not plan(batch.paths, batch.seq_lens, without).branch_tokens


@pytest.mark.parametrize(("cut", "parts"), [("sm_parts", 132), ("half_parts", 264)])
def test_parts_fill_the_machine(cut: str, parts: int) -> None:
    """One long request, and many of a trace: work units of about one length for each SM, or half,
    beside shorter ones."""
    rng = np.random.default_rng(0)
    made = plan([[]], [131072], target(cuts=(cut,)))
    assert 0.9 * parts < made.num_items * 8 <= parts
    lens = rng.integers(4000, 16_000, 16).tolist()
    made = plan([[]] * 16, lens, target(cuts=(cut,)))
    assert 0.75 * parts < made.num_items * 8 < 1.5 * parts


def test_seconds_follow_the_machine() -> None:
    """A plan is judged slower on a slower machine, for wider K/V and for longer sequences."""
    tree = Tree((1, 32), (8192, 512))
    made_for = target(cuts=("half_parts",))

    def seconds(more: int = 0, **changes: Any) -> float:
        lens = [length + more for length in tree.seq_lens]
        return plan(tree.paths, lens, replace(made_for, **changes)).seconds

    fast = seconds()
    assert 0 < seconds(kv_bytes=1) < fast < min(seconds(4000), seconds(num_sms=16))
    assert seconds(hopper=False) < seconds(hopper=False, bytes_per_s=made_for.bytes_per_s / 8)


def test_costs_are_set_by_value() -> None:
    """As the program that fits them does."""
    planner = Planner(target())
    before, values = planner.plan([[]], [500]), planner.costs
    values[_C.COST_NAMES.index("launch_us")] += 1000.0
    planner.costs = values
    assert planner.plan([[]], [500]).seconds - before.seconds == pytest.approx(1e-3)
    with pytest.raises(TypeError, match="FixedSize"):
        planner.costs = [1.0, 2.0]


def test_branches_of_too_many_segments_are_not_made() -> None:
    """Of a chain of nodes each of which some queries leave. Nodes of queries beyond one branch are
    above it: 200 of these and a branch's own are too many."""
    for depth, copies, segments in ((32, 2, 32 + 64), (300, 1, 0)):
        nodes = [(i, 3 * i, 3 * i + 3) for i in range(depth)]
        paths = [nodes[: 1 + i] for i in range(depth) for _ in range(copies)]
        batch = Batch(paths, [path[-1][2] + 5 for path in paths])
        made_for = target(num_q_heads=8, cuts=("branches",))
        made = plan(batch.paths, batch.seq_lens, made_for)
        check_plan(made, batch, made_for, batch.seq_lens)
        assert bool(made.branch_tokens) == bool(segments)
        assert not segments or made.item_segments["num_segments"].tolist() == [segments]


def test_groups_of_more_rows_than_a_branch_have_none() -> None:
    """Branches of 32 rows hold no query of 40."""
    tree = Tree((1, 8), (64, 32))
    for cut, has in (("branches", True), ("half_branches", False)):
        made = plan(tree.paths, tree.seq_lens, target(num_q_heads=320, cuts=(cut,)))
        assert bool(made.branch_tokens) == has and made.degraded == ""
