# SPDX-License-Identifier: Apache-2.0
"""Paths out of trees of Python nodes: the core's climb against one in Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.trees import Path, first_segments, target

from sglang_pat import _C
from sglang_pat.planner import Plan, Planner

# Every shared node is an item of its own: the plan shows the tree.
TARGET = target(num_sms=1, policy="naive")


class Key:
    """A key of so many tokens that counts how often it is asked for them."""

    asked = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        Key.asked += 1
        return self.length


class Node:
    """A node under other attribute names than SGLang's. Ids grow and are never given out twice."""

    count = 0

    def __init__(self, up: Node | None, length: int) -> None:
        Node.count += 1
        self.name: Any = Node.count
        self.up = up
        self.tokens: Any = Key(length)

    def split(self, at: int) -> Node:
        """The new node above, as SGLang's _split_node makes it."""
        upper = Node(self.up, at)
        self.up, self.tokens = upper, Key(self.tokens.length - at)
        return upper


def reader() -> _C.NodeReader:
    return _C.NodeReader("name", "up", "tokens")


def climb(leaf: Node | None) -> Path:
    chain = []
    while leaf is not None and leaf.up is not None:
        chain.append(leaf)
        leaf = leaf.up
    path: Path = []
    for node in reversed(chain):
        start = path[-1][2] if path else 0
        path.append((node.name, start, start + node.tokens.length))
    return path


def check_same(plan: Plan, expected: Plan) -> None:
    for part in ("items", "members", "queries", "min_seq_lens", "max_seq_lens"):
        assert np.array_equal(getattr(plan, part), getattr(expected, part)), part


def check_leaves(
    planner: Planner, leaves: list[Node | None], limits: list[int] | None, by: _C.NodeReader
) -> None:
    paths = [climb(leaf) for leaf in leaves]
    lens = [(path[-1][2] if path else 0) + 3 for path in paths]
    check_same(planner.plan_leaves(leaves, lens, limits, by), planner.plan(paths, lens, limits))


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_that_grows_and_splits_between_batches(seed: int) -> None:
    rng = random.Random(seed)
    planner, by = Planner(TARGET), reader()
    root = Node(None, 0)
    nodes = [root]
    for _ in range(30):
        for _ in range(rng.randrange(8)):
            nodes.append(Node(rng.choice(nodes), rng.randrange(1, 9)))
        for node in rng.sample(nodes, min(3, len(nodes))):
            if node is not root and node.tokens.length > 1:
                nodes.append(node.split(rng.randrange(1, node.tokens.length)))
        inner = {node.up for node in nodes}
        nodes = [n for n in nodes if n is root or n in inner or rng.random() < 0.9]
        leaves = [rng.choice([*nodes, None]) for _ in range(rng.randrange(40))]
        check_leaves(planner, leaves, None, by)
        limits = [rng.randrange(30) for _ in leaves]
        for i, path in enumerate(map(climb, leaves)):
            if path and rng.random() < 0.5:  # right at a node's start or end
                limits[i] = rng.choice(rng.choice(path)[1:])
        check_leaves(planner, leaves, limits, by)


def test_more_nodes_than_the_table_starts_with() -> None:
    root = Node(None, 0)
    leaves: list[Node | None] = [Node(Node(root, 2), 3) for _ in range(700)]
    planner, by = Planner(target(num_sms=1)), reader()
    for _ in range(2):
        check_leaves(planner, leaves, None, by)


def test_limits_cut_inside_a_node_and_at_its_start() -> None:
    root = Node(None, 0)
    low = Node(Node(root, 80), 20)
    lens, by = [101] * 5, reader()
    limits = [100, 100, 30, 80, 0]
    made = Planner(TARGET).plan_leaves([low] * 5, lens, limits, by)
    starts = {query: set() for query in range(5)}
    for item, segment in zip(made.items, first_segments(made), strict=True):
        for query in made.members["query"][item["member_offset"] :][: item["num_queries"]].tolist():
            starts[query].add(int(segment["kv_start"]))
    assert starts == {0: {0, 30, 80, 100}, 1: {0, 30, 80, 100}, 2: {0, 30}, 3: {0, 30, 80}, 4: {0}}


