# SPDX-License-Identifier: Apache-2.0
"""The prefix tree of one batch as a few lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sglang_pat.explain.parts import TreeNode
from sglang_pat.explain.text import counted

_BAR = 24  # characters of the longest bar
_LETTERS = 44  # of a node's text
_LEAST = 0.01  # of all that a tree saves: what a node saves that is drawn
# The text of tokens [start, end) of a query.
Words = Callable[[int, int, int], str]


def tree_lines(nodes: Sequence[TreeNode], limit: int, words: Words | None = None) -> list[str]:
    """Nodes that several requests share, with a bar as long as the K/V reads that reading it once
    saves, and in one line what the other requests of a node have to themselves.

    ``nodes`` as from ``explain``; ``limit``: shared nodes at most, 0 for all, those that save the
    most and the nodes above them, without those that hardly save anything; ``words``: the text
    that a node begins with.
    """
    above = _above(nodes)
    saves = [(len(node.queries) - 1) * (node.end - node.start) for node in nodes]
    shown = sorted(_chosen(nodes, saves, above, limit))
    ends = {node.queries[0]: node.end for node in nodes if node.id is None}
    most = max(saves, default=0) or 1
    rows = []
    for number in shown:
        node = nodes[number]
        inner = {
            query for below in shown if above[below] == number for query in nodes[below].queries
        }
        indent = "  " * node.depth
        rows.append(
            (
                f"{indent}tokens [{node.start:,}, {node.end:,})",
                f"{len(node.queries):,} requests",
                "#" * max(1, round(_BAR * saves[number] / most)),
                _quoted(words(node.queries[0], node.start, node.end)) if words is not None else "",
            )
        )
        own = [ends.get(query, node.end) - node.end for query in node.queries if query not in inner]
        rows += _own(own, f"{indent}  ")
    outside = set(ends) - {query for number in shown for query in nodes[number].queries}
    rows += _own([ends[query] for query in outside], "")
    return list(_aligned(rows))


def _above(nodes: Sequence[TreeNode]) -> list[int | None]:
    """The number of each node's parent; parents come before their children."""
    found: list[int | None] = []
    open_: list[int] = []
    for number, node in enumerate(nodes):
        del open_[node.depth :]
        found.append(open_[-1] if open_ else None)
        if node.id is not None:
            open_.append(number)
    return found


def _chosen(
    nodes: Sequence[TreeNode], saves: Sequence[int], above: Sequence[int | None], limit: int
) -> set[int]:
    shared = [number for number, node in enumerate(nodes) if node.id is not None]
    shared.sort(key=lambda number: (-saves[number], number))
    least = _LEAST * sum(saves) if limit else 0
    chosen: set[int] = set()
    for number in shared:
        line: set[int] = set()
        at: int | None = number
        while at is not None and at not in chosen:
            line.add(at)
            at = above[at]
        if saves[number] < least or (limit and len(chosen) + len(line) > limit):
            break
        chosen |= line
    return chosen


def _own(tokens: Sequence[int], indent: str) -> Iterator[tuple[str, str, str, str]]:
    """The line for requests that have so many tokens below a node, or below none."""
    if tokens:
        least, most = min(tokens), max(tokens)
        each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        yield (f"{indent}{counted(len(tokens), 'request')} of {each} tokens more", "", "", "")


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    if not text:
        return ""
    return f'"{text[:_LETTERS]}{"..." if len(text) > _LETTERS else ""}"'


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    shared = [row for row in rows if row[1]]
    widths = [max((len(row[column]) for row in shared), default=0) for column in range(3)]
    for span, readers, bar, text in rows:
        line = f"{span:<{widths[0]}}  {readers:>{widths[1]}}  {bar:<{widths[2]}}  {text}"
        yield (line if readers else span).rstrip()
