# SPDX-License-Identifier: Apache-2.0
"""Plans written by hand, byte by byte as csrc/plan.h has them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kit.pieces import DYNAMIC, LONG_TAIL_ROOM, Branch, Parts, Piece, pieces_of
from sglang_pat.planner import plan
from sglang_pat.target import Target

DIRECT = -1
SINGLE, PACK, BRANCH, DRAFTS = 0, 1, 2, 3
UNMASKED_FIRST, UNMASKED_LAST, COMMON_LAST = 0, 1, 2  # of a branch
BRANCH_ROWS = 64

PARTS = ("items", "item_segments", "members", "queries", "segments")  # as a plan has them

HEADER = np.dtype(
    [
        *((name, "<u4") for name in ("magic", "version")),
        *((f"num_{name}", "<i4") for name in ("queries", "items", "members", "segments")),
        *((f"num_{name}", "<i4") for name in ("partials", "shared_items")),
        *((f"{part}_offset", "<i4") for part in PARTS),
        *((name, "<i4") for name in ("total_bytes", "num_q_heads", "num_kv_heads")),
        *((f"num_{name}_items", "<i4") for name in ("wide", "heavy")),
        *((f"{name}_tokens", "<i4") for name in ("branch", "list")),
        ("list", "<u8"),
        *((name, "<i4") for name in ("draft_tokens", "joint", "first_units", "num_paired_items")),
        ("unused", "<i4", 2),
    ]
)
# The extension's own, of a plan without queries.
_none = plan([], [], Target.h200(num_q_heads=1, num_kv_heads=1, head_dim=64, max_queries=1))
DTYPES = {part: getattr(_none, part).dtype for part in PARTS}
EMPTY = np.frombuffer(ctypes.string_at(_none.data_ptr, HEADER.itemsize), HEADER)


@dataclass
class HandPlan:
    """A plan's parts, free to be damaged, with what ``decode`` and ``Workspace`` ask of a plan."""

    header: npt.NDArray[Any]
    items: npt.NDArray[Any]
    item_segments: npt.NDArray[Any]
    members: npt.NDArray[Any]
    queries: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    draft_tokens: int = 1

    def __post_init__(self) -> None:
        self.encode()

    def encode(self) -> HandPlan:
        """Lay the parts out again, after changes to them."""
        raw = b"".join(getattr(self, part).tobytes() for part in ("header", *PARTS))
        self.words = np.frombuffer(raw + bytes(-len(raw) % 8), np.int32).copy()
        return self

    @property
    def data_ptr(self) -> int:
        return self.words.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def __getattr__(self, name: str) -> int:
        """A field of the header."""
        if name not in (HEADER.names or ()):
            raise AttributeError(name)
        return int(self.header[name][0])

    def fits(self, seq_lens_ptr: int, count: int) -> bool:
        return count == self.num_queries


def joint(plan: HandPlan) -> HandPlan:
    """The same plan of heavy items, each for both halves of an SM."""
    header = plan.header.copy()
    header["joint"] = 1
    return replace(plan, header=header)


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
    return replace(plan, header=header, items=items)


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
    queries: list[tuple[int, int]] = []
    partial: dict[tuple[int, Piece | Branch], int] = {}
    for query, mine in enumerate(of_query):
        queries.append((len(partial) if len(mine) > 1 else 0, len(mine)))
        if len(mine) > 1:
            # By position; a branch is the last.
            for part in sorted(mine, key=lambda p: 2**31 if isinstance(p, Branch) else p.start):
                partial[query, part] = len(partial)
    items, members = _items_of(parts, tiles, partial, draft_tokens)
    segments = [_segments(part) for part in parts]
    counts = [len(of_part) for of_part in segments]
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    found = {
        "items": items,
        "item_segments": list(zip(firsts, counts, strict=True)),
        "members": members,
        "queries": queries,
        "segments": [segment for of_part in segments for segment in of_part],
    }
    arrays = {part: np.array(found[part], DTYPES[part]) for part in PARTS}
    header = _header_of(arrays)
    header["num_q_heads"], header["num_kv_heads"] = heads
    header["num_partials"], header["draft_tokens"] = len(partial), draft_tokens
    header["num_shared_items"] = sum(
        any(len(piece.queries) > 1 for piece in pieces_of([part])) for part in parts
    )
    header["num_wide_items"], header["num_heavy_items"] = tiles.count(128), tiles.count(64)
    header["branch_tokens"] = sum(_room_of(part) for part in parts if isinstance(part, Branch))
    header["list_tokens"] = sum(map(_room_of, parts))
    return HandPlan(header, **arrays, draft_tokens=draft_tokens)


def _items_of(
    parts: Parts,
    tiles: list[int],
    partial: dict[tuple[int, Piece | Branch], int],
    draft_tokens: int,
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Items and members; ``partial``: the slots of queries that several parts serve."""
    starts, end = {}, 0  # in the list, the branches' first
    for part in sorted(parts, key=lambda part: not isinstance(part, Branch)):
        starts[part] = end
        end += _room_of(part)
    items: list[tuple[int, ...]] = []
    members: list[tuple[int, int]] = []
    for part, tile in zip(parts, tiles, strict=True):
        of_item = [(query, partial.get((query, part), DIRECT)) for query in part.queries]
        query, slot, unmasked, kind, order = -1, 0, 0, PACK, UNMASKED_FIRST
        if isinstance(part, Branch):
            kind, unmasked = BRANCH, part.seen_by_all
            order = UNMASKED_LAST if part.tails_first else UNMASKED_FIRST
        elif len(of_item) == 1:
            (query, slot) = of_item[0]
            kind = DRAFTS if draft_tokens > 1 and part.length == DYNAMIC else SINGLE
        where = (len(members), len(of_item), starts[part], 0, query, slot)
        items.append((*where, tile, unmasked, 0, kind, order))
        members += of_item
    return items, members


def _header_of(parts: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """A header with the sizes of ``parts``, and with where they lie, one behind the other."""
    header, offset = EMPTY.copy(), HEADER.itemsize
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
