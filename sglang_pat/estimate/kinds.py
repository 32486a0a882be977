# SPDX-License-Identifier: Apache-2.0
"""Kinds of text that differ from prompt to prompt for no reason that the model needs to know."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
# In the order in which they are tried, the more telling first.
_PATTERNS = {
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "date or time": (
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
        r"(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?)?"
        r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
        r"|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\b\.?)?"
        rf"|(?:\b{_DAY},? +)?\b{_MONTH}\.? +\d{{1,2}}(?:st|nd|rd|th)?\b(?:,? +\d{{4}}\b)?"
        rf"|(?:\b{_DAY},? +)?\b\d{{1,2}}(?:st|nd|rd|th)?\.? +{_MONTH}\b(?:,? +\d{{4}}\b)?"
        rf"|\b{_DAY}\b"
    ),
    # Letters and digits mixed, as of sessions and requests, or hexadecimal digits.
    "id": (
        r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*\b(?<=[\w-]{6})"
        r"|\b[0-9a-f]{8,}\b"
    ),
    "number": r"\d+(?:[.,]\d+)*",
}
_COMPILED = {kind: re.compile(text, re.IGNORECASE) for kind, text in _PATTERNS.items()}
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """What two texts differ by. ``name``: "uuid", "date or time", "id" or "number", several with
    " and " between them; ``one``, ``other``: the differing words of both, as far as a date or an id
    reaches, and what stands between them."""

    name: str
    one: str
    other: str


def kind_of(one: str, other: str) -> Kind | None:
    """What two texts differ by; None where any of it is something else, or nothing differs."""
    names: dict[str, None] = {}
    pieces = []
    differing = _differing(one, other)
    for side, text in enumerate((one, other)):
        reach: list[int] = []
        for spans in differing:
            found = _cover(text, *spans[side])
            if found is None:
                return None
            names.update(dict.fromkeys(found[0]))
            reach += found[1]
        pieces.append(text[min(reach) : max(reach)] if reach else "")
    return Kind(" and ".join(names), *pieces) if names else None


def _differing(one: str, other: str) -> list[tuple[Span, Span]]:
    """Spans of both in which they differ, in whole words."""
    words = [[match.span() for match in _WORD.finditer(text)] for text in (one, other)]
    texts = [
        [text[first:last] for first, last in spans]
        for text, spans in zip((one, other), words, strict=True)
    ]
    found = []
    for tag, i, j, k, m in SequenceMatcher(None, texts[0], texts[1], autojunk=False).get_opcodes():
        if tag != "equal":
            found.append((_span(words[0], i, j), _span(words[1], k, m)))
    return found


def _span(words: list[Span], first: int, last: int) -> Span:
    if first == last:
        at = words[first][0] if first < len(words) else words[-1][1] if words else 0
        return at, at
    return words[first][0], words[last - 1][1]


def _cover(text: str, start: int, end: int) -> tuple[list[str], Span] | None:
    """Kinds that cover the letters and digits of [start, end) and how far they reach, or None."""
    open_ = {at for at in range(start, end) if text[at].isalnum()}
    kinds = []
    for kind, pattern in _COMPILED.items():
        if not open_:
            break
        for match in pattern.finditer(text):
            covered = open_.intersection(range(*match.span()))
            if covered:
                open_ -= covered
                kinds.append(kind)
                start, end = min(start, match.start()), max(end, match.end())
    return None if open_ else (kinds, (start, end))
