# SPDX-License-Identifier: Apache-2.0
"""A plan in named parts: the pack tree, the items, the merges and the sums.

This is the only place of ``explain`` that reads a plan's arrays (csrc/plan.h).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

from sglang_pat import Plan, Target
from sglang_pat.dump import PathNodes, Requests
from sglang_pat.explain.parts import Explanation, Item, Merge, Range, TreeNode
from sglang_pat.planner import BRANCH

_DYNAMIC, _DIRECT = -1, -1  # kDynamic and kDirect of csrc/plan.h


def explain(plan: Plan, requests: Requests, target: Target) -> Explanation:
    """Reads ``plan``, which was made of ``requests`` for ``target``."""
    nodes = tree_nodes(requests)
    items = _items(plan, requests.seq_lens)
    _link(nodes, items)
    return Explanation(
        target,
        plan,
        requests.seq_lens,
        nodes,
        items,
        _merges(plan, items),
        plan.kv_tokens_read(sum(requests.seq_lens)),
        sum(requests.seq_lens),
        sum(node.end - node.start for node in nodes),
    )


def _link(nodes: list[TreeNode], items: list[Item]) -> None:
    """Notes at each node the items that read its tokens."""
    by_query: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for item in items:
        for part in item.ranges:
            for query in part.queries:
                by_query[query].append((part.start, part.end, item.index))
    for node in nodes:
        node.items = sorted(
            {
                index
                for query in node.queries
                for start, end, index in by_query[query]
                if start < node.end and node.start < end
            }
        )


def tree_nodes(requests: Requests) -> list[TreeNode]:
    """The nodes that several queries share and every query's tail, parents before their children,
    in the order in which a tree is printed."""
    paths = _cut_paths(requests.paths)
    sharing: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for query, path in enumerate(paths):
        for part in path:
            sharing[part].append(query)
    below: defaultdict[Any, list[TreeNode]] = defaultdict(list)
    for query, path in enumerate(paths):
        shared = [part for part in path if len(sharing[part]) > 1]
        for depth, part in enumerate(shared):
            if sharing[part][0] == query:
                above = shared[depth - 1] if depth else None
                below[above].append(TreeNode(*part, tuple(sharing[part]), depth))
        start = shared[-1][2] if shared else 0
        if start < requests.seq_lens[query]:
            tail = TreeNode(None, start, requests.seq_lens[query], (query,), len(shared))
            below[shared[-1] if shared else None].append(tail)
    ordered, open_ = [], below[None][::-1]
    while open_:
        node = open_.pop()
        ordered.append(node)
        if node.id is not None:
            open_ += below[node.id, node.start, node.end][::-1]
    return ordered


def _cut_paths(paths: list[PathNodes]) -> list[PathNodes]:
    """The paths with each node cut where another query's path ends inside of it."""
    ends: defaultdict[int, set[int]] = defaultdict(set)
    for path in paths:
        for node_id, _, end in path:
            ends[node_id].add(end)
    ordered = {node_id: sorted(of_node) for node_id, of_node in ends.items()}
    cut = []
    for path in paths:
        parts = []
        for node_id, start, end in path:
            inside = [start, *(to for to in ordered[node_id] if start < to <= end)]
            parts += [(node_id, *span) for span in pairwise(inside)]
        cut.append(parts)
    return cut


def _items(plan: Plan, seq_lens: list[int]) -> list[Item]:
    members = [(int(m["query"]), int(m["partial"])) for m in plan.members]
    segments = plan.segments.tolist()
    group = plan.num_q_heads // plan.num_kv_heads * plan.draft_tokens
    wide, heavy = plan.num_wide_items, plan.num_heavy_items
    items = []
    for index, (item, of_item) in enumerate(zip(plan.items, plan.item_segments, strict=True)):
        first_member = int(item["member_offset"])
        mine = members[first_member : first_member + int(item["num_queries"])]
        queries = tuple(query for query, _ in mine)
        ranges = []
        first, count = of_item.tolist()
        for query, start, length, _, offset, readers in segments[first : first + count]:
            grows = length == _DYNAMIC
            end = seq_lens[query] if grows else start + length
            attend = tuple(sorted(queries[offset : offset + readers]))
            ranges.append(Range(query, start, end, attend, grows))
        items.append(
            Item(
                index,
                "branch" if item["kind"] == BRANCH else "shared" if len(mine) > 1 else "tail",
                "wide" if index < wide else "heavy" if index < wide + heavy else "light",
                tuple(sorted(queries)),
                ranges,
                len(queries) * group,
                int(item["row_tile"]),
                {query: None if slot == _DIRECT else slot for query, slot in sorted(mine)},
            )
        )
    return items


def _merges(plan: Plan, items: list[Item]) -> list[Merge]:
    writers: dict[int, int] = {}  # item by slot
    direct: dict[int, int] = {}  # item by query
    for item in items:
        for query, slot in item.partials.items():
            if slot is None:
                direct[query] = item.index
            else:
                writers[slot] = item.index
    merges = []
    for query, (offset, count) in enumerate(plan.queries.tolist()):
        slots = list(range(offset, offset + count)) if count > 1 else []
        wrote = [writers[slot] for slot in slots]
        if count == 1:
            wrote = [direct[query]]
        merges.append(Merge(query, slots, wrote))
    return merges
