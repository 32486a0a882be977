# SPDX-License-Identifier: Apache-2.0
"""Prompts that would share a long beginning, but for a few tokens near their start.

Two prompts are compared where they have a run of tokens in common at different depths, or at one
depth after a difference: hashes of short windows find such runs, of which the smallest of each
neighbourhood is kept, so that a run of some length always keeps one of its hashes, wherever in the
prompt it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_pat.estimate.kinds import Kind, kind_of
from sglang_pat.estimate.radix import Symbols, common_prefix
from sglang_pat.estimate.requests import Request

Decode = Callable[[Sequence[int]], str]

MOST_DIFFERENT = 48  # tokens of a difference
LEAST_COMMON = 64  # tokens that follow it and are the same
# The tokens that follow are so many times those of the difference, and of those before it.
TIMES_DIFFERENT, TIMES_BEFORE = 4, 0.25
# Prompts that are compared with each other; of more, so many evenly spaced, and the others with the
# first of each of so many groups.
MAX_PROMPTS, _GROUPS = 1024, 4
_ROUNDS = 3  # differences of a prompt that are found, one behind the other
_LOOKED_AT = 4096  # tokens of each prompt
_WINDOW, _NEIGHBOURS = 16, 32  # tokens of a hash, hashes of which the smallest is kept
_CONTEXT = 24  # tokens on each side that help to tell what a difference is
_PRIME, _MASK = np.uint64(0x9E3779B97F4A7C15), (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a prompt the tokens [start, end) that differ from those of others."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """Of two prompts the tokens that differ, and how many equal ones follow."""

    mine: Cut
    theirs: Cut
    common: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Prompts that a few tokens keep from sharing. ``cuts``: those tokens, by the prompt's number;
    ``start``: where the first of them stand; ``common``: those
    that all have in common behind it; ``kind``: what the tokens are, "" where no text is known;
    ``pieces``: their texts in whole words, or their token ids, by the prompt's number."""

    cuts: dict[int, Cut]
    start: int
    common: int
    kind: str
    pieces: dict[int, str]


def find_all(
    requests: Sequence[Request], decode: Decode | None
) -> tuple[list[Difference], list[Request]]:
    """The differences, also those that show only once others are out of the way, the one that costs
    the most first; and the requests with all of them at the end of the prompt. ``decode`` as in
    ``find``."""
    found: list[Difference] = []
    current = list(requests)
    removed: defaultdict[int, list[Cut]] = defaultdict(list)
    for _ in range(_ROUNDS):
        differences = find(current, decode)
        if not differences:
            break
        found += [_placed(difference, removed) for difference in differences]
        current = moved(current, differences)
        for difference in differences:
            for number, cut in difference.cuts.items():
                removed[number].append(cut)
    return sorted(found, key=_cost), current


def _placed(difference: Difference, removed: Mapping[int, Sequence[Cut]]) -> Difference:
    """The same where it stands in prompts of which nothing was ``removed``, first cuts first."""
    cuts = {}
    for number, cut in difference.cuts.items():
        start = cut.start
        for earlier in reversed(removed.get(number, ())):
            start += earlier.end - earlier.start if start >= earlier.start else 0
        cuts[number] = Cut(start, start + cut.end - cut.start)
    return replace(difference, cuts=cuts, start=min(cut.start for cut in cuts.values()))


def _cost(difference: Difference) -> int:
    return -difference.common * len(difference.cuts)


def find(requests: Sequence[Request], decode: Decode | None) -> list[Difference]:
    """The differences, the one that costs the most first. With ``decode``, the text of token ids,
    only those that are a date or time, a UUID, an id or a number; without, all.

    A prompt is named in one difference only, its first, and equal prompts count as one each.
    """
    looked_at = _sample(len(requests))
    groups: defaultdict[int, dict[int, Found]] = defaultdict(dict)
    taken: set[int] = set()
    seen: set[tuple[int, int]] = set()
    for first, others in _anchored(requests, looked_at):
        if first in taken and first not in groups:
            continue
        for other in others:
            if other in taken or (first, other) in seen:
                continue
            seen.add((first, other))
            found = compare(requests[first].symbols, requests[other].symbols)
            if found is None:
                continue
            if decode is None or _kind(requests, first, other, found, decode):
                groups[first][other] = found
                taken.update((first, other))
    _add_others(requests, set(range(len(requests))) - {*looked_at} - taken, groups, decode)
    differences = {
        first: _difference(requests, first, members, decode) for first, members in groups.items()
    }
    return sorted(_with_likes(requests, looked_at, differences), key=_cost)


def _with_likes(
    requests: Sequence[Request], looked_at: Sequence[int], differences: Mapping[int, Difference]
) -> Iterator[Difference]:
    """The differences, each also with the prompts that begin as its first one does until behind the
    cut, such as later turns of that conversation: beside it they do not differ there."""
    named = {number for difference in differences.values() for number in difference.cuts}
    sample = set(looked_at)
    largest = {
        first: rank
        for rank, first in enumerate(sorted(differences, key=lambda n: _cost(differences[n])))
    }
    for first, difference in differences.items():
        cut = difference.cuts[first]
        cuts, pieces = dict(difference.cuts), dict(difference.pieces)
        for number in range(len(requests)):
            if number in named or (number not in sample and largest[first] >= _GROUPS):
                continue
            equal = common_prefix(requests[first].symbols, requests[number].symbols)
            if equal - cut.end >= LEAST_COMMON:
                named.add(number)
                cuts[number] = cut
                if first in pieces:
                    pieces[number] = pieces[first]
        yield replace(
            difference,
            cuts={number: cuts[number] for number in sorted(cuts)},
            pieces={number: pieces[number] for number in sorted(pieces)},
        )


