# SPDX-License-Identifier: Apache-2.0
"""Which packs pay: the rules of the paper computed again, the byte rule, and explicit plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.trees import Batch, batches, check_plan, packed_rows, ranges_of_query, target

from sglang_pat.planner import Planner, plan


def papers_packs(nodes: list[Any], of_queries: list[int], lens: list[int]) -> list[list[int]]:
    """[start, end, queries, pack above or -1] of the nodes, then of the tails, by equations 1 and 2
    of PAT section 5.1: a child merges where that saves as much as its split."""
    packs = [[start, end, queries, parent] for parent, start, end, queries in nodes]
    for node, length in zip(of_queries, lens, strict=True):
        start = nodes[node][2] if node >= 0 else 0
        packs.append([start, length, int(length > start), node])
    for u in range(len(nodes)):
        children = [i for i, pack in enumerate(packs) if pack[3] == u and pack[2] > 0]
        tokens, left = packs[u][1] - packs[u][0], packs[u][2]
        above = packs[u][3]
        for child in children:
            start, end, size, _ = packs[child]
            rest, whole = left - size, end - packs[u][0]
            split = (left - 1) * tokens - 4 * left + (size - 1) * (end - start)
            if (rest - 1) * tokens - 4 * rest + (size - 1) * whole >= split:
                packs[child][0], packs[child][3], left = packs[u][0], above, rest
        packs[u][2] = left
    return packs


def papers_ranges(batch: Batch, planner: Planner, row_tile: int) -> list[list[tuple[int, int]]]:
    """Start and length, -1 to the end of the sequence, of what each query's items read: packs in
    equal pieces of at most the mean (section 6), a pack counted once for each row tile."""
    nodes, of_queries = planner.last_tree()
    packs = papers_packs(nodes, of_queries, batch.seq_lens)
    most = row_tile // packed_rows(planner.target)
    tiles = [-(-queries // most) for _, _, queries, _ in packs]
    tokens = sum(n * (end - start) for n, (start, end, *_) in zip(tiles, packs, strict=True))
    mean = max(tokens // max(sum(tiles), 1), 1)
    found = []
    for query in range(len(batch.seq_lens)):
        tail, ranges = len(nodes) + query, []
        at = tail if packs[tail][2] > 0 else packs[tail][3]
        while at >= 0:
            start, end, _, above = packs[at]
            size = -(-(end - start) // -(-(end - start) // mean))
            ranges += [(a, b - a) for a, b in pairwise([*range(start, end, size), end])]
            if at == tail:
                ranges[-1] = (ranges[-1][0], -1)
            at = above
        found.append(sorted(ranges))
    return found


@settings(max_examples=100)
@given(batches(), st.sampled_from([8, 32]), st.sampled_from([(16, 64), (16, 32, 64, 128)]))
def test_the_papers_rules(batch: Batch, num_q_heads: int, row_tiles: tuple[int, ...]) -> None:
    room = {"max_items": 1 << 18, "max_partials": 1 << 18}
    made_for = target(policy="pat", num_q_heads=num_q_heads, row_tiles=row_tiles, **room)
    planner = Planner(made_for)
    made = planner.plan(batch.paths, batch.seq_lens)
    assert np.isfinite(made.seconds)
    found = [ranges_of_query(made, query) for query in range(len(batch.seq_lens))]
    # A plan without wide items has none of their row tiles.
    expected = papers_ranges(batch, planner, 128 if made.num_wide_items else 64)
    for query, ranges in enumerate(found):
        if batch.seq_lens[query] > 0:
            assert ranges == expected[query]


# One SM, and neither overhead nor a cache, so that bytes are all there is.
BYTES: dict[str, Any] = {"num_sms": 1, "item_overhead_s": 1e-12, "reread_weight": 1.0, "cuts": ()}


def test_the_byte_rule_counts_group_tiles_and_partials() -> None:
    def splits(shared: int, queries: int, **overrides: Any) -> int:
        made_for = target(**(BYTES | overrides))
        made = plan([[(1, 0, shared)]] * queries, [shared + 40] * queries, made_for)
        return int(made.queries["num_splits"].max())

    # Two queries, one shared node of L tokens: packing saves one read of 512 L bytes and costs four
    # partials of 2 g (4 d + 4) bytes in fp32, half in bf16: break-even at 8.06 g tokens.
    for num_q_heads, group in ((8, 1), (32, 4), (64, 8)):
        assert splits(8 * group, 2, num_q_heads=num_q_heads) == 1
        assert splits(9 * group, 2, num_q_heads=num_q_heads) == 2
        assert splits(5 * group, 2, num_q_heads=num_q_heads, partial_bytes=2) == 2
    # 17 queries of 8 heads need two tiles of 128 rows: the 17th reads the node by itself for free.
    alone = target(num_q_heads=64, num_sms=1, item_overhead_s=1e-12, cuts=())
    made = plan([[(1, 0, 400)]] * 17, [440] * 17, alone)
    assert sorted(made.queries["num_splits"].tolist()) == [1] + [2] * 16


@settings(max_examples=40)
@given(batches(8, 8), st.integers(0, 2**32), st.integers(1, 6))
def test_explicit_plans(batch: Batch, seed: int, draft_tokens: int) -> None:
    """Any choice of packs and pieces reads every token once, and is judged."""
    batch = batch.drafted(draft_tokens)
    room = {"max_items": 1 << 18, "max_partials": 1 << 18}
    made_for = target(draft_tokens=draft_tokens, num_q_heads=8, **room)
    planner = Planner(made_for)
    planner.plan(batch.paths, batch.seq_lens)
    nodes, _ = planner.last_tree()
    rng = np.random.default_rng(seed)
    packs = len(nodes) + len(batch.seq_lens)
    takes_over = (rng.random(packs) < 0.5).tolist()
    pieces = rng.choice([-1, 0, 1, 64, 300, 2**31 - 1], packs).tolist()
    made = planner.plan_packs(batch.seq_lens, takes_over, pieces)
    assert made.seconds > 0 and not made.degraded and made.branch_tokens == 0
    check_plan(made, batch, made_for, batch.seq_lens)


def test_explicit_plans_that_are_refused() -> None:
    lens = [700, 900, 650]
    planner = Planner(target(max_queries=4, max_partials=5, max_items=4))
    for _ in range(2):  # before any plan, and after one that was refused
        with pytest.raises(ValueError, match="there is no last plan, or it has raised"):
            planner.last_tree()
        with pytest.raises(ValueError, match="3 sequence lengths do not belong to the last plan"):
            planner.plan_packs(lens, [0] * 4, [512] * 4)
        with pytest.raises(ValueError, match="beyond its sequence"):
            planner.plan([[(1, 0, 900)]] * 3, lens)
    planner.plan([[(1, 0, 600)]] * 3, lens)
    with pytest.raises(ValueError, match="3 and 4 values for 4 nodes and queries"):
        planner.plan_packs(lens, [0] * 3, [512] * 4)
    with pytest.raises(ValueError, match=r"\(of 4\) and 9 partials \(of 5\).*give longer pieces"):
        planner.plan_packs(lens, [0] * 4, [300] * 4)
    with pytest.raises(ValueError, match="query 1: node 1 ends at 600 beyond its sequence of 500"):
        planner.plan_packs([700, 500, 650], [0] * 4, [1000] * 4)
