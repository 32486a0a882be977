# SPDX-License-Identifier: Apache-2.0
"""An explained plan as one SVG file: tokens from left to right, queries from top to bottom.

Every token of every query lies in one rectangle of the upper map, its radix node or tail, and in
one of the lower map, its item. Titles, which a browser shows under the pointer, have the details;
those of the queries' names say what is merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import ceil, sqrt
from typing import NamedTuple
from xml.sax.saxutils import escape

from sglang_pat.explain.parts import Explanation, Item, Queries
from sglang_pat.explain.text import counted, merge_line, node_line, numbers, sum_lines

_LEFT, _WIDTH, _RIGHT = 80, 880, 40  # pixels: names of queries, tokens, room for the last number
_LARGEST_ROW, _SMALLEST_ROW, _MAP_HEIGHT = 24.0, 2.0, 560.0
_TEXT_ROW, _LETTER = 12.0, 6.4  # height and width of text
_COLORS = {"node": "#dfe7f1", "shared": "#cfe2f7", "tail": "#fbe6c2", "branch": "#d6efd2"}
_STYLE = "text{font:11px sans-serif;fill:#1d2733}rect{stroke:#5d6e88}"


class _Box(NamedTuple):
    """Tokens [start, end) of ``queries``, with a name and a title."""

    start: int
    end: int
    queries: Queries
    kind: str
    name: str
    title: str


def write_svg(found: Explanation, machine: str) -> str:
    """The document; ``machine``: what the plan is made for, in words."""
    nodes = [
        _Box(
            *(node.start, node.end, node.queries),
            *(("tail", "tail") if node.id is None else ("node", f"node {node.id}")),
            node_line(node),
        )
        for node in found.nodes
    ]
    items = [
        _Box(part.start, part.end, part.queries, item.kind, f"item {item.index}", _title(item))
        for item in found.items
        for part in item.ranges
    ]
    merges = [merge_line(merge) for merge in found.merges]
    places = _places({token for box in (*nodes, *items) for token in (box.start, box.end)})
    row = min(_LARGEST_ROW, max(_SMALLEST_ROW, _MAP_HEIGHT / len(merges)))
    parts = [_text(16, 24, f"{counted(len(merges), 'request')}, planned for {machine}")]
    top = 60.0
    for head, boxes in (
        ("pack tree: what the queries share", nodes),
        ("items: who reads which tokens, together; each runs once per KV head", items),
    ):
        parts += [_text(16, top, head), *_map(boxes, merges, places, row, top + 12)]
        top += row * len(merges) + 72
    parts += [_text(16, top + 17 * n, line) for n, line in enumerate(sum_lines(found, machine))]
    size = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{top + 120:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{_STYLE}</style>",
            f'<rect {size} fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _places(tokens: Iterable[int]) -> dict[int, float]:
    """Where each token begins. Intervals are as wide as the root of their tokens, so that a tail of
    40 tokens is seen beside a prefix of 8192."""
    ends = sorted({0, *tokens})
    widths = [sqrt(end - start) for start, end in pairwise(ends)]
    scale = _WIDTH / (sum(widths) or 1.0)
    before = accumulate(widths, initial=0.0)
    return {end: _LEFT + scale * width for end, width in zip(ends, before, strict=True)}


def _title(item: Item) -> str:
    slots = sorted(slot for slot in item.partials.values() if slot is not None)
    return (
        f"item {item.index}: {item.kind} of {numbers('query', 'queries', item.queries)}; "
        f"{item.rows} packed rows in a tile of {item.row_tile}; to "
        f"{numbers('partial', 'partials', slots) if slots else 'output'}"
    )


def _map(
    boxes: Iterable[_Box],
    merges: Sequence[str],
    places: dict[int, float],
    row: float,
    top: float,
) -> Iterator[str]:
    for query in range(0, len(merges), ceil(_TEXT_ROW / row)):
        y = top + query * row + max(row, _TEXT_ROW) / 2 + 4
        yield _text(16, y, f"query {query}", title=merges[query])
    for box in boxes:
        left, width = places[box.start], places[box.end] - places[box.start]
        # One rectangle for each run of neighbouring queries, with the name if it fits.
        for _, run in groupby(enumerate(box.queries), lambda pair: pair[1] - pair[0]):
            queries = [query for _, query in run]
            y, height = top + queries[0] * row, len(queries) * row
            yield (
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{_COLORS[box.kind]}" stroke-width="{1 if row > 4 else 0.3}">'
                f"<title>{escape(box.title)}</title></rect>"
            )
            if height >= _TEXT_ROW and len(box.name) * _LETTER <= width:
                yield _text(left + 2, y + height / 2 + 4, box.name)
    free = 0.0  # from where on there is room for a number
    for token, x in places.items():
        if x >= free:
            yield _text(x, top + row * len(merges) + 14, f"{token}")
            free = x + len(f"{token}") * _LETTER + 4


def _text(x: float, y: float, text: str, title: str = "") -> str:
    more = f"<title>{escape(title)}</title>" if title else ""
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}{more}</text>'
