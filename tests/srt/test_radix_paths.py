# SPDX-License-Identifier: Apache-2.0
"""The nodes that are kept from batch to batch share what the live tree shares, and what is not new
is not read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.trees import Path, target

from sglang_pat import _C
from sglang_pat.planner import Plan, Planner
from sglang_pat.target import Target

# Every shared node is an item of its own: the plan shows the tree.
TARGET = target(num_sms=1, cuts=("branches",))
HANDLE = np.dtype([("node", np.int64), ("tokens", np.int64), ("table_row", np.int64)])


class Node:
    """A node of a tree, under other attribute names than SGLang's. No id is given out twice."""

    count = 0

    def __init__(self, up: Node | None, length: int) -> None:
        Node.count += 1
        self.name: Any = Node.count
        self.up = up
        self.tokens: Any = range(length)

    def split(self, at: int) -> Node:
        """The new node above, as SGLang's _split_node makes it."""
        upper = Node(self.up, at)
        self.up, self.tokens = upper, range(len(self.tokens) - at)
        return upper


class Core:
    """The same tree as SGLang's compiled core tells it, by ids; counts what it is asked for."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.read = self.lengths = 0  # nodes

    def learn(self, leaves: Sequence[Node | None]) -> None:
        self.nodes = {}
        for leaf in leaves:
            while leaf is not None:
                self.nodes[leaf.name] = leaf
                leaf = leaf.up

    def get_node_key_lengths(self, ids: list[int]) -> list[int]:
        self.lengths += len(ids)
        return [len(self.nodes[node].tokens) for node in ids]

    def validate_buffer_backup(self, node: int, length: int) -> Any:
        self.read += 1
        up = self.nodes[node].up
        if up is None or len(self.nodes[node].tokens) != length:
            return None
        return SimpleNamespace(parent_node_id=up.name, parent_is_root=up.up is None)

    def collect_path_info(self, ids: list[int]) -> list[list[tuple[int, ...]]]:
        found = []
        for node in ids:
            path, at = climb(self.nodes[node]), self.nodes[node]
            self.read += len(path)
            ups = []
            while at.up is not None:
                ups.append(at.up.name)
                at = at.up
            found.append(
                [(n, up, start, end) for (n, start, end), up in zip(path, ups[::-1], strict=True)]
            )
        return found


class Reader:
    """Plans the same batches through a ``RadixPaths``: of Python nodes, or of a core's ids."""

    def __init__(self, kind: str, core: Core | None = None) -> None:
        self.core = core or Core()
        self.planner = Planner(TARGET)
        self.by_id = kind == "ids"
        self.paths = (
            _C.RadixPaths.of_tree_core(self.core)
            if self.by_id
            else _C.RadixPaths.of_nodes("name", "up", "tokens")
        )

    def plan(
        self, leaves: Sequence[Any], lens: list[int], limits: Sequence[int] | None = None
    ) -> Plan:
        table = np.zeros(len(leaves), dtype=HANDLE)
        table["node"] = [-1 if leaf is None else getattr(leaf, "name", 1) for leaf in leaves]
        table["tokens"] = lens if limits is None else limits
        if self.by_id:
            self.core.learn(leaves)
        return self.planner.plan_handles(
            table.tobytes(),
            np.asarray(lens, np.int64),
            self.paths,
            None if self.by_id else lambda query, _node: leaves[query],
        )

    def check(self, leaves: Sequence[Node | None], limits: list[int] | None = None) -> None:
        paths = [climb(leaf) for leaf in leaves]
        lens = [(path[-1][2] if path else 0) + 3 for path in paths]
        other = Planner(TARGET)
        self.plan(leaves, lens, limits)
        other.plan(paths, lens, limits)
        assert shared_tokens(self.planner) == shared_tokens(other)


def shared_tokens(planner: Planner) -> list[list[tuple[int, int, list[bool]]]]:
    """Of each query of the last plan the spans of tokens that it shares, and with whom."""
    nodes, deepest = planner.last_tree()
    ways: list[list[int]] = [[] for _ in deepest]
    for way, last in zip(ways, deepest, strict=True):
        node = last
        while node >= 0:
            way.append(node)
            node = nodes[node][0]
    return [
        [(*nodes[node][1:3], [node in other for other in ways]) for node in way] for way in ways
    ]


def climb(leaf: Node | None) -> Path:
    chain = []
    while leaf is not None and leaf.up is not None:
        chain.append(leaf)
        leaf = leaf.up
    path: Path = []
    for node in reversed(chain):
        start = path[-1][2] if path else 0
        path.append((node.name, start, start + len(node.tokens)))
    return path


