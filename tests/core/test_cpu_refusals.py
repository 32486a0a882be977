# SPDX-License-Identifier: Apache-2.0
"""Plans and arguments that the CPU executor refuses, before it reads or writes anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.cases import case, count_refused, execute
from kit.cpu import check
from kit.pieces import shared, single
from kit.plans import Damage, HandPlan, set_to

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _one_token_less(plan: HandPlan) -> None:
    """The first piece, of 20 tokens, without its last."""
    plan.segments["kv_len"][0] = plan.segments["room"][0] = 19


# On shared(3, 40, splits=2): items 0 and 1 of all three queries, then three tails; 9 partials.
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (set_to("header", 0, "magic", 1), "not a plan: magic 1"),
        (set_to("header", 0, "version", 11), "plan version 11"),
        (set_to("header", 0, "total_bytes", 1 << 20), "truncated plan"),
        (set_to("header", 0, "num_q_heads", 16), "16 query"),
        (set_to("header", 0, "num_kv_heads", 1), "1 KV heads"),
        (set_to("header", 0, "num_queries", 2), "2 queries"),
        (set_to("header", 0, "num_items", -1), "-1 items"),
        (set_to("header", 0, "num_items", 2**31 - 1), "2147483647 items"),
        (set_to("header", 0, "items_offset", -64), "items at byte -64"),
        (set_to("header", 0, "items_offset", 66), "items at byte 66"),
        (set_to("header", 0, "members_offset", 2**31 - 4), "members at byte"),
        (set_to("header", 0, "queries_offset", 0), "queries at byte 0"),
        (set_to("header", 0, "num_partials", -1), "-1 partials"),
        (set_to("header", 0, "num_partials", 1 << 30), "1073741824 partials"),
        (set_to("header", 0, "num_partials", 8), "partials 6 \\+ 3 of 8"),
        (set_to("items", 0, "member_offset", -1), "item 0 has members -1"),
        (set_to("items", 1, "member_offset", 2**31 - 1), "item 1 has members 2147483647"),
        (set_to("items", 1, "member_offset", 0), "item 1 writes partial 0"),
        (set_to("items", 0, "num_queries", 0), "item 0 has members 0 \\+ 0"),
        (set_to("items", 0, "num_queries", 2**31 - 1), "members 0 \\+ 2147483647"),
        (set_to("segments", 0, "query", 3), "of query 3 of 3"),
        (set_to("segments", 0, "query", -1), "of query -1 of 3"),
        (set_to("segments", 0, "kv_start", -5), "tokens -5 \\+ "),
        (set_to("segments", 0, "kv_start", 2**31 - 1), "item 0 reads tokens 2147483647"),
        (set_to("segments", 0, "kv_len", 0), "tokens 0 \\+ 0 of"),
        (set_to("segments", 0, "kv_len", -1), "item 0 of 3 queries"),
        (set_to("segments", 0, "kv_len", 2**31 - 1), "tokens 0 \\+ 2147483647 of"),
        (_one_token_less, "covers 69 tokens of query 0, whose length is 70"),
        (set_to("segments", 0, "room", 21), "tokens 0 \\+ 20 of 21"),
        (set_to("segments", 0, "num_queries", 2), "has tokens for 2 of its 3 queries"),
        (set_to("segments", 0, "first_member", 1), "a segment for 1 \\+ 3"),
        (set_to("items", 0, "kind", 4), "item 0 is of kind 4"),
        (set_to("items", 0, "order", 3), "item 0 is of order 3"),
        (set_to("items", 0, "kind", 0), "item 0 of 3 queries is of query -1"),
        (set_to("items", 0, "list_start", -1), "tokens -1 \\+ 20 of the list"),
        (set_to("item_segments", 0, "num_segments", 2), "segments 0 \\+ 2 of 5"),
        (set_to("item_segments", 0, "first_segment", 5), "segments 5 \\+ 1 of 5"),
        (set_to("header", 0, "list_tokens", 30), "of the list, must be in 0 to 30"),
        (set_to("header", 0, "list_tokens", -1), "a list of -1 tokens"),
        (set_to("segments", 2, "kv_start", 71), "item 2 reads tokens 71"),
        (set_to("members", 0, "query", 3), "query 3 of 3"),
        (set_to("members", 0, "query", -1), "query -1 of 3"),
        (set_to("members", 0, "query", 1), "writes partial 0 of query 1"),
        (set_to("members", 0, "partial", 9), "writes partial 9"),
        (set_to("members", 0, "partial", -1), "writes partial -1"),
        (set_to("members", 0, "partial", 1), "item 1 writes partial 1"),
        (set_to("queries", 0, "num_splits", -1), "partials 0 \\+ -1"),
        (set_to("queries", 0, "num_splits", 1), "has one split"),
        (set_to("queries", 0, "num_splits", 4), "member of 3 items and has 4 splits"),
        (set_to("queries", 2, "partial_offset", 2**31 - 1), "partials 2147483647"),
    ],
)
def test_damaged_plans_are_refused(damage: Damage, named: str) -> None:
    inputs = case(shared(3, 40, splits=2), tails=(30,))
    plan = inputs.plan()
    check(inputs, hand=plan)
    damage(plan)
    with pytest.raises(ValueError, match=named):
        execute(inputs, plan.encode())


def test_random_damage_never_crashes() -> None:
    """Any change of a plan's words runs or raises ValueError."""
    inputs = case(shared(3, 40, splits=2), tails=(30,))
    plan = inputs.plan()
    assert count_refused(inputs, plan, [-1, 0, 1, 2, 3]) > 1000
    check(inputs, hand=plan)


