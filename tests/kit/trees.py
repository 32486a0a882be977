# SPDX-License-Identifier: Apache-2.0
"""Random radix forests and what a correct plan has to satisfy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kit.plans import BRANCH, BRANCH_ROWS, DIRECT, DYNAMIC
from sglang_pat.bench.common.trees import Tree
from sglang_pat.planner import Plan
from sglang_pat.target import Target

Path = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Batch:
    paths: list[Path]
    seq_lens: list[int]

    def permuted(self, order: list[int]) -> Batch:
        return Batch([self.paths[i] for i in order], [self.seq_lens[i] for i in order])


def target(**overrides: Any) -> Target:
    values = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=1024)
    return Target.h200(**(values | overrides))


def batch_of(tree: Tree) -> Batch:
    return Batch(tree.paths, tree.seq_lens)


@st.composite
def batches(draw: st.DrawFn, max_nodes: int = 14, max_queries: int = 24) -> Batch:
    """A forest of up to ``max_nodes`` radix nodes and queries that end anywhere in it; some paths
    are clipped inside their last node, as a protected length does."""
    nodes: list[Path] = [[]]
    for node_id in draw(st.permutations(range(100, 100 + draw(st.integers(0, max_nodes))))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        start = parent[-1][2] if parent else 0
        length = draw(st.one_of(st.integers(1, 4), st.integers(5, 90), st.just(700)))
        nodes.append([*parent, (node_id, start, start + length)])
    paths, seq_lens = [], []
    for _ in range(draw(st.integers(0, max_queries))):
        path = list(nodes[draw(st.integers(0, len(nodes) - 1))])
        if path and draw(st.integers(0, 4)) == 0:
            node_id, start, end = path[-1]
            path[-1] = (node_id, start, draw(st.integers(start + 1, end)))
        end = path[-1][2] if path else 0
        paths.append(path)
        seq_lens.append(end + draw(st.one_of(st.integers(0, 3), st.integers(4, 400))))
    return Batch(paths, seq_lens)


def targets() -> st.SearchStrategy[Target]:
    return st.builds(
        target,
        num_q_heads=st.sampled_from([8, 16, 40, 64]),
        policy=st.sampled_from(["bytes", "paper", "naive"]),
        split=st.sampled_from(["cost", "mean"]),
        partial_bytes=st.sampled_from([2, 4]),
        units=st.sampled_from([1, 2, 132]),
        row_tiles=st.sampled_from([(16,), (16, 32, 64, 128)]),
        branching=st.sampled_from(["cost", "always", "never"]),
        branch_rows=st.sampled_from([(64, 32), (64,), (16, 40)]),
        branch_limits=st.sampled_from([(2**31 - 1,), (64,), (2**31 - 1, 512), (1,)]),
    )


def owners(batch: Batch, query: int, length: int) -> np.ndarray:
    """[length] what each token of a query belongs to: its radix node, or the query itself."""
    owner = np.full(length, -1 - query, dtype=np.int64)
    for node_id, start, end in batch.paths[query]:
        owner[start:end] = node_id
    return owner


@dataclass(frozen=True)
class Range:
    """Tokens [start, start + length) of ``row`` that ``queries`` attend to."""

    row: int
    start: int
    length: int
    queries: list[int]


def branches_of(plan: Plan) -> list[tuple[Any, list[Any]]]:
    """The items that are branches, and the segments of each."""
    return [
        (item, list(plan.segments[item["row"] :][: item["partial"]]))
        for item in plan.items
        if item["kv_len"] == BRANCH
    ]


def ranges_of(plan: Plan, item: Any, seq_lens: list[int]) -> list[Range]:
    """What an item reads: one range, or those of a branch's segments."""
    members = plan.members["query"][item["member_offset"] :][: item["num_queries"]].tolist()
    parts = [(item["row"], item["kv_start"], item["kv_len"], members)]
    if item["kv_len"] == BRANCH:
        parts = [
            (s["row"], s["kv_start"], s["kv_len"], members[s["first"] :][: s["num_queries"]])
            for s in plan.segments[item["row"] :][: item["partial"]]
        ]
    ranges = []
    for row, start, length, queries in parts:
        assert length == DYNAMIC or length > 0
        if length == DYNAMIC:
            assert queries == [row]
        tokens = seq_lens[row] - start if length == DYNAMIC else length
        assert start >= 0 and tokens >= 0
        ranges.append(Range(int(row), int(start), int(tokens), queries))
    return ranges


