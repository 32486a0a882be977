# SPDX-License-Identifier: Apache-2.0
"""FastTree's rules for packs and splits (policy ``padding``, split ``phases``): trees made by hand,
and random ones against its heuristic written down once more, as a walk over nodes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from kit.trees import ranges_of_query, target

from benchmarks.common.forests import Forest, forest
from benchmarks.common.trees import PAPER_TREES
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import plan


@dataclass(eq=False)
class Node:
    """Tokens [start, end) of ``queries``. A tail is a node of one query."""

    start: int
    end: int
    queries: list[int]
    below: list[Node] = field(default_factory=list)


def roots_of(batch: Forest) -> list[Node]:
    """Nodes of two queries and more, and the tails: what a query has for itself is one node, and so
    are neighbours of equal queries."""
    roots: list[Node] = []

    def add(queries: list[int], depth: int, start: int, nodes: list[Node]) -> None:
        groups: dict[object, list[int]] = {}
        for query in queries:
            path = batch.paths[query]
            key = path[depth][0] if depth < len(path) else ("tail", query)
            groups.setdefault(key, []).append(query)
        if len(groups) == 1 and len(queries) > 1:  # one node goes on
            path = batch.paths[queries[0]]
            add(queries, depth + 1, start, nodes)
            return
        if len(queries) == 1:
            end = batch.seq_lens[queries[0]]
            if end > start:
                nodes.append(Node(start, end, queries))
            return
        end = batch.paths[queries[0]][depth - 1][2] if depth else 0
        if end > start:
            node = Node(start, end, queries)
            nodes.append(node)
            nodes = node.below
        for members in groups.values():
            add(members, depth + 1, end, nodes)
        # The scheduler's order, on which the rule depends: nodes by queries and tokens, then tails.
        nodes.sort(
            key=lambda one: (-len(one.queries), len(one.queries) > 1 and one.start - one.end)
        )

    add(list(range(batch.num_queries)), 0, 0, roots)
    return roots


def cost(queries: int, tokens: int, group: int) -> float:
    if not queries:
        return 0.0
    q_tile, kv_tile = (16, 128) if queries <= 16 else (64, 32)
    padded_queries = q_tile - ((queries - 1) % q_tile + 1)
    padded_tokens = max(0, kv_tile - tokens)
    return 0.66 * padded_queries * group * tokens + 0.33 * padded_tokens * queries * group


def packs_of(batch: Forest, group: int) -> list[set[int]]:
    """Where the packs of each query start."""
    starts: list[set[int]] = [set() for _ in batch.seq_lens]
    queue = deque((root, root.start) for root in roots_of(batch))
    while queue:
        node, start = queue.popleft()
        left, tokens = list(node.queries), node.end - start
        for child in node.below:
            size, own = len(child.queries), child.end - child.start
            apart = cost(len(left), tokens, group) + cost(size, own, group) + 0.1 * size
            merged = cost(len(left) - size, tokens, group) + cost(size, own + tokens, group)
            if apart > merged:
                left = [query for query in left if query not in child.queries]
            queue.append((child, start if apart > merged else child.start))
        for query in left:
            starts[query].add(start)
    return starts


@pytest.mark.parametrize("num_q_heads", [8, 32])
@pytest.mark.parametrize("seed", range(12))
def test_random_forests_are_packed_by_the_heuristic(seed: int, num_q_heads: int) -> None:
    batch = forest("uniform", seed)
    ruled = target(
        policy="padding", split="none", branching="never", num_q_heads=num_q_heads, num_kv_heads=8
    )
    made = plan(batch.paths, batch.seq_lens, ruled)
    found = [
        {start for start, _ in ranges_of_query(made, query)} for query in range(batch.num_queries)
    ]
    assert found == packs_of(batch, num_q_heads // 8)


@pytest.mark.parametrize("tree", PAPER_TREES, ids=str)
def test_paper_trees_are_packed_by_the_heuristic(tree: Tree) -> None:
    ruled = target(policy="padding", split="none", branching="never")
    made = plan(tree.paths, tree.seq_lens, ruled)
    found = [
        {start for start, _ in ranges_of_query(made, query)} for query in range(tree.num_queries)
    ]
    group = ruled.num_q_heads // ruled.num_kv_heads
    assert found == packs_of(Forest(str(tree), tree.paths, tree.seq_lens), group)


def starts_of(
    paths: list[list[tuple[int, int, int]]], seq_len: int, *, query: int = 0, **rules: object
) -> list[int]:
    """Of a query's items."""
    made = plan(paths, [seq_len] * len(paths), target(branching="never", **rules))
    return [start for start, _ in ranges_of_query(made, query)]


def test_padding_decides_who_merges() -> None:
    # 32 queries on 64 tokens, 16 below each of two nodes of 64, one query head a KV head. Apart: 32
    # idle queries on 64 tokens are 1,351.7, the 64 idle tokens of each 16 queries 337.9, their
    # partials 1.6. The first to merge fills tiles of 16 and 128, and leaves 16 queries that lack 64
    # tokens: 337.9. It merges, and so does the second. A tail of 128 tokens has 15 idle queries, on
    # twice the tokens if it merges, and leaves another idle one: the tails stay.
    rules = {"policy": "padding", "split": "none", "num_q_heads": 8, "num_kv_heads": 8}
    paths = [[(1, 0, 64), (2 + query // 16, 64, 128)] for query in range(32)]
    assert starts_of(paths, 256, **rules) == [0, 128]
    # 17 and 15: the first would have 47 idle queries on twice the tokens, 3,970.6, and the second
    # would leave 17, with 47 idle ones on 64 tokens where 32 were. Neither merges. Of the 17 tails
    # the first does: it leaves 16 queries, which fill a small tile.
    uneven = [*paths[:16], paths[0], *paths[17:]]
    found = [starts_of(uneven, 256, query=query, **rules) for query in range(32)]
    assert found == [[0, 64]] + [[0, 64, 128]] * 31


def test_pieces_are_shorter_where_they_are_few() -> None:
    # 132 SMs, 8 KV heads. 20 queries on 20,480 tokens: 20 pieces of 1,024 are 160 items, enough for
    # packs of more than 16 queries. 20 tails of 2,048 are 320 items, fewer than 4 an SM: pieces of
    # 128.
    rules = {"policy": "naive", "split": "phases", "split_tokens": 1024, "num_sms": 132}
    heads = {"num_q_heads": 8, "num_kv_heads": 8}
    shared = [[(1, 0, 20_480)]] * 20
    long_tails = starts_of(shared, 22_528, **rules, **heads)
    assert long_tails == [*range(0, 20_480, 1024), *range(20_480, 22_528, 128)]
    # 40 tails of 2,048 are 640 items: enough. A node of 8,192 tokens is 64 items, too few.
    shared = [[(1, 0, 8192)]] * 40
    short_node = starts_of(shared, 10_240, **rules, **heads)
    assert short_node == [*range(0, 8192, 128), 8192, 9216]