def test_a_cut_plan_is_refused() -> None:
    inputs = case(shared(3, 40))
    plan = inputs.plan()
    for size in (0, 63, 64, plan.nbytes - 8):
        with pytest.raises(ValueError, match="bytes"):
            execute(inputs, plan, plan_bytes=size)
    with pytest.raises(ValueError, match="null"):
        execute(inputs, plan, plan=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 60}, "head_dim is 60"),
        ({"head_dim": 520}, "head_dim is 520"),
        ({"v_head_dim": 0}, "v_head_dim is 0"),
        ({"num_queries": -1}, "num_queries is -1"),
        ({"num_queries": 2**40}, "num_queries is 1099511627776"),
        ({"num_queries": 2}, "for 3 queries, the arguments have 2"),
        ({"num_q_heads": 9}, "9 query heads do not divide into 2"),
        ({"num_q_heads": 8192}, "8192 query heads"),
        ({"num_kv_heads": 0}, "0 KV heads"),
        ({"dtype": 3}, "dtype is 3"),
        ({"kv_dtype": 2}, "kv_dtype is 2, must be 0 .* or 1"),
        ({"k_scale": 0.0}, "k_scale is 0, must be finite and more than 0"),
        ({"v_scale": float("inf")}, "v_scale is inf, must be finite"),
        ({"v_scale": 2.0}, "v_scale is 2, must be 1 where K and V are of q's"),
        ({"partial_dtype": 2}, "partial_dtype is 2"),
        ({"logit_cap": -1.0}, "logit_cap is -1"),
        ({"logit_cap": float("nan")}, "logit_cap is nan"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"num_threads": 5000}, "num_threads is 5000"),
        ({"num_slots": -1}, "num_slots -1"),
        ({"q": (0, 1, 1)}, "null pointer: q 0"),
        ({"rows": 0}, "null pointer"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes: dict[str, object], named: str) -> None:
    inputs = case(shared(3, 40))
    with pytest.raises(ValueError, match=named):
        execute(inputs, **changes)  # type: ignore[arg-type]


def test_rows_and_lengths_outside_the_table_are_refused() -> None:
    inputs = case(shared(3, 40), tails=(30,))
    for name, value, named in (
        ("rows", 99, "query 1: row 99"),
        ("rows", -1, "query 1: row -1"),
        ("seq_lens", 1000, "query 1: length 1000"),
        ("seq_lens", -1, "query 1: length -1"),
        ("seq_lens", 39, "make a new one"),
    ):
        wrong = getattr(inputs, name).clone()
        wrong[1] = value
        with pytest.raises(ValueError, match=named):
            execute(replace(inputs, **{name: wrong}))


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("slot", [-1, 10**9])
@pytest.mark.parametrize("token", [0, 100, 149])
def test_slots_outside_the_cache_are_refused(group: int, slot: int, token: int) -> None:
    inputs = case(single(150), (group, 1))
    table = inputs.table.clone()
    table[inputs.rows[0], token] = slot
    with pytest.raises(ValueError, match=r"item 0 names a slot outside of the K/V cache of 200"):
        execute(replace(inputs, table=table))
