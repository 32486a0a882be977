# SPDX-License-Identifier: Apache-2.0
"""Units of many tiles on wgmma, whose softmax raises its reference seldom: lengths around whole
tiles, and logits that rise, fall and jump."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit.cases import Case, case
from kit.device import check, execute, on_device, wide
from kit.pieces import DYNAMIC, Branch, Piece, prefix

BF16, FP16 = torch.bfloat16, torch.float16
# Packed rows: of a heavy item, which may be joint, of a wide one and of two.
ROWS = [20, 64, 100, 150]


def shared(queries: int, length: int) -> Case:
    return case(prefix(queries, length), (2, 2), 128, seed=length + queries, tails=(0, 7, 65))


def with_logits(inputs: Case, factors: torch.Tensor) -> Case:
    """The keys of all queries multiplied by a factor for each token's position."""
    k = inputs.k.clone()
    lens = inputs.seq_lens.tolist()
    done = torch.zeros(len(k), dtype=torch.bool)
    for row, length in zip(inputs.rows.tolist(), lens, strict=True):
        slots = inputs.table[row, :length].long()
        new = ~done[slots]
        k[slots[new]] *= factors[:length][new][:, None, None]
        done[slots] = True
    return replace(inputs, k=k)


def check_all(inputs: Case, dtype: torch.dtype) -> None:
    inputs = on_device(inputs, dtype)
    check(inputs)
    if len(inputs.rows) > 64:
        check(inputs, wide(inputs))


@pytest.mark.parametrize("length", [511, 512, 513, 576, 577, 639, 640, 641, 1024, 1100, 1153])
@pytest.mark.parametrize("rows", ROWS)
def test_lengths(rows: int, length: int) -> None:
    check_all(shared(rows, length), BF16)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "kind", ["rising", "falling", "jump", "jump at a tile's end", "late", "large"]
)
def test_logits(kind: str, rows: int, dtype: torch.dtype) -> None:
    """That a later tile's maximum is beyond the first one's: by a little each time, by more than
    exponentials of fp32 hold, in one row only, or never."""
    length = 1300
    position = torch.arange(length + 70)
    factors = {
        "rising": 1.35 ** (position // 64),
        "falling": 1.35 ** (20 - position // 64).clamp(min=0),
        "jump": torch.where(position == 650, 300.0, 1.0),
        # In the last eight tokens of a tile, whose weights are not waited for.
        "jump at a tile's end": torch.where(position == 700, 300.0, 1.0),
        "late": torch.where(position == length - 1, 60.0, 1.0),
        "large": torch.full((length + 70,), 200.0),
    }[kind]
    check_all(with_logits(shared(rows, length), factors.float()), dtype)


@pytest.mark.parametrize("tails_first", [False, True])
@pytest.mark.parametrize("kind", ["rising", "jump"])
def test_branches(kind: str, tails_first: bool) -> None:
    """Rows that attend to no token of the first tiles have no reference yet."""
    for tails in ((130,), (0, 1, 250)):
        parts = prefix(16, 700)
        inputs = case(parts, (8, 2), 128, tails=tails)
        position = torch.arange(1100)
        factors = 1.35 ** (position // 64) if kind == "rising" else 1.0 + 200.0 * (position == 690)
        inputs = with_logits(inputs, factors.float())
        check(on_device(replace(inputs, pieces=[Branch(tuple(parts), tails_first)]), BF16))


def test_queries_of_nan_stay_alone() -> None:
    """Rows without a query hold what a unit before them had there: NaN here, which must neither
    end in another query's output nor raise its reference."""
    parts: list[Piece] = []
    of_nan: list[bool] = []
    for group in range(60):  # of 64 packed rows, then of 20 and of 36
        queries = tuple(range(len(of_nan), len(of_nan) + (16, 5, 9)[group % 3]))
        of_nan += [len(queries) == 16] * len(queries)
        length = 300 + 61 * (group % 5)
        parts.append(Piece(queries, 0, length))
        parts += [Piece((query,), length, DYNAMIC) for query in queries]
    inputs = on_device(case(parts, (64, 16), 128, tails=(0, 40)), BF16)
    found, lse = execute(inputs)
    q, nan = inputs.q.clone(), torch.tensor(of_nan)
    q[nan] = float("nan")
    other, other_lse = execute(replace(inputs, q=q))
    assert torch.equal(found[~nan], other[~nan])
    assert torch.equal(lse[~nan], other_lse[~nan])
    assert other[nan].isnan().all()


@pytest.mark.parametrize("heads", [(8, 2), (3, 3)])
def test_a_row_depends_on_no_other(heads: tuple[int, int]) -> None:
    """Great logits of one query's own tokens, in a branch, change no bit of the others."""
    parts = prefix(16, 900)
    inputs = case(parts, heads, 128, tails=(100,))
    branch = on_device(replace(inputs, pieces=[Branch(tuple(parts), True)]), BF16)
    found, lse = execute(branch)
    k = branch.k.clone()
    own = inputs.table[inputs.rows[3], 900:1000].long()
    k[own.cuda()] *= 100
    other, other_lse = execute(replace(branch, k=k))
    same = torch.arange(16) != 3
    assert torch.equal(found[same], other[same]) and torch.equal(lse[same], other_lse[same])
    assert not torch.equal(found[3], other[3])
