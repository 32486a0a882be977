# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture without scripts or links: a map of tokens by queries, in which each item
covers what it reads. Titles, which browsers show under the pointer, name the item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import ceil, sqrt
from typing import NamedTuple
from xml.sax.saxutils import escape

from sglang_pat.plan_text import BRANCH, DYNAMIC, Plan, ranges

_LEFT, _TOP, _WIDTH, _RIGHT = 80, 40, 880, 40  # pixels: names of queries, heading, tokens, margin
_LARGEST_ROW, _SMALLEST_ROW, _MAP_HEIGHT = 24.0, 2.0, 560.0
_TEXT_ROW, _LETTER = 12.0, 6.4  # height and width of text
_COLORS = {"shared": "#cfe2f7", "tail": "#fbe6c2", "branch": "#d6efd2"}
_STYLE = "<style>text{font:11px sans-serif;fill:#1d2733}rect{stroke:#5d6e88}</style>"


class Box(NamedTuple):
    """Tokens [start, end) that ``item`` reads for ``queries``, which ascend. ``kind``: shared
    (several queries read the tokens), tail (one query does) or branch (a part of the tree, each
    token for some of the queries)."""

    item: int
    kind: str
    start: int
    end: int
    queries: tuple[int, ...]


def boxes_of(plan: Plan, seq_lens: Sequence[int]) -> list[Box]:
    """What the items of a plan read, item by item."""
    found = []
    for one in ranges(plan):
        end = seq_lens[one.reader] if one.tokens == DYNAMIC else one.begin + one.tokens
        kind = "shared" if plan.items["num_queries"][one.item] > 1 else "tail"
        kind = "branch" if plan.items["kind"][one.item] == BRANCH else kind
        found.append(Box(one.item, kind, one.begin, end, tuple(sorted(one.queries))))
    return found


def write_svg(plan: Plan, seq_lens: Sequence[int], below: Sequence[str]) -> str:
    """The document; ``below``: lines of text under the map."""
    boxes = boxes_of(plan, seq_lens)
    places = _places({token for box in boxes for token in (box.start, box.end)})
    row = min(_LARGEST_ROW, max(_SMALLEST_ROW, _MAP_HEIGHT / len(seq_lens)))
    bottom = _TOP + row * len(seq_lens)
    parts = [_text(16, 24, "items: who reads which tokens together; each runs once per KV head")]
    for query in range(0, len(seq_lens), ceil(_TEXT_ROW / row)):
        parts.append(_text(16, _TOP + query * row + max(row, _TEXT_ROW) / 2 + 4, f"query {query}"))
    for box in boxes:
        parts += _rectangles(box, places, row)
    free = 0.0  # from where on there is room for a number
    for token, x in places.items():
        if x >= free:
            parts.append(_text(x, bottom + 14, f"{token}"))
            free = x + len(f"{token}") * _LETTER + 4
    parts += [_text(16, bottom + 40 + 17 * n, line) for n, line in enumerate(below)]
    size = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{bottom + 60 + 17 * len(below):.0f}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE]
    return "\n".join([*head, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>\n"])


def _places(tokens: Iterable[int]) -> dict[int, float]:
    """Where each token begins. Intervals are as wide as the root of their tokens, so that a tail of
    40 tokens is seen beside a prefix of 8192."""
    ends = sorted({0, *tokens})
    widths = [sqrt(end - start) for start, end in pairwise(ends)]
    scale = _WIDTH / (sum(widths) or 1.0)
    before = accumulate(widths, initial=0.0)
    return {end: _LEFT + scale * width for end, width in zip(ends, before, strict=True)}


def _rectangles(box: Box, places: dict[int, float], row: float) -> Iterator[str]:
    """One for each run of neighbouring queries, with the item's name if it fits."""
    name, left = f"item {box.item}", places[box.start]
    width = places[box.end] - left
    for _, run in groupby(enumerate(box.queries), lambda pair: pair[1] - pair[0]):
        queries = [query for _, query in run]
        y, height = _TOP + queries[0] * row, len(queries) * row
        yield (
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{_COLORS[box.kind]}" stroke-width="{1 if row > 4 else 0.3}">'
            f"<title>{name}: {box.kind}, tokens [{box.start}, {box.end})</title></rect>"
        )
        if height >= _TEXT_ROW and len(name) * _LETTER <= width:
            yield _text(left + 2, y + height / 2 + 4, name)


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
