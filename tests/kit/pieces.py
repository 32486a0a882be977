# SPDX-License-Identifier: Apache-2.0
"""Forests of queries, piece by piece: plans are written by hand from them (``kit.plans``), and
must read all of every query (``kit.trees``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

DYNAMIC = -1
TAIL_ROOM = 256  # tokens that a tail of a branch has in the list, unless the branch says otherwise
LONG_TAIL_ROOM = 8192  # those of another tail


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of all of ``queries``, one item of a plan."""

    queries: tuple[int, ...]
    start: int
    length: int  # or DYNAMIC


@dataclass(frozen=True)
class Branch:
    """Pieces that one item does, each of consecutive ones of the branch's queries. ``room``: tokens
    that each tail has in the list."""

    pieces: tuple[Piece, ...]
    tails_first: bool = False
    room: int = TAIL_ROOM

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
        """Item::unmasked_tiles, of 64 tokens."""
        tokens = 0
        for piece in self.segments[::-1] if self.tails_first else self.segments:
            if piece.queries != self.queries or piece.length == DYNAMIC:
                break
            tokens += piece.length
        return tokens // 64


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


def shared(num_queries: int, length: int, splits: int = 1) -> list[Piece]:
    """Queries with one common prefix in equal pieces, and a tail each."""
    size = length // splits
    everyone = tuple(range(num_queries))
    return [Piece(everyone, i * size, size) for i in range(splits)] + [
        Piece((query,), splits * size, DYNAMIC) for query in everyone
    ]


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


def check_pieces(pieces: list[list[tuple[int, int]]], seq_lens: list[int]) -> None:
    """The (start, length) that items read of each query make up its sequence, without overlaps."""
    for of_query, seq_len in zip(pieces, seq_lens, strict=True):
        position = 0
        for start, length in sorted(of_query):
            assert start == position
            position += length
        assert position == seq_len
