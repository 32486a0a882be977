# SPDX-License-Identifier: Apache-2.0
"""Paired branches: which the scheduler pairs, how a plan lists them, and which no executor runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.cases import Case, case, execute
from kit.cpu import check_any
from kit.pieces import DYNAMIC, Branch, Piece
from kit.plans import BRANCH, COMMON_LAST, UNMASKED_LAST, Damage, HandPlan, paired, set_to
from kit.trees import Batch, check_plan, segments_of, target

from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Plan, plan

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TILE = 64


def planned(tree: str, more: int = 0, **overrides: Any) -> Plan:
    """In branches of 64 packed rows, 16 queries. ``more``: longer tails of every second query."""
    made_for = target(cuts=("branches",), **overrides)
    found = Tree.parse(tree)
    lens = [length + more * (query % 2) for query, length in enumerate(found.seq_lens)]
    made = plan(found.paths, lens, made_for)
    check_plan(made, Batch(found.paths, lens), made_for, lens)
    return made


def common_of(made: Plan) -> list[int]:
    """KV tiles that each pair begins with, negative if its halves begin with their other tokens;
    checks that both have them."""
    first, found = made.num_wide_items, []
    assert made.num_paired_items % 2 == 0 and made.num_paired_items <= made.num_heavy_items
    for index in range(first, first + made.num_paired_items, 2):
        one, other = made.items[index], made.items[index + 1]
        assert one["kind"] == other["kind"] == BRANCH
        tiles = int(one["common_tiles"])
        assert tiles == other["common_tiles"] > 0 and one["order"] == other["order"]
        assert tiles <= min(one["unmasked_tiles"], other["unmasked_tiles"])
        left = TILE * tiles
        for mine, theirs in zip(
            segments_of(made, index), segments_of(made, index + 1), strict=False
        ):
            if left <= 0:
                break
            for name in ("kv_start", "kv_len"):
                assert mine[name] == theirs[name]
            left -= int(mine["kv_len"])
        assert left <= 0
        found.append(-tiles if one["order"] == COMMON_LAST else tiles)
    rest = made.items[first + made.num_paired_items :]
    assert not rest["common_tiles"].any()
    return found


def test_neighbours_with_a_long_common_path_are_paired() -> None:
    """Under each of 16 nodes two branches. 8 pairs x 8 KV heads take about half of the SMs: these
    begin with the common tokens, the next ones with their own."""
    for more in (0, 37):  # the two stand side by side though their tails differ
        made = planned("1,4,16,512_1024,256,128,32", more)
        assert common_of(made) == [22] * 8 + [-22] * 8
    text = str(made)
    assert "1408 tokens with item 1" in text and "1408 tokens with item 0" in text


def test_pairs_have_the_most_in_common() -> None:
    """Three branches a node, of which one stays alone or has a partner under the next node, with
    which it shares the root alone."""
    made = planned("1,10,480_512,256,32")
    assert sorted(abs(tiles) for tiles in common_of(made)) == [8] * 5 + [12] * 10
    # Of an odd number one stays alone.
    odd = planned("1,11,528_512,256,32")
    assert odd.num_paired_items == 32 < odd.num_items == 33
    assert sorted(abs(tiles) for tiles in common_of(odd)) == [8] * 5 + [12] * 11


def test_what_is_not_paired() -> None:
    """Branches with few common tokens or other roots, too few for the SMs, halves that there are
    not, and those beside many other tokens, which would run after them."""
    assert planned("1,512_1024,32").num_paired_items == 32
    assert planned("1,512_64,32").num_paired_items == 0
    assert planned("32,512_1024,64").num_paired_items == 0
    few = planned("1,256_1024,32")  # 16 branches x 8 KV heads, for 132 SMs
    assert few.joint == 1 and few.num_paired_items == 0
    assert planned("1,512_1024,32", items_per_sm=1).num_paired_items == 0
    tree = Tree.parse("1,512_1024,32")
    paths, lens = [*tree.paths, *([] for _ in range(90))], [*tree.seq_lens, *[1000] * 90]
    assert plan(paths, lens, target(cuts=("branches",))).num_paired_items == 0


def two_branches() -> tuple[Case, HandPlan]:
    """Queries 0 to 3 and 4 to 7 with 200 common tokens and 60 of each four's own."""
    pieces = [Piece(tuple(range(8)), 0, 200)]
    parts = []
    for first in (0, 4):
        mine = tuple(range(first, first + 4))
        own = [Piece(mine, 200, 60), *(Piece((query,), 260, DYNAMIC) for query in mine)]
        pieces += own
        parts.append(Branch((Piece(mine, 0, 200), *own)))
    inputs = replace(case(pieces, (8, 2), tails=(0, 5, 70)), pieces=parts)
    return inputs, inputs.plan()


@pytest.mark.parametrize("tiles", [1, 3, -3])
def test_the_cpu_executor_runs_them_one_by_one(tiles: int) -> None:
    inputs, hand = two_branches()
    check_any(inputs, paired(hand, tiles))


def _shorter_for_the_second(hand: HandPlan) -> None:
    """The second branch begins with 150 of the common tokens, and has the others behind them."""
    first = int(hand.item_segments["first_segment"][1])
    hand.segments["kv_len"][first] = hand.segments["room"][first] = 150
    hand.segments["kv_start"][first + 1] = 150
    hand.segments["kv_len"][first + 1] = hand.segments["room"][first + 1] = 110


DAMAGE: list[tuple[Damage, str]] = [
    (set_to("header", 0, "num_paired_items", 1), "1 paired items of 2 heavy ones, .* must be even"),
    (set_to("header", 0, "num_paired_items", -2), "-2 paired items"),
    (set_to("header", 0, "num_paired_items", 4), "4 paired items of 2"),
    (set_to("header", 0, "joint", 1), "2 paired items of 2 heavy ones, joint is 1"),
    (set_to("items", 0, "common_tiles", 0), "items 0 and 1 are paired with 0 and 3 common tiles"),
    (set_to("items", 1, "common_tiles", -3), "with 3 and -3 common tiles"),
    (set_to("items", 1, "order", COMMON_LAST), "3 and 3 common tiles and orders 0 and 2"),
    (set_to("items", slice(0, 2), "order", UNMASKED_LAST), "branch 0 of order 1 has 4 KV tiles"),
    (set_to("items", 1, "unmasked_tiles", 2), "that begin with as many unmasked tiles"),
    (set_to("items", 1, "row_tile", 32), "must be branches of one row tile"),
    (_shorter_for_the_second, r"begin with tokens 0 \+ 200 and 0 \+ 150, must be the same"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=[named for _, named in DAMAGE])
def test_damaged_pairs_are_refused(damage: Damage, named: str) -> None:
    """The halves of an SM would wait for each other forever."""
    inputs, hand = two_branches()
    hand = paired(hand, 3)
    check_any(inputs, hand)
    damage(hand)
    with pytest.raises(ValueError, match=named):
        execute(inputs, hand.encode())
