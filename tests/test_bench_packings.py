# SPDX-License-Identifier: Apache-2.0
"""Packings of a batch: the best by dynamic programming against all there are."""

from __future__ import annotations

import random
from itertools import product

import pytest

from sglang_pat import Target, plan
from sglang_pat.bench.common.forests import Forest, forest
from sglang_pat.bench.common.trees import PAPER_TREES, Tree
from sglang_pat.bench.kernel.packings import (
    Node,
    Packing,
    least_bytes,
    plan_bytes,
    prefix_tree,
)

TILES = (16, 32, 64)


def target(num_queries: int, q_heads: int = 8, **values: object) -> Target:
    heads = {"num_q_heads": q_heads, "num_kv_heads": 8, "head_dim": 128}
    return Target.h200(max_queries=num_queries, **heads, **({"row_tiles": TILES} | values))


def small(seed: int) -> Forest:
    """A forest of at most 8 queries and 5 nodes, in which packing is close."""
    rng = random.Random(seed)
    paths: list[list[tuple[int, int, int]]] = [[(0, 0, rng.randint(1, 40))]]
    for node in range(1, rng.randint(2, 5)):
        above = rng.choice(paths)
        start = above[-1][2]
        paths.append([*above, (node, start, start + rng.randint(1, 40))])
    of_queries = [rng.choice(paths) for _ in range(rng.randint(2, 8))]
    seq_lens = [path[-1][2] + rng.choice((0, 1, 20, 60)) for path in of_queries]
    return Forest(f"small-{seed}", of_queries, seq_lens)


def bytes_of(packing: Packing, batch: Forest, made_for: Target) -> float:
    """By the definition: the packs one by one, then each query's partial results."""
    group = made_for.num_q_heads // made_for.num_kv_heads
    token = 2 * made_for.head_dim * made_for.kv_bytes
    partial = 2 * group * (made_for.head_dim * made_for.partial_bytes + 4)
    packs: dict[tuple[int, ...], tuple[int, list[int]]] = {}

    def walk(node: Node, start: int, above: list[tuple[Node, int]]) -> None:
        own = [*above, (node, start)] if node.end > start else above
        for child in node.children.values():
            merges = child in packing.nodes
            walk(child, start if merges else child.start, above if merges else own)
        for query in node.tails:
            merges = query in packing.tails
            for pack, begin in above if merges else own:
                packs.setdefault((id(pack),), (pack.end - begin, []))[1].append(query)
            tail_start = start if merges else node.end
            tokens = batch.seq_lens[query] - tail_start
            if tokens:
                packs[(-1, query)] = (tokens, [query])

    walk(packing.top, 0, [])
    tile = TILES[-1] // group
    moved = sum(-(-len(queries) // tile) * tokens * token for tokens, queries in packs.values())
    memberships = [query for _, queries in packs.values() for query in queries]
    for query in range(batch.num_queries):
        splits = memberships.count(query)
        moved += splits * partial if splits > 1 else 0
    return moved


def all_packings(batch: Forest) -> list[Packing]:
    top = prefix_tree(batch)
    nodes: list[Node] = []

    def walk(node: Node) -> None:
        for child in node.children.values():
            if node is not top:
                nodes.append(child)
            walk(child)

    walk(top)
    tails = [
        query
        for query, (path, length) in enumerate(zip(batch.paths, batch.seq_lens, strict=True))
        if path and length > path[-1][2]
    ]
    found = []
    for bits in product((False, True), repeat=len(nodes) + len(tails)):
        chosen = [one for one, bit in zip([*nodes, *tails], bits, strict=True) if bit]
        found.append(
            Packing(
                top,
                {one for one in chosen if isinstance(one, Node)},
                {one for one in chosen if isinstance(one, int)},
            )
        )
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_best_packing_is_the_best_of_all(seed: int) -> None:
    batch = small(seed)
    for q_heads in (8, 64, 128):  # tiles of 64, 8 and 4 queries
        made_for = target(batch.num_queries, q_heads)
        packing, least = least_bytes(batch, made_for)
        assert bytes_of(packing, batch, made_for) == pytest.approx(least)
        found = min(bytes_of(one, batch, made_for) for one in all_packings(batch))
        assert least == pytest.approx(found)


@pytest.mark.parametrize("tree", PAPER_TREES[:18:3], ids=str)
def test_no_rule_moves_fewer_bytes(tree: Tree) -> None:
    made_for = target(tree.num_queries, 32, item_overhead_s=1e-12)
    packing, least = least_bytes(tree, made_for)
    as_batch = packing.forest("best", tree.seq_lens)
    naive = target(tree.num_queries, 32, policy="naive")
    assert as_batch.seq_lens == tree.seq_lens
    assert plan_bytes(as_batch, naive) == pytest.approx(least)
    for policy in ("bytes", "paper", "naive", "padding"):
        ruled = target(tree.num_queries, 32, item_overhead_s=1e-12, policy=policy)
        assert plan_bytes(tree, ruled) >= 0.999999 * least


def test_a_packing_becomes_a_batch_of_its_packs() -> None:
    # Node 1 of 32 tokens over node 2 (queries 0 to 2) and node 3 (queries 3 and 4).
    paths = [[(1, 0, 32), (2, 32, 92)]] * 3 + [[(1, 0, 32), (3, 32, 36)]] * 2
    batch = Forest("two", paths, [100] * 3 + [50] * 2)
    top = prefix_tree(batch)
    (root,) = top.children.values()
    first, second = root.children.values()
    assert (root.queries, first.queries, second.queries) == (5, 3, 2)
    merged = Packing(top, {first}, {3}).forest("merged", batch.seq_lens)
    starts = [[(start, end) for _, start, end in path] for path in merged.paths]
    assert starts == [[(0, 92)]] * 3 + [[(0, 32)], [(0, 32), (32, 36)]]
    ids = [[node for node, _, _ in path] for path in merged.paths]
    assert ids[0] == ids[1] == ids[2] and ids[3][0] == ids[4][0] != ids[0][0]
    # The scheduler takes it as any other batch.
    made = plan(merged.paths, merged.seq_lens, target(5, policy="naive", branching="never"))
    assert made.num_queries == 5


@pytest.mark.parametrize("seed", range(5))
def test_random_forests_can_be_packed_in_another_way(seed: int) -> None:
    batch = forest("uniform", seed)
    made_for = target(batch.num_queries, 32, item_overhead_s=1e-12)
    packing, least = least_bytes(batch, made_for)
    again = packing.forest("best", batch.seq_lens)
    naive = target(batch.num_queries, 32, policy="naive", item_overhead_s=1e-12)
    assert plan_bytes(again, naive) <= 1.000001 * least
    assert plan_bytes(batch, made_for) >= 0.999999 * least
