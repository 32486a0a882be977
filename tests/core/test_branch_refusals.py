# SPDX-License-Identifier: Apache-2.0
"""Damaged branches, which no executor runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.cases import by_hand, case, count_refused, execute, grown
from kit.cpu import check_any as check
from kit.pieces import Branch, Piece, forest, prefix
from kit.plans import Damage, HandPlan, joint, set_to

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _few_for_the_last(hand: HandPlan) -> None:
    """The shared tokens for three of four queries, and that told."""
    hand.items["unmasked_tiles"][0] = 0
    hand.segments["num_queries"][0] = 3


# Of prefix(4, 100) with two heads a group: item 0 with segments 0 (shared) and 1 to 4 (tails).
DAMAGE: list[tuple[Damage, str]] = [
    (set_to("header", 0, "num_segments", -1), "-1 segments"),
    (set_to("header", 0, "num_segments", 2**31 - 1), "2147483647 segments"),
    (set_to("header", 0, "num_segments", 4), r"segments 0 \+ 5 of 4"),
    (set_to("header", 0, "segments_offset", 0), "segments at byte 0"),
    (set_to("header", 0, "segments_offset", 2**31 - 8), "segments at byte 2147483640"),
    (
        set_to("header", 0, "branch_tokens", 1088),
        r"tokens 0 \+ 1124 of the list, must be in 0 to 1088",
    ),
    (set_to("item_segments", 0, "first_segment", -1), r"segments -1 \+ 5 of 5"),
    (set_to("item_segments", 0, "first_segment", 1), r"segments 1 \+ 5 of 5"),
    (set_to("item_segments", 0, "first_segment", 2**31 - 1), r"segments 2147483647 \+ 5 of 5"),
    (set_to("item_segments", 0, "num_segments", 0), r"segments 0 \+ 0 of 5"),
    (set_to("item_segments", 0, "num_segments", 257), r"segments 0 \+ 257 of 5"),
    (set_to("items", 0, "list_start", -64), r"tokens -64 \+ 1124"),
    (set_to("items", 0, "list_start", 32), r"tokens 32 \+ 1124 of the list, must be in 0 to 1152"),
    (set_to("items", 0, "list_start", 64), r"tokens 64 \+ 1124 of the list, must be in 0 to 1152"),
    (set_to("items", 0, "num_queries", 5), r"item 0 has members 0 \+ 5 of 4"),
    (set_to("segments", 0, "query", -1), "of query -1 of 4"),
    (set_to("segments", 0, "query", 4), "of query 4 of 4"),
    (set_to("segments", 0, "kv_start", -1), r"tokens -1 \+ 100"),
    (set_to("segments", 0, "kv_len", 0), r"tokens 0 \+ 0 of 100"),
    (set_to("segments", 0, "kv_len", -1), r"for 0 \+ 4, tokens 0 \+ -1"),
    (set_to("segments", 0, "room", 101), r"tokens 0 \+ 100 of 101"),
    (set_to("segments", 1, "room", 0), r"tokens 100 \+ -1 of 0"),
    (set_to("segments", 1, "room", 9), r"has room for 9 tokens of query 0, which has 30 from 100"),
    (set_to("segments", 0, "first_member", -1), r"of 4 queries has a segment for -1 \+ 4"),
    (set_to("segments", 0, "first_member", 1), r"of 4 queries has a segment for 1 \+ 4"),
    (set_to("segments", 0, "num_queries", 0), r"segment for 0 \+ 0"),
    (set_to("segments", 0, "num_queries", 5), r"segment for 0 \+ 5"),
    (set_to("segments", 0, "num_queries", 2**31 - 1), r"segment for 0 \+ 2147483647"),
    (
        set_to("segments", 0, "num_queries", 3),
        "has 1 KV tiles of 64 tokens for all .* of 0 tokens at",
    ),
    (_few_for_the_last, "covers 30 tokens of query 3, whose length is 130"),
    (set_to("segments", 1, "query", 2), "the tail of query 2 for query 0"),
    (set_to("segments", 1, "kv_start", 99), "covers 131 tokens of query 0, whose length is 130"),
    (set_to("segments", 1, "kv_start", 2**31 - 1), "reads tokens 2147483647"),
    (set_to("members", 0, "query", 1), "the tail of query 0 for query 1"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=[named for _, named in DAMAGE])
def test_damaged_branches_are_refused(damage: Damage, named: str) -> None:
    inputs = by_hand(prefix(4, 100), (4, 2), tails=(30,))
    hand = inputs.plan()
    check(inputs, hand)
    damage(hand)
    with pytest.raises(ValueError, match=named):
        execute(inputs, hand.encode())


def test_too_many_packed_rows_are_refused() -> None:
    inputs = by_hand(prefix(9, 40), (8, 1), most=8, tails=(5,))
    hand = inputs.plan()
    check(inputs, hand)
    hand.items["num_queries"][0] = 9
    with pytest.raises(ValueError, match="branch 0 has 72 packed rows, at most 64"):
        execute(inputs, hand.encode())


@pytest.mark.parametrize("value", [-1, 2])
def test_joint_is_0_or_1(value: int) -> None:
    inputs = by_hand(prefix(4, 100), (4, 2), tails=(30,))
    hand = inputs.plan()
    check(inputs, joint(hand))
    set_to("header", 0, "joint", value)(hand)
    with pytest.raises(ValueError, match=f"joint is {value} beside 1 heavy items of 1"):
        execute(inputs, hand.encode())


def test_joint_plans_have_heavy_items_of_a_row_tile() -> None:
    light = case([Piece((0, 1), 0, 100)], (4, 2))
    with pytest.raises(ValueError, match="joint is 1 beside 0 heavy items of 1"):
        execute(light, joint(light.plan()))
    # 100 packed rows, which an executor without wide items runs in parts
    many = case([Piece(tuple(range(100)), 0, 70)], (1, 1))
    check(many, many.plan())
    with pytest.raises(
        ValueError, match="item 0 of a joint plan has 100 packed rows, must have 17 to 64"
    ):
        execute(many, joint(many.plan()))


def test_a_tail_beyond_its_room_is_refused() -> None:
    pieces = prefix(3, 40)
    inputs = replace(case(pieces, (4, 2), tails=(31,)), pieces=[Branch(tuple(pieces), room=31)])
    check(inputs, inputs.plan())
    longer = grown(inputs, [71, 72, 71])
    with pytest.raises(ValueError, match="room for 31 tokens of query 1, which has 32 from 40 on"):
        execute(longer)


def test_random_damage_never_crashes() -> None:
    """Any change of a plan's words runs or raises ValueError."""
    inputs = by_hand(forest(np.random.default_rng(1), 6), (4, 2), most=3)
    hand = inputs.plan()
    assert count_refused(inputs, hand, [-2, -1, 0, 1, 2, 3, 64]) > 1000
    check(inputs, hand)
