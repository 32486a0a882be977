# SPDX-License-Identifier: Apache-2.0
"""The first text of a prompt that keeps the text behind it from being shared, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sglang_pat.estimate.requests import Request, Symbols, common_prefix

Decode = Callable[[Symbols], str]
ORDER = "order of parts"  # what differs has a meaning, but more text that is equal stands behind it
_LEAST_COMMON = 64  # tokens behind the difference that are equal
_TIMES_BEFORE = 0.25  # and how many of them there must be for each token before
_LOOKED_AT = 4096  # first tokens of each prompt in which equal runs are looked for
_WINDOW, _NEIGHBOURS = 16, 32  # tokens of a hash; the least of so many hashes is kept
_CONTEXT = 24  # tokens on each side that tell what a difference is
_SHOWN = 48  # tokens of a difference that are shown
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, n, 2**64) for n in range(1, _WINDOW + 1)], np.uint64)

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?(?:[ap]m\b|Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_KINDS = {  # in the order in which they are tried
    "uuid": r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",
    "date or time": (
        rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:[T ]{_TIME})?"
        r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
        rf"|{_TIME}|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?"
        rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\.? {_MONTH}(?:,? \d{{4}}\b)?"
        r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    ),
    "id": r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[a-z0-9]+(?:[_-][a-z0-9]+)*\b(?<=[\w-]{6})"
    r"|\b[0-9a-f]{8,}\b",
    "number": r"\d+(?:[.,]\d+)*",
}
_PATTERN = re.compile("|".join(f"({pattern})" for pattern in _KINDS.values()), re.IGNORECASE)


class Pair(NamedTuple):
    """Two prompts: where they begin to differ, the end of what differs in both, how many equal
    tokens follow, and what differs: its kind and both texts."""

    start: int
    end: int
    other_end: int
    common: int
    kind: str = ""
    texts: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Difference:
    """Prompts that would share a long beginning, but for the tokens of ``cuts``, [start, end) by
    the prompt's number. ``common``: equal tokens behind them. ``kind``: a key of ``_KINDS``, ORDER,
    or "token ids" where no text is known; ``texts``: what differs, of the first two prompts."""

    cuts: dict[int, tuple[int, int]]
    common: int
    kind: str
    texts: tuple[str, str]


def find(requests: Sequence[Request], decode: Decode | None) -> list[Difference]:
    """The differences, the one that costs the most first; of a prompt only the first.

    Every prompt is compared with the first one that has an equal run of tokens, at whatever depth.
    Hashes of short windows find such runs: of each neighbourhood the least is kept, so that a run
    of _WINDOW + _NEIGHBOURS - 1 tokens always has one of its own.
    """
    symbols = [request.symbols for request in requests]
    places: dict[int, tuple[int, int]] = {}  # first prompt with a hash, and where in it
    groups: dict[tuple[int, str, int], dict[int, Pair]] = {}
    for number, mine in enumerate(symbols):
        anchors = list(_anchors(mine))
        starts: dict[int, int] = {}  # where it begins to differ from another prompt
        for value, at in anchors:
            first, place = places.get(value, (number, at))
            if first not in starts:
                starts[first] = common_prefix(symbols[first], mine)
            if pair := _compare(symbols[first], mine, starts[first], place, at):
                pair = _named(pair, symbols[first], mine, decode)
                # Long ones are no variants of one text unless they end at the same place.
                end = pair.end if pair.end - pair.start > _SHOWN else 0
                groups.setdefault((first, pair.kind, end), {})[number] = pair
                break
        else:
            for value, at in anchors:
                places.setdefault(value, (number, at))
    alone = set(range(len(symbols)))
    alone -= {number for (first, *_), group in groups.items() for number in (first, *group)}
    found = [_joined(symbols, alone, first, group) for (first, *_), group in groups.items()]
    return sorted(found, key=lambda one: -one.common * len(one.cuts))


def moved(requests: Sequence[Request], differences: Sequence[Difference]) -> list[Request]:
    """The requests with what differs at the end of the prompt."""
    found = list(requests)
    for difference in differences:
        for number, (start, end) in difference.cuts.items():
            old = requests[number].symbols
            parts = (old[:start], old[end:], old[start:end])
            found[number] = replace(requests[number], symbols=np.concatenate(parts))
    return found


def _anchors(symbols: Symbols) -> Iterator[tuple[int, int]]:
    """Hashes of windows of a prompt, and where these begin, in order."""
    looked_at = symbols[:_LOOKED_AT].astype(np.uint64)
    if len(looked_at) < _WINDOW + _NEIGHBOURS:
        return
    windows = np.lib.stride_tricks.sliding_window_view(looked_at, _WINDOW)
    hashes = ((windows + np.uint64(1)) * _FACTORS).sum(axis=1)
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _FACTORS[0]
    neighbours = np.lib.stride_tricks.sliding_window_view(hashes, _NEIGHBOURS)
    for at in np.unique(neighbours.argmin(axis=1) + np.arange(len(neighbours))).tolist():
        yield int(hashes[at]), at


def _compare(one: Symbols, other: Symbols, start: int, i: int, j: int) -> Pair | None:
    """Of two prompts that differ from ``start`` on and have a window in common at ``i`` and ``j``,
    or None where what differs costs little."""
    if start >= min(i, j):  # they share it already, or one repeats what both begin with
        return None
    back = common_prefix(one[start:i][::-1], other[start:j][::-1])
    i, j = i - back, j - back
    common = common_prefix(one[i:], other[j:])
    least = max(_LEAST_COMMON, _TIMES_BEFORE * max(i, j))
    return Pair(start, i, j, common) if common >= least else None


def _named(pair: Pair, one: Symbols, other: Symbols, decode: Decode | None) -> Pair:
    """The pair with what differs. A text is longer on both sides, so that words are whole."""
    spans = ((one, pair.end), (other, pair.other_end))
    if decode is None:
        texts = [str(symbols[pair.start : end][:_SHOWN].tolist()) for symbols, end in spans]
        return pair._replace(kind="token ids", texts=(texts[0], texts[1]))
    if max(end for _, end in spans) - pair.start <= _SHOWN:
        before = max(0, pair.start - _CONTEXT)
        kind, *words = kind_of(*(decode(tokens[before : end + _CONTEXT]) for tokens, end in spans))
        if kind != ORDER:
            return pair._replace(kind=kind, texts=(words[0], words[1]))
    texts = [decode(symbols[pair.start : end][:_SHOWN]) for symbols, end in spans]
    return pair._replace(kind=ORDER, texts=(texts[0], texts[1]))


def _joined(
    symbols: Sequence[Symbols], alone: set[int], first: int, group: dict[int, Pair]
) -> Difference:
    """One difference of pairs with the first prompt: it begins where the first of theirs does and
    ends where the last one does. Prompts that are ``alone`` are in it if they begin as the first
    does until behind what differs, as later turns of one conversation do."""
    pairs = group.values()
    start, end = min(pair.start for pair in pairs), max(pair.end for pair in pairs)
    cuts = {first: (start, end)}
    cuts |= {n: (start, pair.other_end + end - pair.end) for n, pair in group.items()}
    for number in alone:
        if common_prefix(symbols[first], symbols[number]) >= end + _LEAST_COMMON:
            cuts[number] = (start, end)
    common = min(pair.end + pair.common for pair in pairs) - end
    one = next(iter(pairs))
    return Difference(cuts, max(0, common), one.kind, one.texts)


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
