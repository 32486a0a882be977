# SPDX-License-Identifier: Apache-2.0
"""Wide items: both halves of an SM share the K/V tiles, each has 64 of the packed rows."""

from __future__ import annotations

import pytest
import torch
from kit.cases import case
from kit.device import BF16, check, execute, of_all_kinds, of_both_kv, on_device, wide
from kit.pieces import DYNAMIC, Piece

Kind = tuple[torch.dtype, torch.dtype]


def prefixes(lengths: list[int], queries: int, tail: int = DYNAMIC) -> list[Piece]:
    """Groups of queries, each with a prefix of its own, and a tail each."""
    pieces = []
    for group, length in enumerate(lengths):
        members = tuple(range(group * queries, (group + 1) * queries))
        pieces.append(Piece(members, 0, length))
        pieces += [Piece((query,), length, tail) for query in members]
    return pieces


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 191, 192, 193, 320, 1000])
@pytest.mark.parametrize("rows", [65, 127, 128, 129, 192, 193, 300])
def test_rows_and_lengths(rows: int, length: int) -> None:
    """Around tiles and halves, also with an odd number of tiles and beyond 128 rows."""
    inputs = on_device(case(prefixes([length], rows), (2, 2), 128, seed=rows + length), BF16)
    check(inputs, wide(inputs))


@of_all_kinds
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_ratios(group: int, head_dim: int, kind: Kind) -> None:
    queries = 70 // group + 3
    inputs = case(prefixes([150], queries), (2 * group, 2), head_dim, seed=group)
    inputs = on_device(inputs, *kind)
    check(inputs, wide(inputs))


@of_both_kv
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths", [[1 + 37 * i for i in range(40)], [1 + 97 * (7 * i % 20) for i in range(40)]]
)
def test_units_of_all_kinds_one_after_the_other(
    lengths: list[int], head_dim: int, kind: Kind
) -> None:
    """Wide units, then heavy and light ones, whose tiles differ, in the same stages; the rings go
    on where a unit ends: several wide units a CTA, which take every second tile from the other
    half's ring, short ones after long ones."""
    pieces: list[Piece] = []
    first = 0
    for group, length in enumerate(lengths):
        members = tuple(range(first, first + (20, 20, 12, 3)[group % 4]))
        pieces.append(Piece(members, 0, length))
        pieces += [Piece((query,), length, DYNAMIC) for query in members]
        first = members[-1] + 1
    tails = (0, 1, 15, 30, 31, 32, 33, 64, 65, 200, 700)
    inputs = on_device(case(pieces, (64, 16), head_dim, tails=tails), *kind)
    out = check(inputs, wide(inputs))
    for _ in range(5):  # from run to run
        assert torch.equal(execute(inputs, wide(inputs))[0], out)
    check(inputs)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_logit_cap(cap: float) -> None:
    inputs = on_device(case(prefixes([300], 40), (4, 2), 128, logit_cap=cap), BF16)
    check(inputs, wide(inputs))
