# SPDX-License-Identifier: Apache-2.0
"""Properties of plans for random batches, their cuts, the order of their items, and how they are
printed; no GPU, no SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import latents
from kit.trees import (
    Batch,
    batches,
    check_plan,
    common_tiles,
    content,
    first_segments,
    packed_rows,
    ranges_of,
    segments_of,
    target,
    targets,
)

from benchmarks.common.forests import Tree
from sglang_pat import _C
from sglang_pat.planner import Plan, Planner, plan
from sglang_pat.target import CUTS, WITHOUT_BRANCHES, Target


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
    """Work units of about one length for each SM, or half."""
    made = plan([[]], [131072], target(cuts=(cut,)))
    assert 0.9 * parts < made.num_items * 8 <= parts


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


SMALL = """\
<Plan: 3 queries, 8 query and 2 KV heads, 5 items (2 shared), 8 partial results>
tree:
  tokens [0, 600) of queries 0-2
    tokens [600, 900) of queries 0, 2
      tokens [900, end of sequence) of query 0
      tokens [900, end of sequence) of query 2
    tokens [600, end of sequence) of query 1
items, in the order in which they begin:
"""


def test_a_printed_plan_shows_its_tree_and_its_items() -> None:
    paths = [[(1, 0, 600), (2, 600, 900)], [(1, 0, 600)], [(1, 0, 600), (2, 600, 900)]]
    planner = Planner(target(num_sms=1, num_q_heads=8, num_kv_heads=2))
    planner.plan(paths, [950, 640, 910])
    made = planner.plan_packs([950, 640, 910], [False] * 5, [1000] * 5)
    assert repr(made) == SMALL.splitlines()[0] and str(made).startswith(SMALL)
    first, *others = str(made).removeprefix(SMALL).splitlines()
    row, tile = first_segments(made)[0]["query"], made.items[0]["row_tile"]
    assert " ".join(first.split()) == (
        f"item 0: light queries 0-2 tokens [0, 600) in the row of query {row} "
        f"tile of {tile} rows, to partials 0, 3, 5"
    )
    assert len(others) == made.num_items - 1
    # At most 25 lines of the tree and of the items.
    many = str(plan([[]] * 100, [50] * 100, target())).splitlines()
    assert len(many) == 2 * 25 + 3 and many[-1].startswith("  ... and 76 more items")
    empty, private = plan([], [], target()), plan([[]], [5], target())
    assert str(empty) == repr(empty)
    assert "to output" in str(private) and repr(private).startswith("<Plan: 1 query, 32 query and")


@settings(max_examples=80)
@given(batches(), st.sampled_from([1, 8, 16, 20, 64]), st.integers(1, 3), st.booleans())
def test_items_of_latents_are_units_of_the_kernel(
    batch: Batch, heads: int, draft_tokens: int, hopper: bool
) -> None:
    """One row tile, of 64 rows, that an SM runs alone."""
    draft_tokens = 1 if heads * draft_tokens > 64 else draft_tokens
    batch = batch.drafted(draft_tokens)
    made_for = latents.target(heads, draft_tokens=draft_tokens, hopper=hopper)
    made = plan(batch.paths, batch.seq_lens, made_for)
    check_plan(made, batch, made_for, batch.seq_lens)
    assert (made.items["row_tile"] == 64).all()
    assert (made.items["num_queries"] * packed_rows(made_for) <= 64).all()
    assert made.num_heavy_items == made.num_items
    assert made.joint == made.num_wide_items == made.num_paired_items == 0


def test_packs_of_latents_fill_units() -> None:
    """Four queries of 16 heads are one; the fifth reads the node with its tail, as that costs a
    unit anyway, and has no partials then."""
    for queries, partials in ((4, 8), (5, 8), (8, 16)):
        made = plan([[(1, 0, 640)]] * queries, [700] * queries, latents.target(16, cuts=()))
        assert made.num_partials == partials
    # Heads that fill a unit have nothing to pack.
    alone = plan([[(1, 0, 640)]] * 8, [700] * 8, latents.target(64, cuts=()))
    assert alone.num_shared_items == alone.num_partials == 0