def _add_others(
    requests: Sequence[Request],
    others: set[int],
    groups: dict[int, dict[int, Found]],
    decode: Decode | None,
) -> None:
    """Adds prompts that were not looked at to the largest groups."""
    largest = sorted(groups, key=lambda first: (-len(groups[first]), first))[:_GROUPS]
    for other in sorted(others):
        for first in largest:
            found = compare(requests[first].symbols, requests[other].symbols)
            if found is None:
                continue
            if decode is None or _kind(requests, first, other, found, decode):
                groups[first][other] = found
                break


def moved(requests: Sequence[Request], differences: Sequence[Difference]) -> list[Request]:
    """The same requests with the tokens that differ at the end of the prompt."""
    found = list(requests)
    for difference in differences:
        for number, cut in difference.cuts.items():
            symbols = requests[number].symbols
            parts = (symbols[: cut.start], symbols[cut.end :], symbols[cut.start : cut.end])
            found[number] = replace(requests[number], symbols=np.concatenate(parts))
    return found


def compare(one: Symbols, other: Symbols) -> Found | None:
    """Where two prompts differ and how many equal tokens follow, or None unless the difference is
    short, near the start and costs much."""
    start = common_prefix(one, other)
    if start in (len(one), len(other)):
        return None
    best: Found | None = None
    reach = start + MOST_DIFFERENT + 1
    near = other[start:reach]
    for i, token in enumerate(one[start:reach].tolist(), start):
        follow = one[i : i + LEAST_COMMON]
        for j in (np.flatnonzero(near == token) + start).tolist():
            if not np.array_equal(follow, other[j : j + LEAST_COMMON]):
                continue
            common = common_prefix(one[i:], other[j:])
            if best is None or common > best.common:
                best = Found(Cut(start, i), Cut(start, j), common)
    if best is None:
        return None
    longest = max(best.mine.end, best.theirs.end) - start
    least = max(LEAST_COMMON, TIMES_DIFFERENT * longest, TIMES_BEFORE * start)
    return best if best.common >= least else None


def _sample(count: int) -> list[int]:
    if count <= MAX_PROMPTS:
        return list(range(count))
    return [i * count // MAX_PROMPTS for i in range(MAX_PROMPTS)]


def _anchored(
    requests: Sequence[Request], looked_at: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    """Prompts that have a run of tokens in common, the first of them apart; large groups first."""
    by_hash: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for number in looked_at:
        for value in anchors(requests[number].symbols):
            by_hash[value][number] = None
    groups = {tuple(numbers): None for numbers in by_hash.values() if len(numbers) > 1}
    for first, *others in sorted(groups, key=lambda numbers: (-len(numbers), numbers)):
        yield first, others


def anchors(symbols: Symbols) -> set[int]:
    """Hashes of windows of a prompt's first tokens. Two prompts with _WINDOW + _NEIGHBOURS - 1
    equal tokens in a row, at whatever depth, have one in common."""
    looked_at = symbols[:_LOOKED_AT].astype(np.uint64)
    if len(looked_at) < _WINDOW:
        return set()
    windows = np.lib.stride_tricks.sliding_window_view(looked_at, _WINDOW)
    factors = np.array([pow(int(_PRIME), i + 1, _MASK + 1) for i in range(_WINDOW)], np.uint64)
    hashes: npt.NDArray[np.uint64] = ((windows + np.uint64(1)) * factors).sum(axis=1)
    hashes ^= hashes >> np.uint64(29)
    hashes *= _PRIME
    if len(hashes) <= _NEIGHBOURS:
        return {int(hashes.min())}
    neighbours = np.lib.stride_tricks.sliding_window_view(hashes, _NEIGHBOURS)
    return {int(value) for value in np.unique(neighbours.min(axis=1))}


def _kind(
    requests: Sequence[Request], first: int, other: int, found: Found, decode: Decode
) -> Kind | None:
    """What two prompts differ by, None for what may have a reason."""
    return kind_of(
        _around(requests[first].symbols, found.mine, decode),
        _around(requests[other].symbols, found.theirs, decode),
    )


def _around(symbols: Symbols, cut: Cut, decode: Decode) -> str:
    """The text of a difference with some before and behind it."""
    return decode(symbols[max(0, cut.start - _CONTEXT) : cut.end + _CONTEXT].tolist())


def _difference(
    requests: Sequence[Request], first: int, members: dict[int, Found], decode: Decode | None
) -> Difference:
    """Joins the pairs of one prompt and others: the difference of all begins where the first of
    theirs does and ends where the last one does."""
    start = min(found.mine.start for found in members.values())
    end = max(found.mine.end for found in members.values())
    common = min(found.mine.end + found.common for found in members.values()) - end
    cuts = {first: Cut(start, end)}
    names: dict[str, None] = {}
    pieces: dict[int, str] = {}
    for number, found in members.items():
        cuts[number] = Cut(start, found.theirs.end + end - found.mine.end)
        if decode is not None and (kind := _kind(requests, first, number, found, decode)):
            names.update(dict.fromkeys(kind.name.split(" and ")))
            pieces.setdefault(first, kind.one)
            pieces[number] = kind.other
    if decode is None:
        for number, cut in cuts.items():
            tokens = requests[number].symbols[cut.start : cut.end].tolist()
            pieces[number] = " ".join(map(str, tokens))
    ordered = sorted(cuts)
    return Difference(
        {number: cuts[number] for number in ordered},
        start,
        max(common, 0),
        " and ".join(names),
        {number: pieces[number] for number in ordered},
    )
