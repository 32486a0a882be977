# SPDX-License-Identifier: Apache-2.0
"""What the items of a plan read, and a plan as people read it: its ``repr`` and ``str``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import groupby, islice
from math import inf
from typing import NamedTuple

import numpy as np

from sglang_pat import _C

Plan = _C.Plan
BRANCH = _C.BRANCH  # kind of an item that is a branch
DYNAMIC = -1  # kDynamic of csrc/plan.h: tokens up to the end of a sequence

_LINES = 24  # of the tree, and of the items, at most
_RUNS = 6  # of consecutive numbers in a line, at most
_DIRECT = -1  # kDirect of csrc/plan.h
_TILE = 64  # kBranchAlign

Node = tuple[tuple[int, ...], int, float]  # ascending queries, first token, end (inf: of a tail)


class Range(NamedTuple):
    """Tokens that an item reads in the row of query ``reader`` for all of ``queries``: as many as
    ``tokens``, or up to the end of the sequence if that is DYNAMIC."""

    item: int
    reader: int
    begin: int
    tokens: int
    queries: list[int]


def ranges(plan: Plan, *, shared: bool = False) -> Iterator[Range]:
    """What the plan's items read; ``shared``: only what they read for more than one query."""
    members = plan.members["query"]
    segments = plan.segments
    for item in np.flatnonzero(plan.items["num_queries"] > int(shared)).tolist():
        first_member = int(plan.items["member_offset"][item])
        first, count = plan.item_segments[item].tolist()
        for reader, begin, tokens, _, offset, queries in segments[first : first + count].tolist():
            if queries > int(shared):
                at = first_member + offset
                yield Range(item, reader, begin, tokens, members[at : at + queries].tolist())


def plan_line(plan: Plan) -> str:
    """Queries, heads, items, partial results, and why the plan is degraded if it is."""
    drafts = f"{plan.draft_tokens} draft tokens each, " if plan.draft_tokens > 1 else ""
    return (
        f"<Plan: {_counted(plan.num_queries, 'query', 'queries')}, {drafts}{plan.num_q_heads} "
        f"query and {plan.num_kv_heads} KV heads, {_counted(plan.num_items, 'item', 'items')} "
        f"({plan.num_shared_items} shared), "
        f"{_counted(plan.num_partials, 'partial result', 'partial results')}"
        f"{', joint' if plan.joint else ''}"
        f"{', degraded: ' if plan.degraded else ''}{plan.degraded}>"
    )


def plan_text(plan: Plan) -> str:
    """``plan_line``, then the pack tree and the items, a line each; what is left out is counted."""
    if not plan.num_items:
        return plan_line(plan)
    nodes = _nodes_of(plan)
    lines = [plan_line(plan), "tree:", *islice(_tree(nodes), _LINES)]
    if len(nodes) > _LINES:
        lines.append(f"  ... and {_counted(len(nodes) - _LINES, 'more node', 'more nodes')}")
    lines.append("items, in the order in which they begin:")
    lines += [_item(plan, index) for index in range(min(plan.num_items, _LINES))]
    if plan.num_items > _LINES:
        lines.append(f"  ... and {_counted(plan.num_items - _LINES, 'more item', 'more items')}")
    return "\n".join(lines)


def _nodes_of(plan: Plan) -> list[Node]:
    """What the items were made of; pieces of a split node are one node again."""
    spans = defaultdict[tuple[int, ...], list[tuple[int, float]]](list)
    for one in ranges(plan):
        end = inf if one.tokens == DYNAMIC else one.begin + one.tokens
        spans[tuple(sorted(one.queries))].append((one.begin, end))
    nodes: list[Node] = []
    for queries, parts in spans.items():
        for begin, end in sorted(parts):
            if nodes and nodes[-1][::2] == (queries, begin):
                begin = nodes.pop()[1]
            nodes.append((queries, begin, end))
    return sorted(nodes, key=lambda node: (node[0][0], node[1]))


def _tree(nodes: list[Node]) -> Iterator[str]:
    """A line for each node, beneath the one that holds its first query's tokens before it."""
    ends_at = {(query, node[2]): node for node in nodes for query in node[0]}
    below = defaultdict[Node | None, list[Node]](list)
    for node in nodes:
        below[ends_at.get((node[0][0], node[1]))].append(node)
    waiting = [(node, 1) for node in reversed(below[None])]
    while waiting:
        node, depth = waiting.pop()
        queries, begin, end = node
        yield f"{'  ' * depth}{_tokens(begin, end)} of {_numbers('query', 'queries', queries)}"
        waiting += [(child, depth + 1) for child in reversed(below[node])]


def _item(plan: Plan, index: int) -> str:
    item = plan.items[index]
    members = plan.members[item["member_offset"] :][: item["num_queries"]]
    is_branch = item["kind"] == BRANCH
    heavy_end = plan.num_wide_items + plan.num_heavy_items
    kind = "wide" if index < plan.num_wide_items else "heavy" if index < heavy_end else "light"
    first, count = plan.item_segments[index].tolist()
    query, begin, tokens, *_ = plan.segments[first].tolist()
    end = inf if tokens == DYNAMIC else begin + tokens
    reads = f"{_tokens(begin, end)} in the row of query {query}"
    if is_branch:
        reads = _counted(count, "segment", "segments")
        of_pairs = index - plan.num_wide_items  # items of pairs before it
        if 0 <= of_pairs < plan.num_paired_items:
            common = _counted(item["common_tiles"] * _TILE, "token", "tokens")
            reads += f", {common} with item {plan.num_wide_items + (of_pairs ^ 1)}"
    partials = members["partial"][members["partial"] != _DIRECT].tolist()
    to = [_numbers("partial", "partials", partials)] if partials else []
    to += ["output"] if len(partials) < len(members) else []
    return (
        f"  item {index}: {'branch' if is_branch else kind}  "
        f"{_numbers('query', 'queries', members['query'].tolist())}  {reads}  "
        f"tile of {item['row_tile']} rows, to {' and '.join(to)}"
    )


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _tokens(begin: int, end: float) -> str:
    return f"tokens [{begin}, {'end of sequence' if end == inf else end})"


def _numbers(one: str, several: str, numbers: Collection[int]) -> str:
    """``query 3``, ``queries 0-15, 20``; of many runs the first, and how many numbers there are."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        runs.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    if len(runs) > _RUNS:
        runs[_RUNS:] = [f"... ({len(numbers)} in all)"]
    return f"{one if len(numbers) == 1 else several} {', '.join(runs)}"
