# SPDX-License-Identifier: Apache-2.0
"""Ways to pack a batch other than the scheduler's, and the bytes that a packing moves.

A packing says of every node and tail of the prefix tree whether its queries *merge* with the pack
above: they leave that pack and read its tokens along with their own, which saves each a partial
result. These are the packings among which PAT's TreeHeuristic chooses (section 5.1), and
``least_bytes`` finds the best of them. As a ``Forest`` a packing is a batch that policy ``naive``,
every node a pack, packs in that way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from sglang_pat import Target
from sglang_pat.bench.common.forests import Forest, PrefixPath
from sglang_pat.bench.common.trees import Requests
from sglang_pat.planner import plan


@dataclass(eq=False)
class Node:
    """Tokens [start, end) that ``queries`` queries share; ``tails`` are those whose path ends here.
    The roots of a batch stand under a node without tokens."""

    start: int
    end: int
    queries: int = 0
    tails: list[int] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)


def prefix_tree(batch: Requests) -> Node:
    """The node above all roots. Paths must not end inside a node."""
    top = Node(0, 0)
    for query, path in enumerate(batch.paths):
        node = top
        node.queries += 1
        for key, start, end in path:
            node = node.children.setdefault(key, Node(start, end))
            node.queries += 1
        node.tails.append(query)
    return top


@dataclass
class Packing:
    """Which nodes of the tree under ``top``, and which tails by query, merge with the pack above.
    Roots and tails under no node never do."""

    top: Node
    nodes: set[Node] = field(default_factory=set)
    tails: set[int] = field(default_factory=set)

    def forest(self, name: str, seq_lens: list[int]) -> Forest:
        """The batch with a radix node for each pack. A plan of policy ``naive`` then has these
        packs, but for those of one query, which become part of its tail, and neighbours of equal
        queries, which become one: both read and write no more."""
        paths: list[PrefixPath] = [[] for _ in seq_lens]
        ids = count(1)

        def walk(node: Node, start: int, above: PrefixPath) -> None:
            own = [*above, (next(ids), start, node.end)] if node.end > start else above
            for child in node.children.values():
                merges = child in self.nodes
                walk(child, start if merges else child.start, above if merges else own)
            for query in node.tails:
                paths[query] = above if query in self.tails else own

        walk(self.top, 0, [])
        return Forest(name, paths, seq_lens)


def least_bytes(batch: Requests, target: Target) -> tuple[Packing, float]:
    """The packing that moves the fewest bytes for one KV head, and these bytes.

    Counted as the scheduler's byte rule counts, without the overhead of an item: a pack's K/V once
    for each row tile that its queries fill, at full price however often a token is read, and for
    each of a query's packs, if there are several, a partial result, written and read. Nothing is
    split along its tokens. Exact, by dynamic programming: a node's least bytes depend on the rest
    of the tree only through where its pack starts, which is the start of a node above, and on its
    children only through how many of its queries leave.
    """
    search = _Search(batch, target)
    top = prefix_tree(batch)
    packing = Packing(top)
    total = sum(batch.seq_lens[query] for query in top.tails) * search.token
    for root in top.children.values():
        total += search.best(root, 0)
        search.collect(root, 0, packing)
    return packing, total


@dataclass
class _Choice:
    """The best that a node can do: whose queries leave its pack."""

    cost: float
    merged: list[Node]
    merged_tails: list[int]


class _Search:
    """Least bytes of subtrees, by node and start of its pack."""

    def __init__(self, batch: Requests, target: Target) -> None:
        self.token = float(2 * target.head_dim * target.kv_bytes)
        self.group = target.num_q_heads // target.num_kv_heads
        self.partial = 2.0 * self.group * (target.head_dim * target.partial_bytes + 4)
        self.tile = max(1, target.row_tiles[-1] // self.group)
        self.seq_lens = batch.seq_lens
        self._known: dict[tuple[Node, int], _Choice] = {}

    def best(self, node: Node, start: int) -> float:
        """Bytes of all packs that begin at the node's pack, from token ``start``, or below it."""
        return self.choice(node, start).cost

    def collect(self, node: Node, start: int, packing: Packing) -> None:
        """Enters the choices of the subtree into ``packing``."""
        choice = self.choice(node, start)
        packing.nodes.update(choice.merged)
        packing.tails.update(choice.merged_tails)
        for child in node.children.values():
            self.collect(child, start if child in choice.merged else node.end, packing)

    def choice(self, node: Node, start: int) -> _Choice:
        key = (node, start)
        if key not in self._known:
            self._known[key] = self._choose(node, start)
        return self._known[key]

    def _choose(self, node: Node, start: int) -> _Choice:
        children = list(node.children.values())
        leaving, chosen = self._children(node, start, children)
        tails = [query for query in node.tails if self.seq_lens[query] > node.end]
        stuck = len(node.tails) - len(tails)  # they end with the node and cannot leave its pack
        # A tail that leaves reads the pack's tokens, and has no partial if it then is all.
        each = (node.end - start) * self.token - (self.partial if start == 0 else 0.0)
        apart = sum((self.seq_lens[q] - node.end) * self.token + self.partial for q in tails)
        best, best_nodes, best_tails = math.inf, 0, 0
        for gone_tails in range(len(tails) + 1):
            left = node.queries - gone_tails - np.arange(len(leaving))
            left = np.maximum(left, 0)
            kept = -(-left // self.tile) * (node.end - start) * self.token + left * self.partial
            cost = leaving + kept + gone_tails * each
            place = int(np.argmin(cost))
            if cost[place] < best:
                best, best_nodes, best_tails = float(cost[place]), place, gone_tails
        if start == 0:
            best -= stuck * self.partial
        merged = []
        place = best_nodes
        for child, taken in zip(reversed(children), reversed(chosen), strict=True):
            if taken[place]:
                merged.append(child)
                place -= child.queries
        return _Choice(best + apart, merged, tails[:best_tails])

    def _children(
        self, node: Node, start: int, children: list[Node]
    ) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.bool_]]]:
        """[queries of the children + 1] least bytes of all below the node if so many queries leave
        its pack with their child, and for each child whether it is among them."""
        total = sum(child.queries for child in children)
        least = np.full(total + 1, np.inf)
        least[0] = 0.0
        chosen = []
        for child in children:
            stays = least + self.best(child, node.end)
            leaves = np.full(total + 1, np.inf)
            leaves[child.queries :] = least[: total + 1 - child.queries] + self.best(child, start)
            chosen.append(leaves < stays)
            least = np.minimum(stays, leaves)
        return least, chosen


def plan_bytes(batch: Requests, target: Target) -> float:
    """Bytes of one KV head for the packs of a plan for ``target``, counted as ``least_bytes`` does.
    They are those of a plan without splits and branches: for one SM, on which an item's overhead
    takes as many bytes' time as on one of the target's."""
    whole = replace(
        target,
        num_sms=1,
        item_overhead_s=target.item_overhead_s / target.num_sms,
        branching="never",
        split="cost",
    )
    made = plan(batch.paths, batch.seq_lens, whole)
    search = _Search(batch, target)
    tokens = made.kv_tokens_read(sum(batch.seq_lens))
    return tokens * search.token + made.num_partials * search.partial
