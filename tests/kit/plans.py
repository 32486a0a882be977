# SPDX-License-Identifier: Apache-2.0
"""Plans written by hand, byte by byte as csrc/plan.h has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kit.pieces import DYNAMIC, LONG_TAIL_ROOM, Branch, Parts, Piece, pieces_of

DIRECT = -1
SINGLE, PACK, BRANCH, DRAFTS = 0, 1, 2, 3
UNMASKED_FIRST, UNMASKED_LAST, COMMON_LAST = 0, 1, 2  # of a branch
BRANCH_ROWS = 64

PARTS = ("items", "item_segments", "members", "queries", "segments")  # as a plan has them

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        *((name, "<i4") for name in ("num_queries", "num_items", "num_members", "num_segments")),
        *((name, "<i4") for name in ("num_partials", "num_shared_items")),
        *((f"{part}_offset", "<i4") for part in PARTS),
        *((name, "<i4") for name in ("total_bytes", "num_q_heads", "num_kv_heads")),
        *((name, "<i4") for name in ("num_wide_items", "num_heavy_items")),
        *((name, "<i4") for name in ("branch_tokens", "list_tokens")),
        ("list", "<u8"),
        ("draft_tokens", "<i4"),
        ("joint", "<i4"),
        ("first_units", "<i4"),
        ("num_paired_items", "<i4"),
        ("unused", "<i4", 2),
    ]
)
ITEM = np.dtype(
    [
        *((name, "<i4") for name in ("member_offset", "num_queries", "list_start", "tokens")),
        *((name, "<i4") for name in ("query", "partial")),
        *((name, "<i2") for name in ("row_tile", "unmasked_tiles", "common_tiles")),
        *((name, "i1") for name in ("kind", "order")),
    ]
)
ITEM_SEGMENTS = np.dtype([("first_segment", "<i4"), ("num_segments", "<i4")])
MEMBER = np.dtype([("query", "<i4"), ("partial", "<i4")])
QUERY = np.dtype([("partial_offset", "<i4"), ("num_splits", "<i4")])
SEGMENT = np.dtype(
    [
        (name, "<i4")
        for name in ("query", "kv_start", "kv_len", "room", "first_member", "num_queries")
    ]
)


@dataclass
class HandPlan:
    """A plan's parts, free to be damaged, and the object that ``decode`` takes."""

    header: npt.NDArray[Any]
    items: npt.NDArray[Any]
    item_segments: npt.NDArray[Any]
    members: npt.NDArray[Any]
    queries: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    _bytes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def encode(self) -> HandPlan:
        """Lay the parts out again, after changes to them."""
        raw = b"".join(getattr(self, part).tobytes() for part in ("header", *PARTS))
        self._bytes = np.frombuffer(raw + bytes(-len(raw) % 8), np.uint64).copy()
        return self

    @property
    def data_ptr(self) -> int:
        return self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def draft_tokens(self) -> int:
        return int(self.header["draft_tokens"][0])

    @property
    def list_tokens(self) -> int:
        return int(self.header["list_tokens"][0])


def joint(plan: HandPlan) -> HandPlan:
    """The same plan of heavy items, each for both halves of an SM."""
    header = plan.header.copy()
    header["joint"] = 1
    return replace(plan, header=header).encode()


def paired(plan: HandPlan, *common: int) -> HandPlan:
    """The same plan with its first branches paired, two by two: ``common`` KV tiles of each pair,
    negative if the pair's halves begin with their other tokens. The branches must be the first
    items that are not wide."""
    header, items = plan.header.copy(), plan.items.copy()
    first = int(header["num_wide_items"][0])
    for pair, tiles in enumerate(common):
        two = slice(first + 2 * pair, first + 2 * pair + 2)
        items["common_tiles"][two] = abs(tiles)
        items["order"][two] = COMMON_LAST if tiles < 0 else UNMASKED_FIRST
    header["num_paired_items"] = 2 * len(common)
    return replace(plan, header=header, items=items).encode()


Damage = Callable[[HandPlan], object]


def set_to(part: str, index: int | slice, name: str, value: int) -> Damage:
    """What sets a field of one element of a plan's part, or of some."""

    def apply(plan: HandPlan) -> None:
        getattr(plan, part)[name][index] = value

    return apply


