# SPDX-License-Identifier: Apache-2.0
"""Plans of hand with each kind of item, alone and beside the others, for properties that all have.

Which kernel code runs an item depends on its packed rows (query heads of a KV head x draft tokens x
queries), on whether they all see the same tokens, and on what stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from kit.cases import Case, case
from kit.pieces import DYNAMIC, Branch, Parts, Piece, branched, forest, pieces_of, shared
from kit.plans import HandPlan, joint, paired

ROWS = 64  # packed rows of a heavy item or a branch at most
TAILS = (0, 1, 31, 32, 33, 64, 65)  # around the tiles


def prefixes(lengths: Iterable[int], sizes: Sequence[int], first: int = 0) -> list[Piece]:
    """Groups of queries from ``first`` on, of ``sizes`` by turns, each with a prefix and tails."""
    pieces = []
    for length, size in zip(lengths, cycle(sizes), strict=False):
        members = tuple(range(first, first + size))
        pieces.append(Piece(members, 0, length))
        pieces += [Piece((query,), length, DYNAMIC) for query in members]
        first += size
    return pieces


def halves(common: Sequence[int], own: Sequence[int], queries: int) -> list[Piece]:
    """For each of ``common`` a prefix of so many tokens of twice ``queries`` queries, half of which
    share ``own`` more tokens, by turns, then tails."""
    pieces = []
    for half, more in zip(range(2 * len(common)), cycle(own), strict=False):
        mine = tuple(range(half * queries, (half + 1) * queries))
        length = common[half // 2]
        if half % 2 == 0:
            pieces.append(Piece(tuple(range(mine[0], mine[0] + 2 * queries)), 0, length))
        if more:
            pieces.append(Piece(mine, length, more))
        pieces += [Piece((query,), length + more, DYNAMIC) for query in mine]
    return pieces


def shared_first(pieces: Sequence[Piece], queries: int) -> list[Branch]:
    """Branches of so many queries, all with their shared tokens first."""
    return [Branch(branch.pieces) for branch in branched(pieces, queries)]


# KV tiles that the branches of each pair load for each other; negative: after their own. Its
# ``halves`` become branches only behind ``case``, so that the two of a pair read the same slots.
MANY = [64 + 97 * (7 * i % 23) for i in range(24)]
PAIRED = {
    "pairs": [4, -15, -1],
    "beside": [7, -2],
    "many_pairs": [tokens // 64 * (1, -1, -1)[i % 3] for i, tokens in enumerate(MANY)],
}
WITH_WIDE = ("wide", "wide_forest", "beside", "turns")
# By the queries that fit a branch.
KINDS: dict[str, Callable[[int, np.random.Generator], Parts]] = {
    "light": lambda most, _: shared(max(1, most // 4), 150),
    "heavy": lambda most, _: shared(most, 150),
    "joint": lambda most, _: [Piece(tuple(range(most)), 0, 1000)],
    "wide": lambda most, _: prefixes([150, 321], [most + 3]),
    "forest": lambda _, rng: forest(rng, int(rng.integers(10, 40))),
    "wide_forest": lambda _, rng: forest(rng, int(rng.integers(10, 40))),
    "branches": lambda most, rng: branched(forest(rng, 40), most),
    "small_branches": lambda most, rng: branched(forest(rng, 40), min(most, 3)),
    "pairs": lambda most, _: halves([300, 1000, 64], (0, 40, 130), most),
    "beside": lambda most, _: [
        *halves([500, 128, 900], (0, 200, 64), most),
        *prefixes([700, 333, 400, 90, 1000], [2 * most + 4, 2 * most + 4, 5, 1, 3], 6 * most),
    ],
    # More of them than SMs, so that the rings of stages go on from unit to unit.
    "turns": lambda _, __: prefixes([1 + 97 * (7 * i % 20) for i in range(40)], (20, 20, 12, 3)),
    "many_pairs": lambda most, _: halves(MANY, (0, 200, 64, 7, 700), most),
}
SMALL = tuple(kind for kind in KINDS if kind not in ("turns", "many_pairs"))


def items_of(
    kind: str, heads: tuple[int, int], head_dim: int = 128, *, seed: int = 0, **options: Any
) -> tuple[Case, HandPlan]:
    """Inputs with items of that kind and their plan; ``options``: of ``case``. A query and KV head
    has 64 packed rows at most."""
    most = ROWS // (heads[0] // heads[1] * options.get("draft_tokens", 1))
    options.setdefault("tails", TAILS)
    parts = KINDS[kind](most, np.random.default_rng(seed))
    inputs = case(parts, heads, head_dim, seed=seed, **options)
    if kind in PAIRED:
        # The other groups of "beside" come after three pairs of halves.
        end = 6 * most if kind == "beside" else len(inputs.rows)
        of_pairs = [piece for piece in pieces_of(parts) if piece.queries[0] < end]
        rest = [piece for piece in pieces_of(parts) if piece.queries[0] >= end]
        inputs = replace(inputs, pieces=[*shared_first(of_pairs, most), *rest])
        return inputs, paired(inputs.plan(wide=kind in WITH_WIDE), *PAIRED[kind])
    plan = inputs.plan(wide=kind in WITH_WIDE)
    return inputs, joint(plan) if kind == "joint" else plan