@pytest.fixture(params=["nodes", "ids"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_that_grows_and_splits_between_batches(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    by = Reader(kind)
    root = Node(None, 0)
    nodes = [root]
    leaves: list[Node | None] = []
    for _ in range(40):
        for _ in range(rng.randrange(8)):
            nodes.append(Node(rng.choice(nodes), rng.randrange(1, 9)))
        for node in rng.sample(nodes, min(3, len(nodes))):
            if node is not root and len(node.tokens) > 1:
                nodes.append(node.split(rng.randrange(1, len(node.tokens))))
        if rng.random() < 0.5:  # else most requests stay
            leaves = [rng.choice([*nodes, None]) for _ in range(rng.randrange(40))]
        for _ in range(rng.randrange(3)):
            leaves.insert(rng.randrange(len(leaves) + 1), rng.choice(nodes))
            leaves.pop(rng.randrange(len(leaves)))
        by.check(leaves)
        limits = [rng.randrange(30) for _ in leaves]
        for i, path in enumerate(map(climb, leaves)):
            if path and rng.random() < 0.5:  # right at a node's start or end
                limits[i] = rng.choice(rng.choice(path)[1:])
        by.check(leaves, limits)
        held = {node[0] for leaf in leaves for node in climb(leaf)}
        assert by.paths.num_nodes <= len(held) + 2  # the root, and the root of all


def test_nodes_are_forgotten_with_their_requests(kind: str) -> None:
    root = Node(None, 0)
    by = Reader(kind)
    empty = by.paths.num_nodes
    for _ in range(3):
        system = Node(root, 2)
        by.check([Node(Node(system, 2), 3) for _ in range(700)])
        assert by.paths.num_nodes >= empty + 1401
    by.check([root, None])
    assert by.paths.num_nodes <= empty + 1


def test_limits_cut_inside_a_node_and_at_its_start(kind: str) -> None:
    low = Node(Node(Node(None, 0), 80), 20)
    Reader(kind).check([low] * 5, [100, 100, 30, 80, 0])


def test_only_what_is_new_is_read() -> None:
    """Also where requests stand deep: a request that comes costs its own nodes alone."""
    by = Reader("ids")
    system = Node(Node(None, 0), 50)
    talks = [system] * 8
    for _ in range(20):
        talks = [Node(Node(talk, 3), 5) for talk in talks]
    by.check(talks)
    assert by.core.read < 1.2 * (1 + 8 * 40)
    by.core.read = 0
    by.check(talks[1:])
    assert by.core.read == 0
    by.check([*talks[1:], Node(Node(talks[2], 2), 2)])  # below another's leaf
    assert by.core.read == 2
    by.core.read = by.core.lengths = 0
    upper = talks[3].split(1)
    by.check([*talks[1:], Node(upper, 7)])
    assert by.core.read == 3  # the new leaf, the new node of the split and what it was split from
    by.core.read = 0
    by.check([*talks, Node(upper, 7)])
    assert by.core.read < 1.3 * 40  # request 0 is back
    assert by.core.lengths < 3 + 40 + 3 * len(talks)


def test_a_node_without_k_v_on_the_device_is_read_from_its_path() -> None:
    core = Core()
    core.validate_buffer_backup = lambda _node, _length: None  # type: ignore[method-assign]
    by = Reader("ids", core=core)
    system = Node(Node(None, 0), 50)
    by.check([Node(Node(system, 3), 2) for _ in range(4)])


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
        (Broken(object(), name=-5 + 10**9, tokens=[1]), AttributeError, "name"),
        (Broken(Broken(None, name="x"), name=10**9, tokens=[1]), TypeError, "attribute name is"),
        (Broken(Node(None, 0), name=10**9), AttributeError, "tokens"),
        (Broken(Node(None, 0), name=10**9, tokens=None), TypeError, "has no len"),
        (Broken(Node(None, 0), name=10**9, tokens=Unmeasurable()), RuntimeError, "no length"),
    ],
)
def test_a_bad_node_raises_and_all_is_read_anew(leaf: Any, error: Any, message: str) -> None:
    good = Node(Node(Node(None, 0), 5), 2)
    by = Reader("nodes")
    for _ in range(2):
        with pytest.raises(error, match=message):
            by.plan([good, leaf, leaf], [9, 9, 9])
    by.check([good, good])


def test_a_node_that_is_gone_raises_and_all_is_read_anew() -> None:
    by = Reader("ids")
    system = Node(Node(None, 0), 5)
    leaves = [Node(system, 2) for _ in range(3)]
    by.check(leaves)
    gone = np.array([(1 << 40, 9, 0)], dtype=HANDLE).tobytes()
    with pytest.raises(KeyError):
        by.planner.plan_handles(gone, np.array([9], np.int64), by.paths, None)
    assert by.paths.num_nodes == 1
    by.check(leaves)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_nodes_in_a_circle_are_named(length: int) -> None:
    nodes = [Node(None, 1)]
    for _ in range(length - 1):
        nodes.append(Node(nodes[-1], 1))
    nodes[0].up = nodes[-1]
    with pytest.raises(ValueError, match=r"node \d+ is among its own ancestors"):
        Reader("nodes").plan([nodes[-1]], [9])


def test_the_same_paths_with_other_lengths() -> None:
    shared = Node(Node(None, 0), 5)
    leaves: list[Node | None] = [Node(shared, 3), shared, None, shared]
    paths = [climb(leaf) for leaf in leaves]
    by = Reader("nodes")
    with pytest.raises(ValueError, match="4 sequence lengths for the paths of 0 queries"):
        by.planner.plan_again([9] * 4)
    by.plan(leaves, [9] * 4)
    for lens in ([10, 11, 12, 13], [900, 800, 700, 600]):
        expected = Planner(TARGET).plan(paths, lens)
        assert by.planner.plan_again(lens).segments.tobytes() == expected.segments.tobytes()
    with pytest.raises(ValueError, match="3 sequence lengths for the paths of 4 queries"):
        by.planner.plan_again([9] * 3)
    with pytest.raises(ValueError, match="beyond its sequence of 4 tokens"):
        by.planner.plan_again([9, 4, 9, 9])


def test_more_requests_than_rows_are_refused() -> None:
    handles = np.zeros(4, dtype=HANDLE).tobytes()
    paths = _C.RadixPaths.of_nodes("name", "up", "tokens")
    with pytest.raises(ValueError, match="4 requests in a batch of 3 rows"):
        Planner(
            Target.h200(num_q_heads=8, num_kv_heads=8, head_dim=64, max_queries=8)
        ).plan_handles(handles, np.ones(3, np.int64), paths, None)
