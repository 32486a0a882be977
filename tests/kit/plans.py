# SPDX-License-Identifier: Apache-2.0
"""Plans written by hand, byte by byte as csrc/plan.h has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

DYNAMIC = -1
DIRECT = -1
BRANCH = -2
BRANCH_ROWS = 64

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        *((name, "<i4") for name in ("num_queries", "num_items", "num_members", "num_partials")),
        ("num_shared_items", "<i4"),
        *((name, "<i4") for name in ("items_offset", "members_offset", "queries_offset")),
        *((name, "<i4") for name in ("total_bytes", "max_queries", "max_items", "max_partials")),
        *((name, "<i4") for name in ("num_q_heads", "num_kv_heads")),
        *((name, "<i4") for name in ("num_wide_items", "num_heavy_items")),
        *((name, "<i4") for name in ("num_segments", "segments_offset", "branch_tokens")),
        ("reserved", "<i4", 3),
    ]
)
ITEM = np.dtype(
    [
        *((name, "<i4") for name in ("member_offset", "num_queries", "row", "kv_start", "kv_len")),
        *((name, "<i2") for name in ("row_tile", "kv_tile")),
        *((name, "<i4") for name in ("partial", "tokens")),
    ]
)
MEMBER = np.dtype([("query", "<i4"), ("partial", "<i4")])
QUERY = np.dtype([("partial_offset", "<i4"), ("num_splits", "<i4")])
SEGMENT = np.dtype(
    [(name, "<i4") for name in ("row", "kv_start", "kv_len", "room", "first", "num_queries")]
)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of all of ``queries``, one item of a plan."""

    queries: tuple[int, ...]
    start: int
    length: int  # or DYNAMIC