def check_branches(plan: Plan, made_for: Target, seq_lens: list[int]) -> None:
    """Shapes of branches and of their segments, which have places of their own in the list."""
    group = made_for.num_q_heads // made_for.num_kv_heads
    taken: list[tuple[int, int]] = []
    listed: list[int] = []
    for item, segments in branches_of(plan):
        assert item["row_tile"] == BRANCH_ROWS
        assert item["num_queries"] * group <= max(made_for.branch_rows)
        assert 0 < len(segments) == item["partial"] <= 256
        listed += range(item["row"], item["row"] + item["partial"])
        for s in segments:
            assert 0 <= s["first"] < s["first"] + s["num_queries"] <= item["num_queries"]
            if s["kv_len"] == DYNAMIC:
                assert s["num_queries"] == 1
                assert seq_lens[s["row"]] - s["kv_start"] <= s["room"]
            else:
                assert s["room"] == s["kv_len"] <= max(made_for.branch_limits)
        assert item["kv_start"] % 64 == 0
        taken.append((int(item["kv_start"]), sum(int(s["room"]) for s in segments)))
        # Blocks that all see: the leading ones or, if negative, the trailing ones.
        seen = int(item["kv_tile"])
        order = segments if seen >= 0 else segments[::-1]
        leading = 0
        for s in order:
            if s["kv_len"] == DYNAMIC or s["num_queries"] < item["num_queries"]:
                break
            leading += int(s["kv_len"])
        assert abs(seen) == leading // 64
    assert sorted(listed) == list(range(plan.num_segments)) == list(range(len(plan.segments)))
    taken.sort()
    for (start, room), (following, _) in pairwise([*taken, (plan.branch_tokens, 0)]):
        assert start + room <= following
    assert plan.num_segments <= made_for.max_segments
    assert plan.branch_tokens <= made_for.max_branch_tokens
    assert plan.branch_tokens % 64 == 0


def check_plan(plan: Plan, batch: Batch, made_for: Target, seq_lens: list[int]) -> None:
    """Every token of every query lies in exactly one of its items, or of its segments of one, whose
    members all share it; partial slots are consecutive, ordered by position, that of a branch last,
    and used once."""
    items, members = plan.items, plan.members
    group = made_for.num_q_heads // made_for.num_kv_heads
    token_owner = [owners(batch, query, length) for query, length in enumerate(seq_lens)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in seq_lens]
    splits: list[list[tuple[bool, int, int]]] = [[] for _ in seq_lens]
    read, num_shared = 0, 0
    check_branches(plan, made_for, seq_lens)
    for item in items:
        of_item = members[item["member_offset"] :][: item["num_queries"]]
        assert len(of_item) == item["num_queries"] > 0
        assert len(set(of_item["query"].tolist())) == len(of_item)
        is_branch = bool(item["kv_len"] == BRANCH)
        if not is_branch:
            assert item["num_queries"] * group <= item["row_tile"]
            assert item["row_tile"] in made_for.row_tiles
            assert item["kv_tile"] in made_for.kv_tiles
            assert item["row"] in of_item["query"]
        ranges = ranges_of(plan, item, seq_lens)
        num_shared += any(len(part.queries) > 1 for part in ranges)
        for part in ranges:
            read += part.length
            end = part.start + part.length
            shared = token_owner[part.row][part.start : end]
            assert len(shared) == part.length and part.row in part.queries
            for query in part.queries:
                pieces[query].append((part.start, part.length))
                assert np.array_equal(token_owner[query][part.start : end], shared)
        seen = {query for part in ranges for query in part.queries}
        assert seen == set(of_item["query"].tolist())
        for query, partial in of_item:
            splits[query].append((is_branch, min(p.start for p in ranges), int(partial)))
    assert read == plan.kv_tokens_read(sum(seq_lens))
    check_pieces(pieces, seq_lens)
    check_splits(plan, splits)
    assert plan.num_items == len(items) and plan.num_members == items["num_queries"].sum()
    assert plan.num_shared_items == num_shared


def check_pieces(pieces: list[list[tuple[int, int]]], seq_lens: list[int]) -> None:
    """The (start, length) that items read of each query make up its sequence, without overlaps."""
    for query_pieces, seq_len in zip(pieces, seq_lens, strict=True):
        position = 0
        for start, length in sorted(query_pieces):
            assert start == position
            position += length
        assert position == seq_len


def check_splits(plan: Plan, splits: list[list[tuple[bool, int, int]]]) -> None:
    """Partial slots of all queries. ``splits``: of each query whether the item is a branch, where
    it starts and its slot, for every item that the query is a member of."""
    queries = plan.queries
    assert Counter(len(s) for s in splits) == Counter(queries["num_splits"].tolist())
    used = []
    for query, of_query in enumerate(splits):
        offset, count = queries[query]
        partials = [partial for _, _, partial in sorted(of_query)]
        assert len(partials) == count
        assert sum(is_branch for is_branch, _, _ in of_query) <= 1
        assert partials == ([DIRECT] if count == 1 else list(range(offset, offset + count)))
        used += partials if count > 1 else []
    assert sorted(used) == list(range(plan.num_partials))
