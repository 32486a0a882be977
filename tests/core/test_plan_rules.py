# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from, and which packs pay: the rules of the paper computed again, the byte
rule, and explicit plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.trees import Batch, batches, check_plan, packed_rows, ranges_of_query, target

from sglang_pat.planner import Planner, plan


@pytest.mark.parametrize(
    ("paths", "lens", "message"),
    [
        ([[(1, 0, 5), (2, 6, 9)]], [10], r"query 0: node 2 starts at 6 and leaves a gap after 5"),
        ([[(1, 0, 5), (2, 4, 9)]], [10], r"query 0: node 2 starts at 4 and overlaps .* before 5"),
        ([[(1, 1, 5)]], [10], r"node 1 starts at 1 and leaves a gap after 0"),
        ([[(1, 0, 0)]], [10], r"node 1 has the empty or negative span \[0, 0\)"),
        ([[(1, 0, 11)]], [10], r"node 1 ends at 11 beyond its sequence of 10 tokens"),
        ([[(1, 0, 5), (1, 5, 9)]], [10], r"node 1 stands under node 1, another .* under node -1"),
        ([[(1, 0, 2), (3, 2, 4)], [(2, 0, 3), (3, 3, 5)]], [9, 9], r"query 1: node 3 stands under"),
        ([[]], [-1], r"query 0: sequence length -1 is not in"),
        ([[]], [2**31], r"query 0: sequence length 2147483648 is not in"),
        ([[]], [2**30 + 1], r"reads 1073741825 different tokens, a plan can have 1073741824"),
        ([[]], [1, 2], r"paths of 1 queries.*2 sequence lengths"),
        ([[]], [1.5], r"seq_lens is of type float64, must be integers"),
        ([[]] * 5, [1] * 5, r"a batch of 5 queries does not fit the plan's 4 rows .*max_queries"),
    ],
)
def test_bad_input_is_named(paths, lens, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(paths, lens, target(max_queries=4))


class Short:
    """Paths that are fewer than they say."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, query: int) -> list[tuple[int, int, int]]:
        return [[(1, 0, 5)]][query]


def test_elements_of_another_form_are_refused() -> None:
    for path in ([(1, 0)], [1, 2, 3], [("a", 0, 5)], 7, [(1, 0.5, 5)]):
        with pytest.raises(TypeError):
            plan([path], [10], target())
    with pytest.raises(ValueError, match=r"paths of 1 queries.*3 sequence lengths"):
        plan(Short(), [9, 9, 9], target())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_sms": 0}, "num_sms is 0"),
        ({"num_q_heads": 30}, "num_q_heads is 30"),
        ({"row_tiles": (16, 16)}, "row_tiles"),
        ({"row_tiles": ()}, "row_tiles"),
        ({"row_tiles": (2,)}, "fewer than the 4 of one query"),
        ({"kv_tiles": (0, 32)}, "kv_tiles"),
        ({"reread_weight": 0.0}, "reread_weight is 0"),
        ({"partial_bytes": 3}, "partial_bytes is 3"),
        ({"max_items": 10}, "max_items is 10"),
        ({"policy": "magic"}, "policy is 'magic', must be one of default, pat"),
        ({"cuts": ("halves",)}, "cuts is 'halves', must be one of branches, half_branches"),
        ({"max_items": 2**31}, "max_items is 2147483648, must be at most 2147483647"),
        ({"draft_tokens": 0}, "draft_tokens is 0, must be from 1 to 32767"),
        ({"draft_tokens": 33}, "fewer than the 132 of one query: a GQA group of 4 .* tokens, 33"),
        ({"max_segments": -1}, "max_segments is -1"),
    ],
)
def test_targets_are_checked(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        target(**overrides)


def test_clipped_paths_share_what_both_have_also_with_other_lengths() -> None:
    # Query 2 is protected to token 30 of node 1: it shares these and keeps the rest private.
    planner = Planner(target())
    paths = [[(1, 0, 80)], [(1, 0, 80)], [(1, 0, 30)]]
    planner.plan(paths, [90] * 3)
    assert planner.last_paths() == paths
    assert planner.last_tree() == ([(-1, 0, 30, 3), (0, 30, 80, 2)], [1, 1, 0])
    again, fresh = planner.plan_again([500, 600, 700]), plan(paths, [500, 600, 700], target())
    assert again.items.tobytes() == fresh.items.tobytes()
    with pytest.raises(ValueError, match="2 sequence lengths for the paths of 3 queries"):
        planner.plan_again([90, 95])
    with pytest.raises(ValueError, match="query 1: node 1 ends at 80 beyond its sequence of 79"):
        planner.plan_again([90, 79, 90])


def test_draft_tokens_that_do_not_fit() -> None:
    made_for = target(draft_tokens=4)
    with pytest.raises(ValueError, match=r"query 1: node 7 ends at 98, among the 4 draft tokens"):
        plan([[(7, 0, 96)], [(7, 0, 98)]], [101, 101], made_for)
    with pytest.raises(ValueError, match="sequence of 3 tokens does not hold the 4 draft tokens"):
        plan([[]], [3], made_for)
    assert plan([[]], [0], made_for).num_items == 0


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
    for other_lens, values, pieces, message in (
        (lens, 3, 512, "3 and 4 values for 4 nodes and queries"),
        (lens, 4, 300, r"\(of 4\) and 9 partials \(of 5\).*give longer pieces"),
        ([700, 500, 650], 4, 512, "query 1: node 1 ends at 600 beyond its sequence of 500"),
    ):
        with pytest.raises(ValueError, match=message):
            planner.plan_packs(other_lens, [0] * values, [pieces] * 4)