@dataclass(frozen=True)
class Branch:
    """Pieces that one item does, each of consecutive ones of the branch's queries. ``room``: tokens
    that each tail has in the snapshot's list."""

    pieces: tuple[Piece, ...]
    tails_first: bool = False
    room: int = 256

    @property
    def queries(self) -> tuple[int, ...]:
        return tuple(sorted({query for piece in self.pieces for query in piece.queries}))

    @property
    def segments(self) -> list[Piece]:
        """As a plan lists them: what more queries see first, tails last; or the other way round."""
        listed = sorted(self.pieces, key=lambda p: (p.length == DYNAMIC, -len(p.queries), p.start))
        return listed[::-1] if self.tails_first else listed

    @property
    def seen_by_all(self) -> int:
        """Item::kv_tile: blocks of 64 tokens, the first or, if negative, the last ones."""
        tokens = 0
        for piece in self.segments[::-1] if self.tails_first else self.segments:
            if piece.queries != self.queries or piece.length == DYNAMIC:
                break
            tokens += piece.length
        return -(tokens // 64) if self.tails_first else tokens // 64


Parts = Sequence[Piece | Branch]


def branched(pieces: Iterable[Piece], most: int) -> list[Branch]:
    """All of a forest's pieces in branches of ``most`` consecutive queries; every second one has
    its tails first."""
    blocks: dict[int, list[Piece]] = {}
    for piece in pieces:
        for block in sorted({query // most for query in piece.queries}):
            mine = tuple(query for query in piece.queries if query // most == block)
            blocks.setdefault(block, []).append(replace(piece, queries=mine))
    return [Branch(tuple(blocks[block]), block % 2 == 1) for block in sorted(blocks)]


def pieces_of(parts: Parts) -> list[Piece]:
    """The pieces, also those in branches; of one that is in several branches all parts."""
    return [p for part in parts for p in (part.pieces if isinstance(part, Branch) else (part,))]


@dataclass
class HandPlan:
    """A plan's parts, free to be damaged, and the object that ``decode`` takes."""

    header: npt.NDArray[Any]
    items: npt.NDArray[Any]
    members: npt.NDArray[Any]
    queries: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    _bytes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def encode(self) -> HandPlan:
        """Lay the parts out again, after changes to them."""
        parts = (self.header, self.items, self.members, self.queries, self.segments)
        raw = b"".join(part.tobytes() for part in parts)
        self._bytes = np.frombuffer(raw + bytes(-len(raw) % 8), np.uint64).copy()
        return self

    @property
    def data_ptr(self) -> int:
        return self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes


Damage = Callable[[HandPlan], object]


def set_to(part: str, index: int, name: str, value: int) -> Damage:
    """What sets a field of a plan's part."""

    def apply(plan: HandPlan) -> None:
        getattr(plan, part)[name][index] = value

    return apply


def encode(parts: Parts, num_queries: int, heads: tuple[int, int], wide: bool = False) -> HandPlan:
    """The plan whose items are ``parts``: first, with ``wide``, those of more than 64 packed rows
    as wide items, then the heavy ones, of more than 32 or branches, then the others, each in that
    order."""
    group = heads[0] // heads[1]

    def tile(part: Piece | Branch) -> int:
        rows = len(part.queries) * group
        if isinstance(part, Branch):
            assert rows <= BRANCH_ROWS
            return BRANCH_ROWS
        return 128 if wide and rows > 64 else 64 if rows > 32 else 16

    parts = sorted(parts, key=tile, reverse=True)
    tiles = [tile(part) for part in parts]
    of_query: list[list[Piece | Branch]] = [[] for _ in range(num_queries)]
    for part in parts:
        for query in part.queries:
            of_query[query].append(part)
    queries = np.zeros(num_queries, QUERY)
    partial: dict[tuple[int, Piece | Branch], int] = {}
    for query, mine in enumerate(of_query):
        queries[query] = (len(partial) if len(mine) > 1 else 0, len(mine))
        if len(mine) > 1:
            # By position; a branch is the last.
            for part in sorted(mine, key=lambda p: 2**31 if isinstance(p, Branch) else p.start):
                partial[query, part] = len(partial)
    items, members, segments = _items_of(parts, tiles, partial)
    arrays = (items, np.array(members, MEMBER), queries, np.array(segments, SEGMENT))
    header = _header_of(arrays, heads)
    header["num_partials"] = len(partial)
    header["num_shared_items"] = sum(
        any(len(piece.queries) > 1 for piece in pieces_of([part])) for part in parts
    )
    header["num_wide_items"], header["num_heavy_items"] = tiles.count(128), tiles.count(64)
    header["branch_tokens"] = sum(_room_of(part) for part in parts if isinstance(part, Branch))
    return HandPlan(header, *arrays).encode()


def _items_of(
    parts: Parts, tiles: list[int], partial: dict[tuple[int, Piece | Branch], int]
) -> tuple[npt.NDArray[Any], list[tuple[int, int]], list[tuple[int, ...]]]:
    """Items, members and segments; ``partial``: the slots of queries that several parts serve."""
    items = np.zeros(len(parts), ITEM)
    members: list[tuple[int, int]] = []
    segments: list[tuple[int, ...]] = []
    branch_tokens = 0
    for i, part in enumerate(parts):
        row = part.queries[-1]
        at = (len(members), len(part.queries))
        if isinstance(part, Branch):
            listed = [_segment(part, piece) for piece in part.segments]
            where = (len(segments), branch_tokens, BRANCH, tiles[i], part.seen_by_all)
            items[i] = (*at, *where, len(listed), 0)
            segments += listed
            branch_tokens += _room_of(part)
        else:
            single = partial.get((row, part), DIRECT) if len(part.queries) == 1 else 0
            items[i] = (*at, row, part.start, part.length, tiles[i], 64, single, 0)
        members += [(query, partial.get((query, part), DIRECT)) for query in part.queries]
    return items, members, segments


def _header_of(parts: Sequence[npt.NDArray[Any]], heads: tuple[int, int]) -> npt.NDArray[Any]:
    """A header with the sizes of ``parts``, which are items, members, queries and segments, and
    with where they lie, one behind the other."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"] = 0x50415431, 4
    header["num_q_heads"], header["num_kv_heads"] = heads
    offset = HEADER.itemsize
    for name, part in zip(("items", "members", "queries", "segments"), parts, strict=True):
        header[f"num_{name}"], header[f"{name}_offset"] = len(part), offset
        offset += part.nbytes
    header["total_bytes"] = offset
    return header


def _room_of(branch: Branch) -> int:
    """Tokens that a branch takes of the snapshot's list."""
    room = sum(_segment(branch, piece)[3] for piece in branch.segments)
    return -(-room // 64) * 64


def _segment(branch: Branch, piece: Piece) -> tuple[int, ...]:
    first = branch.queries.index(piece.queries[0])
    assert piece.queries == branch.queries[first : first + len(piece.queries)]
    room = branch.room if piece.length == DYNAMIC else piece.length
    return piece.queries[-1], piece.start, piece.length, room, first, len(piece.queries)


def prefix(num_queries: int, length: int) -> list[Piece]:
    everyone = tuple(range(num_queries))
    return [Piece(everyone, 0, length), *(Piece((i,), length, DYNAMIC) for i in everyone)]


def forest(rng: np.random.Generator, num_queries: int, max_splits: int = 3) -> list[Piece]:
    """Pieces of a random forest: groups of queries share a segment, groups in them the next, and
    each query ends with a tail that may be empty. Segments are cut into up to ``max_splits``."""
    pieces: list[Piece] = []

    def cut(queries: tuple[int, ...], start: int, length: int) -> None:
        inner = rng.choice(length - 1, min(max_splits, length) - 1, replace=False) + 1
        edges = [0, *sorted(inner.tolist()), length]
        pieces.extend(Piece(queries, start + a, b - a) for a, b in pairwise(edges))

    def grow(queries: list[int], start: int, depth: int) -> None:
        length = int(rng.integers(1, 150))
        if len(queries) > 1 and depth < 3:
            cut(tuple(queries), start, length)
            at = int(rng.integers(1, len(queries)))
            grow(queries[:at], start + length, depth + 1)
            grow(queries[at:], start + length, depth + 1)
            return
        for query in queries:
            private = int(rng.integers(0, 100))
            if private and rng.integers(2):
                cut((query,), start, private)
            else:
                private = 0
            pieces.append(Piece((query,), start + private, DYNAMIC))

    grow(list(range(num_queries)), 0, 0)
    rng.shuffle(pieces)  # type: ignore[arg-type]
    return pieces


def paths_of(pieces: list[Piece], num_queries: int) -> list[list[tuple[int, int, int]]]:
    """Radix paths of a forest: its shared pieces are nodes, the rest is private."""
    shared = sorted((p for p in pieces if len(p.queries) > 1), key=lambda p: p.start)
    return [
        [(i, p.start, p.start + p.length) for i, p in enumerate(shared) if query in p.queries]
        for query in range(num_queries)
    ]
