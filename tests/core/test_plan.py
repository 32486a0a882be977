# SPDX-License-Identifier: Apache-2.0
"""Properties of plans for random batches, and the order of their items; no GPU, no SGLang."""

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
    common_tiles,
    content,
    first_segments,
    packed_rows,
    ranges_of,
    target,
    targets,
)

from benchmarks.common.forests import Tree
from sglang_pat.planner import Plan, Planner, plan
from sglang_pat.target import WITHOUT_BRANCHES, Target


@settings(max_examples=200)
@given(batches(), targets(), st.sampled_from([1, 1, 2, 3, 12]))
def test_every_token_in_exactly_one_item(batch: Batch, made_for: Target, draft_tokens: int) -> None:
    """At the plan's own, the shortest and the longest lengths. A query's draft tokens but the first
    lie in a segment of its own that grows with it."""
    if draft_tokens > 1:
        batch = batch.drafted(draft_tokens)
    rows = packed_rows(made_for) * draft_tokens
    tiles = tuple(sorted({max(tile, rows) for tile in made_for.row_tiles}))
    made_for = replace(made_for, draft_tokens=draft_tokens, row_tiles=tiles)
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.degraded == "" and made.seconds > 0 and made.draft_tokens == draft_tokens
    for lens in (batch.seq_lens, made.min_seq_lens.tolist(), made.max_seq_lens.tolist()):
        check_plan(made, batch, made_for, lens)


