# SPDX-License-Identifier: Apache-2.0
"""Paths of radix nodes, kept from one batch to the next.

SGLang's compiled tree core makes six objects for each node of a path: 0.4 to 0.6 us a request, most
of the host time of a new plan for many requests. Yet a path that was read once stays true: a node
that a request holds is not evicted, its tokens keep their slots, and a split only cuts it in two,
of which the lower part keeps the id. So only nodes that have not been seen are asked for.

What a split may cost is sharing, if one path was read before it and one after. Then the later one
has a node that the earlier ones lack, and not as a new leaf: a node that comes out of a split has
children. So unless a new path is one that is known, plus a leaf without children, all paths are
read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# After so many look-ups everything is read, and paths of requests that have ended are forgotten.
REREAD_AFTER = 64

Path = Sequence[tuple[Any, ...]]
Query = Callable[[Sequence[int]], Iterable[Path]]


def remember(query: Query, fields: tuple[int, int, int]) -> Query:
    """``query`` with a memory, where SGLang's ``TreePathNodeInfo`` tells the number of children."""
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    names = TreePathNodeInfo.__struct_fields__
    if "num_children" not in names:
        return query
    return KnownPaths(query, fields, names.index("num_children")).look_up


class KnownPaths:
    """The paths that ``query`` gave for nodes, from the root on.

    ``fields``: the positions of (node id, start, end) in the tuples of a path, ``num_children``
    that of the number of children.
    """

    def __init__(
        self,
        query: Query,
        fields: tuple[int, int, int],
        num_children: int,
    ) -> None:
        self._query = query
        self._fields = fields
        self._num_children = num_children
        self._paths: dict[int, Path] = {}
        self._by_parent: dict[int, Path] = {}  # a path whose last node but one is this
        self._look_ups = 0

    def look_up(self, nodes: Sequence[int]) -> list[Path]:
        """The path to each node; raises what ``query`` raises."""
        self._look_ups += 1
        paths = self._paths
        new = [node for node in dict.fromkeys(nodes) if node not in paths]
        if self._look_ups % REREAD_AFTER and 2 * len(new) < len(nodes):
            found = list(self._query(new)) if new else []
            if all(map(self._adds_a_leaf, found)):
                self._keep(new, found)
                return [paths[node] for node in nodes]
        self._paths, self._by_parent = {}, {}
        found = list(self._query(nodes))
        self._keep(nodes, found)
        return found

    def _keep(self, nodes: Iterable[int], paths: Iterable[Path]) -> None:
        node_id = self._fields[0]
        for node, path in zip(nodes, paths, strict=True):
            self._paths[node] = path
            if len(path) > 1:
                self._by_parent[path[-2][node_id]] = path

    def _adds_a_leaf(self, path: Path) -> bool:
        """Whether a path is known but for its last node, and that has no children.

        The root's, which is empty, is known.
        """
        if not path:
            return True
        if path[-1][self._num_children]:
            return False
        above = path[:-1]
        if not above:
            return True
        parent = above[-1][self._fields[0]]
        known = self._paths.get(parent) or self._by_parent.get(parent, ())[:-1]
        return self._spans(known) == self._spans(above)

    def _spans(self, path: Path) -> list[tuple[Any, ...]]:
        return [tuple(node[field] for field in self._fields) for node in path]
