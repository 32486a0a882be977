# SPDX-License-Identifier: Apache-2.0
"""Where the default cuts items: into how many pieces, by the GPU and by what runs beside them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kit.trees import target

from sglang_pat.planner import Plan, plan


def test_splits_fill_the_machine() -> None:
    one = plan([[]], [131072], target())
    assert 0.9 * 264 <= one.num_items * 8 <= 264  # eight KV heads, two halves of 132 SMs
    many = plan([[]] * 1024, [1024] * 1024, target())
    assert many.num_items == 1024
    ragged = plan([[]] * 64, [32768] + [200] * 63, target())
    assert ragged.num_items > 64 + 8


def most_splits(queries: int, **overrides: Any) -> int:
    """Of one long query among short ones, with eight query heads a query."""
    made_for = target(num_q_heads=8, num_kv_heads=1, **overrides)
    made = plan([[]] * queries, [65536] + [100] * (queries - 1), made_for)
    return int(made.queries["num_splits"].max())


def test_a_query_has_fewer_splits_where_the_merge_joins_fewer_at_once() -> None:
    """A warp joins the splits of a batch of many heads round by round (csrc/merge_rule.h)."""
    by_size = [most_splits(queries) for queries in (1, 20, 64, 300)]
    assert by_size[0] > by_size[1] > by_size[2] > by_size[3] > 1
    free = [most_splits(queries, merge_round_s=0.0) for queries in (1, 20, 64, 300)]
    assert free[0] == by_size[0] and free[3] > 2 * by_size[3]


def test_items_are_longer_where_an_sm_alone_is_fast() -> None:
    # Plans for three query heads a KV head are not simulated: they are the cost model's.
    of_speed = [target(num_q_heads=24, sm_speedup=speed) for speed in (1.0, 1.6, 4.0)]
    items = [plan([[]], [65536], made_for).num_items for made_for in of_speed]
    assert items[0] > items[1] > items[2] > 1


def test_items_fill_the_slots_of_the_sms() -> None:
    """Sixteen long queries of eight KV heads are 128 work units, one for each of 132 SMs; with two
    slots an SM each query is cut in two, as more units use more of the memory's speed. Twenty are
    160: a wave and a fifth of SMs with one slot; with two slots less than a wave, but some SMs
    would have two units that share what it can read, and others one."""
    for queries, slots, expected in ((16, 2, 32), (20, 2, 80), (16, 1, 16), (20, 1, 60)):
        made = plan([[]] * queries, [65536] * queries, target(items_per_sm=slots))
        assert made.num_items == expected


@pytest.mark.parametrize("heads", [(8, 1), (16, 2)])
def test_long_requests_are_cut_into_an_equal_part_for_each_half(heads: tuple[int, int]) -> None:
    """Requests of a trace: different lengths behind a short common prompt. The parts of a request
    are as long as those of another, but for the last one."""
    rng = random.Random(0)
    lengths = [rng.randint(1000, 16_000) for _ in range(64)]
    options = {"num_q_heads": heads[0], "num_kv_heads": heads[1]}
    made = plan([[(0, 0, 500)]] * 64, lengths, target(**options))
    of_half = (sum(lengths) - 63 * 500) * heads[1] / 264
    assert of_half <= longest_item(made, lengths) < of_half + 64
    # The last part of each request is shorter.
    assert 264 <= made.num_items * heads[1] <= 264 + 65 * heads[1]


def test_wide_items_of_one_query_have_an_sm_for_themselves() -> None:
    """So that they are not split as if two of them shared one: 16 query heads of one KV head and 8
    draft tokens are 128 packed rows, and the 132 SMs have an item each, or nearly."""
    options: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 1, "draft_tokens": 8}
    for queries in (5, 8, 9):
        made = plan([[]] * queries, [8192] * queries, target(**options))
        assert 120 <= made.num_items <= 132


def longest_item(made: Plan, seq_lens: list[int]) -> int:
    """Tokens of the longest item that is no branch."""
    ends = np.asarray(seq_lens)[made.segments["query"]]
    tail = made.segments["kv_len"] < 0
    tokens = np.where(tail, ends - made.segments["kv_start"], made.segments["kv_len"])
    single = made.item_segments["num_segments"] == 1
    return int(tokens[made.item_segments["first_segment"][single]].max())


@pytest.mark.parametrize("short", [16, 20, 24])
def test_a_short_common_beginning_leaves_long_items_as_they_are(short: int) -> None:
    """Two long items on an SM share what it can read, so they are cut until none has much more than
    its share, also where all requests begin with the same 512 tokens of 12,000."""
    lens = [1000 + 25 * i for i in range(short)]
    lens += np.linspace(2000, 16000, 64 - short).astype(int).tolist()
    made_for = target(num_q_heads=16, num_kv_heads=2, max_queries=64)
    made = plan([[(1, 0, 512)]] * 64, lens, made_for)
    assert made.num_shared_items > 0
    share = sum(lens) * made_for.num_kv_heads / (2 * made_for.num_sms)
    assert longest_item(made, lens) < 1.5 * share
