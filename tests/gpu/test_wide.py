# SPDX-License-Identifier: Apache-2.0
"""Wide items: both halves of an SM share the K/V tiles, each has 64 of the packed rows."""

from __future__ import annotations

import pytest
import torch
from kit.cases import Case, case
from kit.device import DevicePlan, check, execute, on_device
from kit.pieces import DYNAMIC, Piece

BF16 = torch.bfloat16


def wide(inputs: Case) -> DevicePlan:
    hand = inputs.plan(wide=True)
    assert hand.header["num_wide_items"][0] > 0
    return DevicePlan(hand)


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


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_ratios(group: int, head_dim: int, dtype: torch.dtype) -> None:
    queries = 70 // group + 3
    inputs = on_device(case(prefixes([150], queries), (2 * group, 2), head_dim, seed=group), dtype)
    check(inputs, wide(inputs))


def test_many_units_an_sm() -> None:
    """Wide units of all lengths one after the other, then the other items in the same stages."""
    lengths = [1 + 37 * i for i in range(40)]
    inputs = case(prefixes(lengths, 20), (64, 16), 128, tails=(0, 1, 30, 33, 64, 65, 200))
    inputs = on_device(inputs, BF16)
    out = check(inputs, wide(inputs))
    assert torch.equal(execute(inputs, wide(inputs))[0], out)  # from run to run


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_logit_cap(cap: float) -> None:
    inputs = on_device(case(prefixes([300], 40), (4, 2), 128, logit_cap=cap), BF16)
    check(inputs, wide(inputs))
