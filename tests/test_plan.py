# SPDX-License-Identifier: Apache-2.0
"""Properties of pack tree, schedule and plan; no GPU and no SGLang needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.trees import (
    Batch,
    batch_of,
    batches,
    check_plan,
    first_segments,
    ranges_of,
    target,
    targets,
)

from benchmarks.common.trees import PAPER_TREES
from sglang_pat import _C
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Planner, plan
from sglang_pat.target import Target


@settings(max_examples=400, deadline=None)
@given(batches(), targets())
def test_every_token_in_exactly_one_item(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.degraded == ""
    check_plan(made, batch, made_for, batch.seq_lens)


@settings(max_examples=150, deadline=None)
@given(batches(), targets())
def test_plan_holds_while_the_tails_grow(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    grown = np.asarray(made.max_seq_lens, dtype=np.int64)
    assert made.fits(grown.ctypes.data, len(grown))
    check_plan(made, batch, made_for, grown.tolist())
    if len(grown):
        grown = grown + 1
        assert not made.fits(grown.ctypes.data, len(grown))
    room = np.asarray(made.max_seq_lens) - np.asarray(batch.seq_lens, dtype=np.int64)
    for query, path in enumerate(batch.paths):
        ends_in_the_tree = (path[-1][2] if path else 0) == batch.seq_lens[query]
        least = _C.LEAST_GROWTH if made.branch_tokens else 128
        assert room[query] >= least or (room[query] == 0 and ends_in_the_tree)


@pytest.mark.parametrize("tree", PAPER_TREES, ids=str)
def test_the_papers_trees(tree: Tree) -> None:
    batch, made_for = batch_of(tree), target()
    check_plan(plan(batch.paths, batch.seq_lens, made_for), batch, made_for, batch.seq_lens)


@settings(max_examples=150, deadline=None)
@given(batches(), targets(), st.randoms(use_true_random=False))
def test_deterministic_and_blind_to_batch_order(batch: Batch, made_for: Target, random) -> None:
    def shape(of: Batch) -> tuple[list, list]:
        made = Planner(made_for).plan(of.paths, of.seq_lens)
        ranges: list[list[tuple[int, int]]] = [[] for _ in of.seq_lens]
        whole = []
        for index in range(made.num_items):
            parts = ranges_of(made, index, of.seq_lens)
            whole.append(sorted((part.start, part.length, len(part.queries)) for part in parts))
            for part in parts:
                for query in part.queries:
                    ranges[query].append((part.start, part.length))
        per_query = zip(of.paths, of.seq_lens, map(sorted, ranges), strict=True)
        return sorted(whole), sorted(per_query)

    first, again = (plan(batch.paths, batch.seq_lens, made_for) for _ in range(2))
    assert first.items.tobytes() == again.items.tobytes()
    assert first.members.tobytes() == again.members.tobytes()
    order = list(range(len(batch.seq_lens)))
    random.shuffle(order)
    assert shape(batch) == shape(batch.permuted(order))


@settings(max_examples=100, deadline=None)
@given(batches(max_queries=24), st.integers(24, 40), st.integers(0, 40))
def test_a_plan_always_fits_its_buffers(batch: Batch, max_items: int, max_partials: int) -> None:
    made_for = target(max_queries=24, max_items=max_items, max_partials=max_partials)
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.num_items <= max_items and made.num_partials <= max_partials
    check_plan(made, batch, made_for, batch.seq_lens)
    roomy = plan(batch.paths, batch.seq_lens, target(max_queries=24, branching="never"))
    too_small = roomy.num_items > max_items or roomy.num_partials > max_partials
    assert too_small or not made.degraded


@pytest.mark.parametrize("room", [0, 5, 8, 4096])
def test_a_plan_splits_as_far_as_its_buffers_allow(room: int) -> None:
    """And says so where that is slow."""
    made = plan([[]], [131072], target(max_partials=room))
    assert made.num_items <= max(1, room) and made.num_partials <= room
    assert (made.num_items > 1) == (room > 0)
    free = plan([[]], [131072], target())
    assert bool(made.degraded) == (made.num_items < free.num_items)
    if made.degraded:
        assert f"{room} partials would be faster" in made.degraded


def test_wide_items_come_first_and_fill_the_machine() -> None:
    """A wide item takes a whole SM, so that four fifths of the SMs have one, or none at all."""
    many = batch_of(Tree((1, 1024), (2048, 32)))
    made = plan(many.paths, many.seq_lens, target(branching="never"))
    tiles = made.items["row_tile"]
    wide = int((tiles > 64).sum())
    assert 5 * wide * 8 >= 4 * 132 and (tiles[:wide] == 128).all()
    assert made.num_wide_items == wide
    few = batch_of(Tree((1, 256), (256, 32)))
    made = plan(few.paths, few.seq_lens, target(branching="never"))
    assert made.items["row_tile"].max() == 64 and made.num_wide_items == 0


def test_plans_are_joint_where_each_heavy_item_has_an_sm() -> None:
    """And nothing else is to be run. Two halves of an SM work on each item then."""
    small = batch_of(Tree((1, 4, 256), (32, 256, 32)))
    made = plan(small.paths, small.seq_lens, target())
    assert made.joint == 1 and made.num_heavy_items == made.num_items
    assert repr(made).endswith(", joint>")
    assert made.num_items * 8 <= 132
    one_half = plan(small.paths, small.seq_lens, target(items_per_sm=1))
    fewer_sms = plan(small.paths, small.seq_lens, target(num_sms=120))
    assert one_half.joint == 0 and fewer_sms.joint == 0
    assert plan(small.paths, small.seq_lens, target(branching="always", kv_bytes=1)).joint == 1
    # Verify steps: 16 requests of 8 draft tokens, each 64 packed rows; 17 need more SMs.
    for requests, joint in ((16, 1), (17, 0)):
        verify = target(num_q_heads=64, draft_tokens=8, split="none")
        assert plan([[]] * requests, [2048] * requests, verify).joint == joint
    # Items of 4 packed rows in a tile of 64, which one half runs.
    few_rows = plan([[]] * 4, [4096] * 4, target(row_tiles=(64,), split="none"))
    assert few_rows.num_heavy_items == few_rows.num_items == 4 and few_rows.joint == 0
    with_light = batch_of(Tree((1, 10), (4096, 416)))
    made = plan(with_light.paths, with_light.seq_lens, target())
    assert made.joint == 0 < made.num_heavy_items < made.num_items
    assert plan([], [], target()).joint == 0


def test_the_model_knows_that_a_joint_branch_takes_less() -> None:
    """So that fewer and longer branches are made than where one half runs each."""
    tree = batch_of(Tree((1, 256), (256, 32)))
    by_both, by_one = (
        plan(tree.paths, tree.seq_lens, target(items_per_sm=slots)) for slots in (2, 1)
    )
    assert by_both.joint == 1 and by_both.num_items < by_one.num_items


def test_heavy_items_come_before_light_ones() -> None:
    """Half of an SM begins with those, the other with these: each kind by descending length."""
    batch = batch_of(Tree((1, 16, 32, 64), (512, 96, 160, 200)))
    made = plan(batch.paths, batch.seq_lens, target(branching="never"))
    assert made.num_wide_items == 0 < made.num_heavy_items < made.num_items
    tiles = made.items["row_tile"]
    assert (tiles[: made.num_heavy_items] == 64).all()
    assert (tiles[made.num_heavy_items :] <= 32).all()
    lens = first_segments(made)["kv_len"][: made.num_heavy_items]
    assert (lens[1:] <= lens[:-1] * 1.25).all()  # the sort is one by buckets


def test_items_run_heaviest_first() -> None:
    tree = Tree((1, 8, 512), (512, 512, 256))
    made = plan(tree.paths, tree.seq_lens, target(num_sms=1, branching="never"))
    lens = first_segments(made)["kv_len"]
    cost = np.maximum(lens, 0) + 256 * (lens < 0)
    shared = made.items["num_queries"] > 1
    assert cost[0] == cost.max() and shared[0]
    assert np.all(cost[:-1] * 1.13 >= cost[1:])  # a bucket spans an eighth of an octave


def test_64_steady_requests_need_few_plans() -> None:
    lens = np.arange(100, 164, dtype=np.int64)
    paths = [[(1, 0, 64), (2 + i % 4, 64, 90)] for i in range(64)]
    planner = Planner(target())
    plans, made = 0, None
    for _ in range(256):
        if made is None or not made.fits(lens.ctypes.data, len(lens)):
            made = planner.plan(paths, lens)
            plans += 1
        lens += 1
    assert plans <= 8


def test_a_growing_tail_is_split_in_time() -> None:
    planner = Planner(target())
    made, plans = None, 0
    for length in range(64, 8193):
        lens = np.array([length], dtype=np.int64)
        if made is None or not made.fits(lens.ctypes.data, 1):
            made = planner.plan([[]], lens)
            plans += 1
        # Never more than 384 tokens beyond twice the chunk that a fresh plan would use.
        if length % 512 == 0:
            fresh = planner.plan([[]], lens).segments["kv_len"].max()
            tail = length - made.segments["kv_start"].max()
            assert tail <= 2 * max(fresh, 128) + 384
    assert made.num_items >= 8 and plans <= 64
