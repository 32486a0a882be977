# SPDX-License-Identifier: Apache-2.0
"""Random radix forests and what a correct plan has to satisfy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sglang_pat.bench.trees import Tree
from sglang_pat.planning import Plan
from sglang_pat.target import Target

DYNAMIC = -1
DIRECT = -1

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
    )


def owners(batch: Batch, query: int, length: int) -> np.ndarray:
    """[length] what each token of a query belongs to: its radix node, or the query itself."""
    owner = np.full(length, -1 - query, dtype=np.int64)
    for node_id, start, end in batch.paths[query]:
        owner[start:end] = node_id
    return owner


def check_plan(plan: Plan, batch: Batch, made_for: Target, seq_lens: list[int]) -> None:
    """Every token of every query lies in exactly one of its items, whose members all share it;
    partial slots are consecutive, ordered by position and used once."""
    items, members, queries = plan.items, plan.members, plan.queries
    group = made_for.num_q_heads // made_for.num_kv_heads
    token_owner = [owners(batch, query, length) for query, length in enumerate(seq_lens)]
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in seq_lens]
    read = 0
    for item in items:
        of_item = members[item["member_offset"] :][: item["num_queries"]]
        assert len(of_item) == item["num_queries"] > 0
        assert item["num_queries"] * group <= item["row_tile"]
        assert item["row_tile"] in made_for.row_tiles
        assert item["kv_tile"] in made_for.kv_tiles
        assert item["row"] in of_item["query"]
        start, length = int(item["kv_start"]), int(item["kv_len"])
        if length == DYNAMIC:
            assert item["num_queries"] == 1
            length = seq_lens[item["row"]] - start
            assert length >= 0
        else:
            assert length > 0
        read += length
        shared = token_owner[item["row"]][start : start + length]
        assert len(shared) == length
        for query, partial in of_item:
            pieces[query].append((start, length, int(partial)))
            assert np.array_equal(token_owner[query][start : start + length], shared)
    assert read == plan.kv_tokens_read(sum(seq_lens))
    assert Counter(len(p) for p in pieces) == Counter(queries["num_splits"].tolist())
    used = []
    for query, query_pieces in enumerate(pieces):
        query_pieces.sort()
        position = 0
        for start, length, _ in query_pieces:
            assert start == position
            position += length
        assert position == seq_lens[query]
        offset, splits = queries[query]
        partials = [partial for _, _, partial in query_pieces]
        assert len(partials) == splits
        assert partials == ([DIRECT] if splits == 1 else list(range(offset, offset + splits)))
        used += partials if splits > 1 else []
    assert sorted(used) == list(range(plan.num_partials))
    assert plan.num_items == len(items) and plan.num_members == items["num_queries"].sum()
    assert plan.num_shared_items == (items["num_queries"] > 1).sum()