@settings(max_examples=100)
@given(batches(), targets())
def test_a_plan_holds_while_the_tails_grow_and_no_further(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    grown = made.max_seq_lens.copy()
    assert made.fits(grown.ctypes.data, len(grown))
    assert not made.fits(grown.ctypes.data, len(grown) + 1)
    for query, path in enumerate(batch.paths):
        for outside in (made.max_seq_lens[query] + 1, made.min_seq_lens[query] - 1):
            lens = grown.copy()
            lens[query] = outside
            assert not made.fits(lens.ctypes.data, len(lens))
        room = grown[query] - batch.seq_lens[query]
        ends_in_the_tree = (path[-1][2] if path else 0) == batch.seq_lens[query]
        least = 64 if made.branch_tokens else 128  # tokens that a tail may grow at least
        assert room >= least or (room == 0 and ends_in_the_tree)


def shape(batch: Batch, made: Plan) -> tuple[list, list]:
    """What the items read, and what is read for each query, whatever their order."""
    items = [ranges_of(made, index, batch.seq_lens) for index in range(made.num_items)]
    whole = [sorted((part.start, part.length, len(part.queries)) for part in of) for of in items]
    parts = [part for of in items for part in of]
    ranges = [
        sorted((part.start, part.length) for part in parts if query in part.queries)
        for query in range(len(batch.seq_lens))
    ]
    return sorted(whole), sorted(zip(batch.paths, batch.seq_lens, ranges, strict=True))


@settings(max_examples=100)
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
    assert content(first) == content(again) and first.seconds == again.seconds
    assert shape(batch, first) == shape(permuted, other)


@settings(max_examples=100)
@given(batches(), targets(), st.tuples(*[st.integers(0, 40)] * 3), st.integers(0, 4))
def test_a_plan_always_fits_its_buffers(
    batch: Batch, made_for: Target, room: tuple[int, int, int], branch_tiles: int
) -> None:
    """And is simpler than asked for, which it says, only where it does not. Branches that do not
    fit are not made without a word."""
    more_items, partials, segments = room
    tight = replace(
        made_for,
        max_queries=24,
        max_items=24 + more_items,
        max_partials=partials,
        max_segments=segments,
        max_branch_tokens=64 * branch_tiles,
    )
    made = plan(batch.paths, batch.seq_lens, tight)
    assert made.num_items <= tight.max_items and made.num_partials <= partials
    check_plan(made, batch, tight, batch.seq_lens)
    if made.degraded:
        without = [cut for cut in made_for.cuts if cut in WITHOUT_BRANCHES]
        changes = {"cuts": tuple(without) or made_for.cuts, "max_segments": 0}  # no branches
        roomy = plan(batch.paths, batch.seq_lens, replace(made_for, **changes))
        assert roomy.num_items > tight.max_items or roomy.num_partials > partials
        assert f"(of {tight.max_items})" in made.degraded and f"(of {partials})" in made.degraded


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


def test_items_stand_by_kind_and_each_kind_by_length() -> None:
    """Wide, heavy and light ones. A wide item takes a whole SM, so that four fifths of the SMs have
    one, or none at all."""
    for spec, has_wide in (("1,1024_2048,32", True), ("1,16,32,64_512,96,160,200", False)):
        tree = Tree.parse(spec)
        made = plan(tree.paths, tree.seq_lens, target(cuts=WITHOUT_BRANCHES))
        tiles, wide = made.items["row_tile"], made.num_wide_items
        heavy = wide + made.num_heavy_items
        assert (tiles[:wide] == 128).all() and (tiles[wide:heavy] == 64).all()
        assert (tiles[heavy:] <= 32).all() and heavy < made.num_items
        assert (wide > 0) == has_wide and (not has_wide or 5 * wide * 8 >= 4 * 132)
        segments = first_segments(made)
        lens = np.where(segments["kv_len"] < 0, tree.tokens[-1], segments["kv_len"])
        for kind in (lens[:wide], lens[wide:heavy], lens[heavy:]):
            assert (kind[1:] <= kind[:-1] * 1.13).all()  # a bucket spans an eighth of an octave


def branched(tree: str, **overrides: Any) -> Plan:
    """In branches of 64 packed rows, 16 queries."""
    found, made_for = Tree.parse(tree), target(cuts=("branches",), **overrides)
    made = plan(found.paths, found.seq_lens, made_for)
    check_plan(made, Batch(found.paths, found.seq_lens), made_for, found.seq_lens)
    return made


def test_plans_are_joint_where_each_heavy_item_has_an_sm() -> None:
    """And nothing else is to be run. Two halves of an SM work on each item then."""
    made = branched("1,64_256,32")
    assert made.joint == 1 and made.num_heavy_items == made.num_items == 4
    assert repr(made).endswith(", joint>")
    tree = Tree((1, 64), (256, 32))
    light = plan([*tree.paths, []], [*tree.seq_lens, 700], target(cuts=("branches",)))
    # Items of 4 packed rows in a tile of 64, which one half runs.
    few_rows = plan([[]] * 4, [4096] * 4, target(row_tiles=(64,), cuts=()))
    verify = target(num_q_heads=64, draft_tokens=8, cuts=())  # 64 packed rows a request
    assert plan([[]] * 16, [2048] * 16, verify).joint == 1
    for other in (
        light,
        few_rows,
        branched("1,64_256,32", items_per_sm=1),
        branched("1,64_256,32", num_sms=31),  # 4 branches x 8 KV heads
        plan([[]] * 17, [2048] * 17, verify),
        plan([], [], target()),
    ):
        assert other.joint == 0


def test_neighbours_with_a_long_common_path_are_paired() -> None:
    """Under each of 16 nodes two branches. 8 pairs x 8 KV heads take about half of the SMs: these
    begin with the common tokens, the next ones with their own. Of three branches a node one has a
    partner under the next node, with which it shares the root alone; of an odd number one has none.
    None are paired that have few common tokens or other roots, that are too few for the SMs or
    stand beside many other tokens, which would run after them, or where an SM has no halves."""
    made = branched("1,4,16,512_1024,256,128,32")
    assert common_tiles(made) == [22] * 8 + [-22] * 8
    assert "1408 tokens with item 1" in str(made) and "1408 tokens with item 0" in str(made)
    odd = branched("1,11,528_512,256,32")
    assert sorted(map(abs, common_tiles(odd))) == [8] * 5 + [12] * 11 and odd.num_items == 33
    tree = Tree.parse("1,512_1024,32")
    paths, lens = [*tree.paths, *([] for _ in range(90))], [*tree.seq_lens, *[1000] * 90]
    for other in (
        plan(paths, lens, target(cuts=("branches",))),
        branched("1,256_1024,32"),  # 16 branches x 8 KV heads, for 132 SMs
        branched("1,512_64,32"),
        branched("32,512_1024,64"),
        branched("1,512_1024,32", items_per_sm=1),
    ):
        assert other.num_paired_items == 0


@pytest.mark.parametrize("policy", ["default", "pat"])
def test_sequences_of_any_length_lose_no_token(policy: str) -> None:
    longest = 2**30
    made = plan([[]], [longest], target(policy=policy))
    segments = np.sort(made.segments, order="kv_start")
    ends = segments["kv_start"][:-1] + segments["kv_len"][:-1]
    assert segments["kv_start"].tolist() == [0, *ends.tolist()] and (ends < longest).all()
    assert segments["kv_len"][-1] < 0 < made.num_items <= 512
