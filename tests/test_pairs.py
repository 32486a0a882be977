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
from kit.trees import batch_of, check_plan, segments_of

from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Plan, plan
from sglang_pat.target import Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TILE = 64


def h200(heads: tuple[int, int] = (32, 8), **overrides: Any) -> Target:
    values = {"max_queries": 1024} | overrides
    return Target.h200(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, **values)


def planned(tree: str, target: Target) -> Plan:
    batch = batch_of(Tree.parse(tree))
    made = plan(batch.paths, batch.seq_lens, target)
    check_plan(made, batch, target, batch.seq_lens)
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
    """Under each of 16 nodes two branches of 16 queries. 8 pairs x 8 KV heads take about half of
    the SMs: these begin with the common tokens, the next ones with their own."""
    common = common_of(planned("1,4,16,512_1024,256,128,32", h200()))
    assert common == [22] * 8 + [-22] * 8


def test_pairs_have_the_most_in_common() -> None:
    """Three branches a node, of which one stays alone or has a partner under the next node, with
    which it shares the root alone."""
    made = planned("1,10,480_512,256,32", h200())
    assert sorted(abs(tiles) for tiles in common_of(made)) == [8] * 5 + [12] * 10
    # Of an odd number one stays alone.
    odd = planned("1,11,528_512,256,32", h200(branching="always", branch_rows=(64,)))
    assert odd.num_paired_items == 32 < odd.num_items == 33
    assert sorted(abs(tiles) for tiles in common_of(odd)) == [8] * 5 + [12] * 11


def test_few_common_tokens_make_no_pair() -> None:
    assert planned("1,512_320,32", h200()).num_paired_items == 32
    assert planned("1,512_319,32", h200()).num_paired_items == 0
    roots = planned("32,512_1024,64", h200())  # a branch each
    assert roots.num_paired_items == 0 and (roots.items["kind"] == BRANCH).all()


def test_pairs_take_four_fifths_of_the_sms_at_least() -> None:
    few = planned("1,256_1024,32", h200())  # 16 branches x 8 KV heads, for 132 SMs
    assert few.joint == 1 and few.num_paired_items == 0
    assert planned("1,432_1024,32", h200()).num_paired_items == 0  # 13 pairs x 8 KV heads
    assert planned("1,448_1024,32", h200()).num_paired_items == 28
    one_half = h200(items_per_sm=1)
    assert planned("1,512_1024,32", one_half).num_paired_items == 0


def test_no_pairs_beside_many_other_tokens() -> None:
    """They would run before the others, which are better run beside them."""
    batch = batch_of(Tree.parse("1,512_1024,32"))
    tokens = 32 * (1024 + 16 * 32)  # of the branches
    for alone, paired_items in ((1, 32), (tokens // 16 // 1000 + 1, 0)):
        paths = [*batch.paths, *([] for _ in range(alone))]
        made = plan(paths, [*batch.seq_lens, *[1000] * alone], h200())
        assert made.num_paired_items == paired_items


def test_queries_of_unlike_lengths() -> None:
    """The two of a pair stand side by side though their tails differ by a lot."""
    batch = batch_of(Tree.parse("1,512_1024,32"))
    lens = [length + 37 * (query % 29) for query, length in enumerate(batch.seq_lens)]
    made = plan(batch.paths, lens, h200())
    assert [abs(tiles) for tiles in common_of(made)] == [16] * 16


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


def test_a_pair_is_shown() -> None:
    made = planned("1,4,16,512_1024,256,128,32", h200())
    text = str(made)
    assert "1408 tokens with item 1" in text and "1408 tokens with item 0" in text
