# SPDX-License-Identifier: Apache-2.0
"""The first text of a prompt that keeps the text behind it from being shared, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_pat.estimate.requests import Request, Symbols, common_prefix

Decode = Callable[[Symbols], str]
ORDER = "order of parts"  # what differs has a meaning, but more text that is equal stands behind it
_LEAST_COMMON = 64  # tokens behind the difference that are equal
_TIMES_BEFORE = 0.25  # and how many of them there must be for each token before
_LOOKED_AT = 4096  # first tokens of each prompt in which equal runs are looked for
_WINDOW = 16  # tokens that are equal where an equal run is found; it has 31 or more
_CONTEXT = 24  # tokens on each side that tell what a difference is
_SHOWN = 48  # tokens of a difference that are shown

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
_KINDS = {  # in the order in which they are tried
    "uuid": r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",
    "date or time": rf"\d{{4}}[-/.]\d\d?[-/.]\d\d?(?:[T ]{_TIME})?|\d\d?[-/.]\d\d?[-/.]\d{{2,4}}"
    rf"|{_TIME}|\b{_MONTH} \d\d?\b(?:,? \d{{4}}\b)?|\b\d\d?\.? {_MONTH}(?:,? \d{{4}}\b)?"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b",
    "id": r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{6,}\b",
    "number": r"\d+(?:[.,]\d+)*",
}
_PATTERN = re.compile("|".join(f"({pattern})" for pattern in _KINDS.values()), re.IGNORECASE)


class Pair(NamedTuple):
    """Two prompts: where they begin to differ, the end of what differs in both, and how many equal
    tokens follow."""

    start: int
    end: int
    other_end: int
    common: int


class Difference(NamedTuple):
    """``prompts`` would share a long beginning with prompt ``first``, but for what differs from
    token ``start`` on, before ``common`` equal tokens. ``kind``: a key of ``_KINDS``, ORDER, or
    "token ids" where no text is known; ``texts``: what differs, of the first two prompts."""

    first: int
    prompts: list[int]
    start: int
    common: int
    kind: str
    texts: tuple[str, str]


def find(requests: Sequence[Request], decode: Decode | None) -> list[Difference]:
    """The differences, the one that costs the most first; of a prompt only the first. Every prompt
    is compared with the first one that has an equal run of tokens, at whatever depth."""
    symbols = [request.symbols for request in requests]
    places: dict[bytes, tuple[int, int]] = {}  # first prompt with a window, and where in it
    found: dict[tuple[int, str, int], Difference] = {}
    for number, mine in enumerate(symbols):
        partner = _partner(symbols, mine, places)
        if partner is None:
            for at in range(0, min(len(mine), _LOOKED_AT) - _WINDOW, _WINDOW):
                places.setdefault(mine[at : at + _WINDOW].tobytes(), (number, at))
            continue
        first, pair = partner
        kind, *texts = _named(pair, symbols[first], mine, decode)
        new = Difference(first, [], pair.start, pair.common, kind, (texts[0], texts[1]))
        # Long ones are no variants of one text unless they end at the same place.
        group = (first, kind, pair.end if pair.end - pair.start > _SHOWN else 0)
        one = found.setdefault(group, new)
        one.prompts.append(number)
        start, common = min(one.start, pair.start), min(one.common, pair.common)
        found[group] = one._replace(start=start, common=common)
    return sorted(found.values(), key=lambda one: -one.common * len(one.prompts))


def _partner(
    symbols: Sequence[Symbols], mine: Symbols, places: dict[bytes, tuple[int, int]]
) -> tuple[int, Pair] | None:
    """The prompt that has a long run of ``mine`` behind what differs, and the pair that they are;
    None where what differs costs little, or where there is no such prompt."""
    starts: dict[int, int] = {}  # where it begins to differ from another prompt
    found: list[tuple[int, Pair]] = []
    for j in range(min(len(mine), _LOOKED_AT) - _WINDOW + 1):
        first, i = places.get(mine[j : j + _WINDOW].tobytes(), (-1, 0))
        if first < 0:
            continue
        other = symbols[first]
        if first not in starts:
            starts[first] = common_prefix(other, mine)
        start = starts[first]
        if start >= min(i, j):  # they share it already, or one repeats what both begin with
            continue
        back = common_prefix(other[start:i][::-1], mine[start:j][::-1])
        end, my_end = i - back, j - back
        common = common_prefix(other[end:], mine[my_end:])
        if common >= max(_LEAST_COMMON, _TIMES_BEFORE * max(end, my_end)):
            found.append((first, Pair(start, end, my_end, common)))
            if len(found) == _WINDOW:  # of a text that repeats itself, enough to have the best
                break
    return max(found, key=lambda one: one[1].common, default=None)


def _named(pair: Pair, one: Symbols, other: Symbols, decode: Decode | None) -> tuple[str, str, str]:
    """The kind of what differs, and both texts. A text is longer on both sides, so that words are
    whole."""
    start, *ends, _ = pair
    spans = list(zip((one, other), ends, strict=True))
    if decode is None:
        shown = [str(tokens[start:end][:_SHOWN].tolist()) for tokens, end in spans]
        return "token ids", shown[0], shown[1]
    if max(ends) - start <= _SHOWN:
        before = max(0, start - _CONTEXT)
        found = kind_of(*(decode(tokens[before : end + _CONTEXT]) for tokens, end in spans))
        if found[0] != ORDER:
            return found
    shown = [decode(tokens[start:end][:_SHOWN]) for tokens, end in spans]
    return ORDER, shown[0], shown[1]


def kind_of(one: str, other: str) -> tuple[str, str, str]:
    """What two texts differ by, a key of ``_KINDS`` or ORDER, and what differs in both of them."""
    found = [list(_PATTERN.finditer(text)) for text in (one, other)]
    rest = [_PATTERN.sub("", text) for text in (one, other)]
    if rest[0] == rest[1] and len(found[0]) == len(found[1]):
        for mine, theirs in zip(*found, strict=True):
            if mine[0] != theirs[0]:
                index = min(mine.lastindex or 0, theirs.lastindex or 0)
                return list(_KINDS)[index - 1], mine[0], theirs[0]
    return ORDER, one, other
