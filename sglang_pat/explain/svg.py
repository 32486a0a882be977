# SPDX-License-Identifier: Apache-2.0
"""An explained plan as one SVG file: tokens from left to right, queries from top to bottom.

Every token of every query lies in one rectangle of the upper map, its radix node or tail, and in
one of the lower map, its item. Details stand in the rectangles' titles, which a browser shows under
the pointer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import sqrt
from xml.sax.saxutils import escape

from sglang_pat.explain.parts import Explanation, Item, Queries
from sglang_pat.explain.text import counted, item_kind, merge_line, node_line, numbers, sum_lines

_LEFT, _WIDTH, _RIGHT = 80, 720, 260  # pixels: names of queries, tokens, merges
_LARGEST_ROW, _SMALLEST_ROW, _MAP_HEIGHT = 24.0, 2.0, 560.0
_TEXT_ROW = 12.0  # rows at least so high have their own text
_LETTER = 6.4  # width
_COLORS = {
    "node": ("#dfe7f1", "#7d8ea8"),
    "own": ("#f5f1e6", "#b3a77f"),
    "shared": ("#cfe2f7", "#3b6ea5"),
    "tail": ("#fbe6c2", "#b57f1d"),
    "branch": ("#d6efd2", "#4b8b3f"),
}
_STYLE = (
    "text{font:11px sans-serif;fill:#1d2733}"
    ".head{font-size:14px;font-weight:bold}.dim{fill:#5a6675}"
)


class _Map:
    """Places tokens and queries. Intervals between ends of ranges are as wide as the root of their
    tokens, so that a tail of 40 tokens is seen beside a prefix of 8192."""

    def __init__(self, found: Explanation) -> None:
        ends = {0}
        for item in found.items:
            ends.update(end for part in item.ranges for end in (part.start, part.end))
        for node in found.nodes:
            ends.update((node.start, node.end))
        self.bounds = sorted(ends)
        widths = [sqrt(b - a) for a, b in pairwise(self.bounds)]
        scale = _WIDTH / (sum(widths) or 1.0)
        self._places = [float(_LEFT)]
        for width in widths:
            self._places.append(self._places[-1] + width * scale)
        count = max(1, len(found.seq_lens))
        self.row = max(_SMALLEST_ROW, min(_LARGEST_ROW, _MAP_HEIGHT / count))
        self.height = self.row * count

    def x(self, token: int) -> float:
        """Left edge of a token that begins or ends a range."""
        return self._places[bisect_right(self.bounds, token) - 1]


def write_svg(found: Explanation, machine: str) -> str:
    """The document; ``machine``: what the plan is made for, in words."""
    place = _Map(found)
    top = 74.0
    parts = [
        _text(16, 24, f"{counted(len(found.seq_lens), 'request')}, planned for {machine}", "head"),
        _text(16, 44, _legend(found), "dim"),
    ]
    parts += _tree(found, place, top)
    top += place.height + 76
    parts += _items(found, place, top)
    parts += _merges(found, place, top)
    top += place.height + 52
    for line in sum_lines(found, machine):
        parts.append(_text(16, top, line))
        top += 17
    width = _LEFT + _WIDTH + _RIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:.0f}" '
            f'viewBox="0 0 {width} {top:.0f}">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{top:.0f}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _legend(found: Explanation) -> str:
    kinds = sorted({item.kind for item in found.items})
    return (
        f"{counted(len(found.items), 'item')} ({', '.join(kinds)}), each run once per KV head; "
        "widths are not to scale"
    )


def _tree(found: Explanation, place: _Map, top: float) -> Iterator[str]:
    yield _text(16, top, "pack tree: what the queries share", "head")
    top += 12
    yield from _query_names(found, place, top)
    for node in found.nodes:
        color = "own" if node.id is None else "node"
        name = "tail" if node.id is None else f"node {node.id}"
        names = (f"{name}, {counted(node.end - node.start, 'token')}", name)
        span = (node.start, node.end)
        yield from _boxes(place, top, span, node.queries, color, names, node_line(node))
    yield from _axis(place, top)


def _items(found: Explanation, place: _Map, top: float) -> Iterator[str]:
    yield _text(16, top, "items: who reads which tokens, together", "head")
    yield _text(_LEFT + _WIDTH + 12, top, "merge", "head")
    top += 12
    yield from _query_names(found, place, top)
    for item in found.items:
        names = (f"item {item.index}", f"{item.index}")
        for part in item.ranges:
            title = _item_title(item, part.start, part.end)
            yield from _boxes(
                place, top, (part.start, part.end), part.queries, item.kind, names, title
            )
    yield from _axis(place, top)


def _item_title(item: Item, start: int, end: int) -> str:
    slots = sorted(slot for slot in item.partials.values() if slot is not None)
    to = numbers("partial", "partials", slots) if slots else "output"
    return (
        f"item {item.index}: {item_kind(item)}; tokens [{start}, {end}) of "
        f"{numbers('query', 'queries', item.queries)}; {item.rows} packed rows in a tile of "
        f"{item.row_tile}; to {to}"
    )


def _merges(found: Explanation, place: _Map, top: float) -> Iterator[str]:
    x = _LEFT + _WIDTH + 12
    for merge in found.merges:
        y = top + 12 + merge.query * place.row
        title = f"<title>{escape(merge_line(merge))}</title>"
        if place.row < _TEXT_ROW:
            yield (
                f'<rect x="{x}" y="{y:.1f}" width="24" height="{place.row:.1f}" fill="#e4e4e4">'
                f"{title}</rect>"
            )
            continue
        source = numbers("partial", "partials", merge.slots) if merge.slots else "written directly"
        text = escape(f"{source} \u2192 output {merge.query}")
        yield f'<text x="{x}" y="{y + place.row / 2 + 4:.1f}">{text}{title}</text>'


def _query_names(found: Explanation, place: _Map, top: float) -> Iterator[str]:
    step = max(1, round(_TEXT_ROW / place.row + 0.5)) if place.row < _TEXT_ROW else 1
    middle = max(place.row, _TEXT_ROW) / 2 + 4
    for query in range(0, len(found.seq_lens), step):
        yield _text(16, top + query * place.row + middle, f"query {query}")


def _boxes(
    place: _Map,
    top: float,
    span: tuple[int, int],
    queries: Queries,
    color: str,
    names: Iterable[str],
    title: str,
) -> Iterator[str]:
    """A rectangle for each run of neighbouring queries, with the first of ``names`` that fits."""
    fill, stroke = _COLORS[color]
    left, right = place.x(span[0]), place.x(span[1])
    for first, last in _runs(queries):
        y, height = top + first * place.row, (last + 1 - first) * place.row
        yield (
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="{height:.1f}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="{1 if place.row > 4 else 0.3}">'
            f"<title>{escape(title)}</title></rect>"
        )
        fits = (name for name in names if len(name) * _LETTER + 6 <= right - left)
        if height >= _TEXT_ROW and (name := next(fits, "")):
            middle = f'x="{(left + right) / 2:.1f}" y="{y + height / 2 + 4:.1f}"'
            yield (
                f'<text {middle} text-anchor="middle" pointer-events="none">{escape(name)}</text>'
            )


def _runs(queries: Queries) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers in an ascending tuple."""
    first = last = queries[0]
    for query in queries[1:]:
        if query != last + 1:
            yield first, last
            first = query
        last = query
    yield first, last


def _axis(place: _Map, top: float) -> Iterator[str]:
    free = 0.0  # from where on there is room for a number
    y = top + place.height
    for token in place.bounds:
        x = place.x(token)
        yield f'<path d="M{x:.1f} {y:.1f}v4" stroke="#8a94a1"/>'
        half = len(f"{token}") * _LETTER / 2 + 2
        if x - half >= free:
            yield (
                f'<text class="dim" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{token}'
                "</text>"
            )
            free = x + half


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:.1f}"{style}>{escape(text)}</text>'
