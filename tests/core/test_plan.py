# SPDX-License-Identifier: Apache-2.0
"""Properties of plans for random batches, and the order of their items; no GPU, no SGLang."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.trees import (
    BRANCH_GROWTH,
    GROWTH,
    Batch,
    batch_of,
    batches,
    check_plan,
    first_segments,
    packed_rows,
    ranges_of,
    segments_of,
    target,
    targets,
)

from benchmarks.common.trees import PAPER_TREES
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Plan, Planner, plan
from sglang_pat.target import WITHOUT_BRANCHES, Target


@settings(max_examples=400)
@given(batches(), targets())
def test_every_token_in_exactly_one_item(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.degraded == "" and made.seconds > 0
    check_plan(made, batch, made_for, batch.seq_lens)


@settings(max_examples=200)
@given(batches(), targets(), st.integers(2, 12))
def test_every_token_with_draft_tokens(batch: Batch, made_for: Target, draft_tokens: int) -> None:
    """A query's draft tokens but the first lie in a segment of its own that grows with it."""
    batch = batch.drafted(draft_tokens)
    rows = packed_rows(made_for) * draft_tokens
    tiles = tuple(sorted({max(tile, rows) for tile in made_for.row_tiles}))
    made_for = replace(made_for, draft_tokens=draft_tokens, row_tiles=tiles)
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.degraded == "" and made.draft_tokens == draft_tokens
    for lens in (batch.seq_lens, made.min_seq_lens.tolist(), made.max_seq_lens.tolist()):
        check_plan(made, batch, made_for, lens)
        for index in range(made.num_items):
            ranges = ranges_of(made, index, lens)
            for segment, part in zip(segments_of(made, index), ranges, strict=True):
                if segment["kv_len"] < 0:
                    assert part.length >= draft_tokens - 1
                    continue
                end = part.start + part.length
                assert all(end <= lens[query] - draft_tokens + 1 for query in part.queries)