def test_only_shared_nodes_new_to_a_batch_are_measured() -> None:
    root = Node(None, 0)
    one, two = Node(root, 5), Node(root, 7)
    below = Node(one, 4)
    planner, by = Planner(TARGET), reader()

    def measured(leaves: list[Node | None]) -> int:
        before = Key.asked
        planner.plan_leaves(leaves, [20] * len(leaves), None, by)
        return Key.asked - before

    assert measured([below, two, None]) == 0
    assert measured([below, one, two, below, None]) == 2
    assert measured([two, two, below, below]) == 1
    below.split(1)
    one.split(2)
    assert measured([below, two, below, two]) == 2
    assert measured([below, below]) == 0
    assert measured([below, two, two]) == 1  # forgotten: the batch before was without it


def test_of_a_node_of_one_query_only_the_parent_is_read() -> None:
    """Neither its id nor its key, for a batch of which nothing is shared costs a look at each."""
    shared = Node(Node(None, 0), 5)
    leaves: list[Any] = [SimpleNamespace(up=SimpleNamespace(up=shared)) for _ in range(2)]
    made = Planner(TARGET).plan_leaves(leaves, [9, 9], None, reader())
    path = [(shared.name, 0, 5)]
    check_same(made, Planner(TARGET).plan([path, path], [9, 9]))


def test_a_new_node_at_a_dead_nodes_address_is_measured() -> None:
    root = Node(None, 0)
    planner, by = Planner(TARGET), reader()
    addresses = []
    for length in range(1, 20):
        node = Node(root, length)
        addresses.append(id(node))
        check_leaves(planner, [node, node], None, by)
        del node
    assert len(set(addresses)) < len(addresses)


class Broken:
    def __init__(self, up: object, **attrs: object) -> None:
        self.up = up
        self.__dict__.update(attrs)


class Unmeasurable:
    def __len__(self) -> int:
        raise RuntimeError("no length today")


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (object(), AttributeError, "up"),
        (Broken(object(), name=1), AttributeError, "up"),
        (Broken(Node(None, 0), tokens=[1]), AttributeError, "name"),
        (Broken(Node(None, 0), name="x", tokens=[1]), TypeError, "node attribute name is not an"),
        (Broken(Node(None, 0), name=1), AttributeError, "tokens"),
        (Broken(Node(None, 0), name=1, tokens=None), TypeError, "has no len"),
        (Broken(Node(None, 0), name=1, tokens=Unmeasurable()), RuntimeError, "no length today"),
        (Broken(Node(None, 0), name=8, tokens=[]), ValueError, r"node 8 has the empty .* \[0, 0\)"),
    ],
)
def test_a_bad_node_raises_and_leaves_the_reader_as_good(leaf, error, message) -> None:
    good = Node(Node(Node(None, 0), 5), 2)
    planner, by = Planner(TARGET), reader()
    for _ in range(2):
        with pytest.raises(error, match=message):
            planner.plan_leaves([good, leaf, leaf], [9, 9, 9], None, by)
    check_leaves(planner, [good, good], None, by)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_nodes_in_a_circle_are_named(length: int) -> None:
    nodes = [Node(None, 1)]
    for _ in range(length - 1):
        nodes.append(Node(nodes[-1], 1))
    nodes[0].up = nodes[-1]
    with pytest.raises(ValueError, match=rf"node {nodes[0].name} is among its own ancestors"):
        Planner(TARGET).plan_leaves([nodes[-1]], [9], None, reader())


def test_the_same_paths_with_other_lengths() -> None:
    shared = Node(Node(None, 0), 5)
    leaves: list[Node | None] = [Node(shared, 3), shared, None, shared]
    planner, paths = Planner(TARGET), [climb(leaf) for leaf in leaves]
    with pytest.raises(ValueError, match="4 sequence lengths for the paths of 0 queries"):
        planner.plan_again([9] * 4)
    planner.plan_leaves(leaves, [9] * 4, None, reader())
    for lens in ([10, 11, 12, 13], [900, 800, 700, 600]):
        check_same(planner.plan_again(lens), Planner(TARGET).plan(paths, lens))
    with pytest.raises(ValueError, match="3 sequence lengths for the paths of 4 queries"):
        planner.plan_again([9] * 3)
    with pytest.raises(ValueError, match="beyond its sequence of 4 tokens"):
        planner.plan_again([9, 4, 9, 9])


def test_one_leaf_limit_and_length_per_query() -> None:
    with pytest.raises(ValueError, match=r"paths of 1 queries, 2 limits and 2 sequence lengths"):
        Planner(TARGET).plan_leaves([None], [1, 1], None, reader())