def encode(
    parts: Parts,
    num_queries: int,
    heads: tuple[int, int],
    wide: bool = False,
    draft_tokens: int = 1,
) -> HandPlan:
    """The plan whose items are ``parts``: first, with ``wide``, those of more than 64 packed rows
    as wide items, then the heavy ones, of more than 16 or branches, then the others, each in that
    order."""
    group = heads[0] // heads[1] * draft_tokens

    def tile(part: Piece | Branch) -> int:
        rows = len(part.queries) * group
        if isinstance(part, Branch):
            assert rows <= BRANCH_ROWS
            return BRANCH_ROWS
        return 128 if wide and rows > 64 else 64 if rows > 16 else 16

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
    items, members, segments = _items_of(parts, tiles, partial, draft_tokens)
    arrays = {
        "items": items,
        "item_segments": _item_segments(parts),
        "members": np.array(members, MEMBER),
        "queries": queries,
        "segments": np.array(segments, SEGMENT),
    }
    header = _header_of(arrays, heads)
    header["num_partials"], header["draft_tokens"] = len(partial), draft_tokens
    header["num_shared_items"] = sum(
        any(len(piece.queries) > 1 for piece in pieces_of([part])) for part in parts
    )
    header["num_wide_items"], header["num_heavy_items"] = tiles.count(128), tiles.count(64)
    header["branch_tokens"] = sum(_room_of(part) for part in parts if isinstance(part, Branch))
    header["list_tokens"] = sum(map(_room_of, parts))
    return HandPlan(header, **arrays).encode()


def _items_of(
    parts: Parts,
    tiles: list[int],
    partial: dict[tuple[int, Piece | Branch], int],
    draft_tokens: int,
) -> tuple[npt.NDArray[Any], list[tuple[int, int]], list[tuple[int, ...]]]:
    """Items, members and segments; ``partial``: the slots of queries that several parts serve."""
    items = np.zeros(len(parts), ITEM)
    members: list[tuple[int, int]] = []
    segments: list[tuple[int, ...]] = []
    starts = _list_starts(parts)
    for i, part in enumerate(parts):
        item = items[i]
        item["member_offset"], item["num_queries"] = len(members), len(part.queries)
        item["list_start"], item["row_tile"] = starts[part], tiles[i]
        item["query"], item["kind"] = -1, PACK
        if isinstance(part, Branch):
            item["unmasked_tiles"], item["kind"] = part.seen_by_all, BRANCH
            item["order"] = UNMASKED_LAST if part.tails_first else UNMASKED_FIRST
        elif len(part.queries) == 1:
            (query,) = part.queries
            drafts = draft_tokens > 1 and part.length == DYNAMIC
            item["query"], item["kind"] = query, DRAFTS if drafts else SINGLE
            item["partial"] = partial.get((query, part), DIRECT)
        members += [(query, partial.get((query, part), DIRECT)) for query in part.queries]
        segments += _segments(part)
    return items, members, segments


def _item_segments(parts: Parts) -> npt.NDArray[Any]:
    counts = [len(_segments(part)) for part in parts]
    firsts = np.cumsum([0, *counts])[:-1]
    return np.array(list(zip(firsts, counts, strict=True)), ITEM_SEGMENTS)


def _list_starts(parts: Parts) -> dict[Piece | Branch, int]:
    """Where the tokens of each part begin in the list, the branches' first."""
    starts, end = {}, 0
    for part in sorted(parts, key=lambda part: not isinstance(part, Branch)):
        starts[part] = end
        end += _room_of(part)
    return starts


def _header_of(parts: dict[str, npt.NDArray[Any]], heads: tuple[int, int]) -> npt.NDArray[Any]:
    """A header with the sizes of ``parts``, and with where they lie, one behind the other."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"] = 0x50415431, 10
    header["num_q_heads"], header["num_kv_heads"] = heads
    offset = HEADER.itemsize
    for name in PARTS:
        if name != "item_segments":
            header[f"num_{name}"] = len(parts[name])
        header[f"{name}_offset"] = offset
        offset += parts[name].nbytes
    header["total_bytes"] = offset
    return header


def _room_of(part: Piece | Branch) -> int:
    """Tokens that a part takes of the list."""
    room = sum(segment[3] for segment in _segments(part))
    return -(-room // 64) * 64 if isinstance(part, Branch) else room


def _segments(part: Piece | Branch) -> list[tuple[int, ...]]:
    pieces = part.segments if isinstance(part, Branch) else [part]
    tail_room = part.room if isinstance(part, Branch) else LONG_TAIL_ROOM
    segments = []
    for piece in pieces:
        first = part.queries.index(piece.queries[0])
        assert piece.queries == part.queries[first : first + len(piece.queries)]
        room = tail_room if piece.length == DYNAMIC else piece.length
        where = (piece.queries[-1], piece.start, piece.length, room)
        segments.append((*where, first, len(piece.queries)))
    return segments