@settings(max_examples=150)
@given(batches(), targets())
def test_a_plan_holds_while_the_tails_grow_and_no_further(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    grown = made.max_seq_lens.copy()
    assert made.fits(grown.ctypes.data, len(grown))
    check_plan(made, batch, made_for, grown.tolist())
    for query in range(len(grown)):
        for outside in (made.max_seq_lens[query] + 1, made.min_seq_lens[query] - 1):
            lens = made.max_seq_lens.copy()
            lens[query] = outside
            assert not made.fits(lens.ctypes.data, len(lens))
    assert not made.fits(grown.ctypes.data, len(grown) + 1)
    room = made.max_seq_lens - np.asarray(batch.seq_lens, dtype=np.int64)
    for query, path in enumerate(batch.paths):
        ends_in_the_tree = (path[-1][2] if path else 0) == batch.seq_lens[query]
        least = BRANCH_GROWTH if made.branch_tokens else GROWTH
        assert room[query] >= least or (room[query] == 0 and ends_in_the_tree)


def shape(batch: Batch, made: Plan) -> tuple[list, list]:
    """What the items read, and what is read for each query, whatever their order."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in batch.seq_lens]
    whole = []
    for index in range(made.num_items):
        parts = ranges_of(made, index, batch.seq_lens)
        whole.append(sorted((part.start, part.length, len(part.queries)) for part in parts))
        for part in parts:
            for query in part.queries:
                ranges[query].append((part.start, part.length))
    per_query = zip(batch.paths, batch.seq_lens, map(sorted, ranges), strict=True)
    return sorted(whole), sorted(per_query)


@settings(max_examples=150)
@given(batches(), targets(), st.randoms(use_true_random=False))
def test_deterministic_and_blind_to_batch_order(batch: Batch, made_for: Target, random) -> None:
    """Also after other plans, whose memory the planner uses again."""
    planner = Planner(made_for)
    order = list(range(len(batch.seq_lens)))
    random.shuffle(order)
    permuted = batch.permuted(order)
    first = planner.plan(batch.paths, batch.seq_lens)
    other = planner.plan(permuted.paths, permuted.seq_lens)
    again = planner.plan(batch.paths, batch.seq_lens)
    for part in ("items", "item_segments", "members", "queries", "segments"):
        assert getattr(first, part).tobytes() == getattr(again, part).tobytes()
    assert first.seconds == again.seconds
    assert shape(batch, first) == shape(permuted, other)


@settings(max_examples=150)
@given(batches(), targets(), st.integers(0, 40), st.integers(0, 40))
def test_a_plan_always_fits_its_buffers(
    batch: Batch, made_for: Target, more_items: int, max_partials: int
) -> None:
    """And is simpler than asked for, which it says, only where it does not."""
    tight = replace(made_for, max_queries=24, max_items=24 + more_items, max_partials=max_partials)
    made = plan(batch.paths, batch.seq_lens, tight)
    assert made.num_items <= tight.max_items and made.num_partials <= max_partials
    check_plan(made, batch, tight, batch.seq_lens)
    if made.degraded:
        roomy = plan(batch.paths, batch.seq_lens, made_for)
        assert roomy.num_items > tight.max_items or roomy.num_partials > max_partials
        assert f"(of {tight.max_items})" in made.degraded
        assert f"(of {max_partials})" in made.degraded


def test_degraded_plans_first_do_without_splits_and_then_without_packs() -> None:
    batch = Batch([[(1, 0, 9000)]] * 4, [9100] * 4)
    for room, why, shared in ((8, "without splits: ", True), (7, "without packs: ", False)):
        for policy in ("default", "pat"):
            made_for = target(max_queries=4, max_partials=room, policy=policy, num_kv_heads=1)
            made_for = replace(made_for, cuts=WITHOUT_BRANCHES)
            made = plan(batch.paths, batch.seq_lens, made_for)
            assert made.degraded.startswith(why)
            assert (made.num_shared_items > 0) == shared
            assert repr(made).endswith(f"degraded: {made.degraded}>")


@pytest.mark.parametrize("tree", PAPER_TREES, ids=str)
def test_the_papers_trees(tree: Tree) -> None:
    batch, made_for = batch_of(tree), target()
    check_plan(plan(batch.paths, batch.seq_lens, made_for), batch, made_for, batch.seq_lens)


def test_wide_items_come_first_and_fill_the_machine() -> None:
    """A wide item takes a whole SM, so that four fifths of the SMs have one, or none at all."""
    many = Tree((1, 1024), (2048, 32))
    made = plan(many.paths, many.seq_lens, target(cuts=WITHOUT_BRANCHES))
    tiles = made.items["row_tile"]
    wide = int((tiles > 64).sum())
    assert 5 * wide * 8 >= 4 * 132 and (tiles[:wide] == 128).all()
    assert made.num_wide_items == wide
    few = Tree((1, 256), (256, 32))
    made = plan(few.paths, few.seq_lens, target(cuts=WITHOUT_BRANCHES))
    assert made.items["row_tile"].max() == 64 and made.num_wide_items == 0


def test_heavy_items_come_before_light_ones_each_by_length() -> None:
    batch = Tree((1, 16, 32, 64), (512, 96, 160, 200))
    made = plan(batch.paths, batch.seq_lens, target(cuts=WITHOUT_BRANCHES))
    heavy = made.num_heavy_items
    assert made.num_wide_items == 0 < heavy < made.num_items
    tiles, segments = made.items["row_tile"], first_segments(made)
    assert (tiles[:heavy] == 64).all() and (tiles[heavy:] <= 32).all()
    lens = np.where(segments["kv_len"] < 0, 200, segments["kv_len"])
    for kind in (lens[:heavy], lens[heavy:]):
        assert (kind[1:] <= kind[:-1] * 1.13).all()  # a bucket spans an eighth of an octave


def test_plans_are_joint_where_each_heavy_item_has_an_sm() -> None:
    """And nothing else is to be run. Two halves of an SM work on each item then."""
    tree = Tree((1, 64), (256, 32))
    made_for = target(cuts=("branches",))
    made = plan(tree.paths, tree.seq_lens, made_for)
    assert made.joint == 1 and made.num_heavy_items == made.num_items == 4
    assert repr(made).endswith(", joint>")
    for other in ({"items_per_sm": 1}, {"num_sms": 31}):  # 4 branches x 8 KV heads
        assert plan(tree.paths, tree.seq_lens, replace(made_for, **other)).joint == 0
    # Verify steps: 16 requests of 8 draft tokens, each 64 packed rows; 17 need more SMs.
    for requests, joint in ((16, 1), (17, 0)):
        verify = target(num_q_heads=64, draft_tokens=8, cuts=())
        assert plan([[]] * requests, [2048] * requests, verify).joint == joint
    # Items of 4 packed rows in a tile of 64, which one half runs.
    few_rows = plan([[]] * 4, [4096] * 4, target(row_tiles=(64,), cuts=()))
    assert few_rows.num_heavy_items == few_rows.num_items == 4 and few_rows.joint == 0
    light = plan([*tree.paths, []], [*tree.seq_lens, 700], made_for)
    assert light.joint == 0 < light.num_heavy_items < light.num_items
    assert plan([], [], target()).joint == 0


def test_steady_requests_need_few_plans() -> None:
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


@pytest.mark.parametrize("policy", ["default", "pat"])
def test_sequences_of_any_length_lose_no_token(policy: str) -> None:
    longest = 2**30
    made = plan([[]], [longest], target(policy=policy))
    segments = np.sort(made.segments, order="kv_start")
    ends = segments["kv_start"][:-1] + segments["kv_len"][:-1]
    assert segments["kv_start"].tolist() == [0, *ends.tolist()] and (ends < longest).all()
    assert segments["kv_len"][-1] < 0 < made.num_items <= 512
