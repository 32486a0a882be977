# SPDX-License-Identifier: Apache-2.0
"""Logits that rise, fall, jump and tie, under a softmax that raises its reference seldom; values of
float8_e4m3fn and their scales, one by one. In every kind of work unit."""

from __future__ import annotations

from dataclasses import replace
from math import e, log2

import pytest
import torch
from kit.cases import E4M3, Case, case
from kit.device import (
    BF16,
    FP16,
    check,
    error,
    execute,
    multiplies_e4m3,
    of_head_dims,
    on_device,
    plans_of,
    same,
)
from kit.kinds import prefixes
from kit.pieces import Branch, Piece, shared

LENGTH = 1300
LONG = torch.arange(LENGTH + 300)
# By token: a later tile's maximum is beyond the first one's by a little each time, by more than
# exponentials of fp32 hold, in one row only, or never.
FACTORS = {
    "rising": 1.35 ** (LONG // 64),
    "falling": 1.35 ** (20 - LONG // 64).clamp(min=0),
    "jump": torch.where(LONG == 650, 300.0, 1.0),
    # In the last eight tokens of a tile, whose weights are not waited for.
    "jump at a tile's end": torch.where(LONG == 700, 300.0, 1.0),
    "late": torch.where(LONG == LENGTH - 1, 60.0, 1.0),
    "large": torch.full_like(LONG, 200.0, dtype=torch.float32),
}
# Packed rows: of a heavy item, which may be joint, of a wide one and of two.
MANY_ROWS = pytest.mark.parametrize("rows", [20, 64, 100, 150])


def with_logits(inputs: Case, factors: torch.Tensor) -> Case:
    """The keys of all queries multiplied by a factor for each token's position."""
    of_slot = torch.ones(len(inputs.k))
    for row, length in zip(inputs.rows.tolist(), inputs.seq_lens.tolist(), strict=True):
        of_slot[inputs.table[row, :length].long()] = factors[:length].float()
    return replace(inputs, k=inputs.k * of_slot[:, None, None])


@MANY_ROWS
def test_lengths_of_many_tiles(rows: int) -> None:
    for length in (511, 512, 513, 576, 577, 639, 640, 641, 1024, 1100, 1153):
        pieces = shared(rows, length)
        check(on_device(case(pieces, (2, 2), 128, seed=length, tails=(0, 7, 65)), BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@MANY_ROWS
@pytest.mark.parametrize("kind", FACTORS)
def test_logits(kind: str, rows: int, dtype: torch.dtype) -> None:
    inputs = case(shared(rows, LENGTH), (2, 2), 128, tails=(0, 7, 65))
    factors = FACTORS[kind]
    check(on_device(with_logits(inputs, factors), dtype), summed=10 * float(factors.max()))


@pytest.mark.parametrize("tails_first", [False, True])
@pytest.mark.parametrize("kind", ["rising", "jump"])
def test_logits_of_branches(kind: str, tails_first: bool) -> None:
    """Rows that attend to no token of the first tiles have no reference yet."""
    for tails in ((130,), (0, 1, 250)):
        parts = shared(16, 700)
        inputs = with_logits(case(parts, (8, 2), 128, tails=tails), FACTORS[kind])
        check(on_device(replace(inputs, pieces=[Branch(tuple(parts), tails_first)]), BF16))


@pytest.mark.parametrize("num_queries", [1, 2, 9, 20, 50])
def test_large_and_extreme_values(num_queries: int) -> None:
    inputs = on_device(case(shared(num_queries, 150, 2), (4, 2), 128, tails=(7,)), BF16)
    for cap, scale in ((0.0, 0.5), (1.0, 1.0), (30.0, 1.0)):
        check(replace(inputs, logit_cap=cap, scale=scale))
    for size in (0.0, 1.0, 1e4):
        check(replace(inputs, k=torch.full_like(inputs.k, size)))
    check(replace(inputs, v=inputs.v * 1e4))
    check(replace(inputs, k=inputs.k * 1e4))


@pytest.mark.parametrize("num_queries", [1, 9, 40])
@pytest.mark.parametrize("token", [0, 63, 64, 149])
def test_one_token_wins(num_queries: int, token: int) -> None:
    """A score far above the others, in the first or last token of a tile and of the sequence."""
    inputs = on_device(case([Piece(tuple(range(num_queries)), 0, 150)], (4, 1), 128), BF16)
    slot = inputs.table[inputs.rows[0], token].long()
    q = inputs.q[:1, :1].expand_as(inputs.q).contiguous()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[slot] = 1e4 * q[0, 0].sign()
    v[slot] = 1e4
    out = check(replace(inputs, q=q, k=k, v=v))
    assert torch.all(out == torch.tensor(1e4, dtype=BF16))


def test_queries_of_nan_stay_alone() -> None:
    """Rows without a query hold what a unit before them had there: NaN here, which must neither
    end in another query's output nor raise its reference."""
    parts = prefixes([300 + 61 * (group % 5) for group in range(60)], (16, 5, 9))
    nan = torch.cat([torch.arange(30) < 16] * 20)  # of the groups of 64 packed rows
    inputs = on_device(case(parts, (64, 16), 128, tails=(0, 40)), BF16)
    out, lse = execute(inputs)
    q = inputs.q.clone()
    q[nan] = float("nan")
    other, other_lse = execute(replace(inputs, q=q))
    assert same((out[~nan], lse[~nan]), (other[~nan], other_lse[~nan]))
    assert other[nan].isnan().all()


of_rows = pytest.mark.parametrize("rows", [1, 8, 12, 16, 32, 64, 128])  # every kind of unit
of_q_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16])


def one_token(rows: int, dtype: torch.dtype, head_dim: int = 128) -> tuple[Case, torch.Tensor]:
    """Queries of a common token, and its slot."""
    inputs = on_device(case([Piece(tuple(range(rows)), 0, 1)], (1, 1), head_dim).to(dtype), dtype)
    return inputs, inputs.table[inputs.rows[0], 0].long()


def all_values() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float().cuda()


@of_q_dtypes
@of_rows
@of_head_dims
def test_every_value_of_v_arrives_in_its_column(
    head_dim: int, rows: int, dtype: torch.dtype
) -> None:
    """One token has all the weight, so the output is its V, bit for bit; NaN stays NaN."""
    inputs, slot = one_token(rows, dtype, head_dim)
    k = torch.zeros_like(inputs.k).to(E4M3)
    for first in range(0, 256, 64):
        row = all_values().roll(-first)[:head_dim]
        v = torch.full_like(inputs.v, float("nan"))
        v[slot] = row.to(dtype)
        for plan in plans_of(inputs):
            out, lse = execute(replace(inputs, k=k, v=v.to(E4M3)), plan)
            want = row.to(dtype).expand_as(out)
            torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
            assert not lse.any()


@of_q_dtypes
@of_rows
@of_head_dims
def test_every_value_of_k_meets_its_column_of_q(
    head_dim: int, rows: int, dtype: torch.dtype
) -> None:
    """q picks one column, so with one token the LSE is that value of K."""
    values = all_values()
    values = values[~values.isnan()]
    inputs, slot = one_token(rows, dtype, head_dim)
    v = torch.zeros_like(inputs.v).to(E4M3)
    k = torch.full_like(inputs.k, float("nan"))
    for first in range(0, 256, max(rows, 7)):
        columns = torch.arange(first, first + rows, device="cuda") % head_dim
        k[slot] = row = values.roll(-first).repeat(2)[:head_dim].to(dtype)
        q = torch.nn.functional.one_hot(columns, head_dim).to(dtype)[:, None]
        for plan in plans_of(inputs):
            _, lse = execute(replace(inputs, q=q, k=k.to(E4M3), v=v, scale=1.0), plan)
            want = row.float()[columns][:, None] * log2(e)
            # Weights in e4m3 are 2^8 times greater, which the LSE takes off again.
            rounding = 8 * 2.0**-24 if multiplies_e4m3(plan) else 0
            torch.testing.assert_close(lse, want, rtol=1e-6, atol=rounding)


@of_rows
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_scales(rows: int, cap: float) -> None:
    """A power of two in k_scale is the same as in scale, in v_scale the same as in the output; and
    neither is ignored."""
    inputs = case(shared(rows, 150), (1, 1), 128, logit_cap=cap)
    inputs = on_device(inputs.to(FP16).to_e4m3(), FP16)
    out, lse = execute(inputs)
    assert same((out, lse), execute(replace(inputs, k_scale=4.0, scale=inputs.scale / 4)))
    double, double_lse = execute(replace(inputs, v_scale=2.0))
    torch.testing.assert_close(double, 2 * out, rtol=0, atol=2.0**-23)  # of numbers near zero
    assert torch.equal(lse, double_lse) and out.any()
    sharper, sharper_lse = execute(replace(inputs, k_scale=4.0))
    assert error(sharper, out.double()) > 0.01 and not torch.equal(sharper_lse, lse)


@of_rows
def test_queries_beyond_fp16(rows: int) -> None:
    """They become the greatest number that fp16 has."""
    inputs, _ = one_token(rows, BF16)
    v = torch.zeros_like(inputs.v).to(E4M3)
    q = torch.zeros_like(inputs.q)
    q[..., 5], q[..., 70] = 1e30, -3e38
    k = torch.ones_like(inputs.k)
    k[..., 70] = -0.5
    for plan in plans_of(inputs):
        _, lse = execute(replace(inputs, q=q, k=k.to(E4M3), v=v, scale=1.0), plan)
        want = torch.full_like(lse, 1.5 * 65504 * log2(e))
        torch.testing.assert_close(lse, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_queries_that_are_no_numbers_do_not_look_like_any(value: float) -> None:
    """In fp16, which holds infinity; others of the item are not touched."""
    inputs = on_device(case([Piece(tuple(range(64)), 0, 100)], (1, 1), 128), FP16).to_e4m3()
    inputs.q[5, :, 7] = value
    out, _ = execute(inputs)
    assert not out[5].isfinite().any()
    assert out[:5].isfinite().all() and out[6:].isfinite().all()


@of_head_dims
def test_queries_of_all_magnitudes(head_dim: int) -> None:
    """For wgmma a row of q is the sum of two e4m3 numbers, scaled by its greatest value: neither
    rows of other magnitudes nor a great value beside small ones may cost precision."""
    inputs = case([Piece(tuple(range(64)), 0, 300)], (1, 1), head_dim)
    q = inputs.q * torch.logspace(-6, 3, 64, base=2)[:, None, None]
    q[::3, :, 5] *= 100
    k = inputs.k.clone()
    k[..., 5] = k[..., 5].sign() / 64  # so that the great values of q do not decide alone
    inputs = on_device(replace(inputs, q=q, k=k).to(BF16).to_e4m3(), BF16)
    truth, truth_lse = inputs.truth(torch.float64)
    out, lse = execute(inputs)
    assert error(out, truth) < 0.04
    assert torch.all((lse - truth_lse).abs() <= 2.0**-10 * (4 + truth_lse.abs()))


@pytest.mark.parametrize("length", [1000, 8192, 32768])
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_long_sums_lose_nothing(rows: int, length: int) -> None:
    """V with a mean, so that an output is a sum of many terms of one sign, of which each is small:
    what a sum of few bits would cut off is 14 % of 8192 terms. The mean, over all queries and
    columns, of what is missing is far below the rounding of weights, which has no direction."""
    inputs = case([Piece(tuple(range(rows)), 0, length)], (1, 1), 128, seed=length)
    inputs = replace(inputs, v=inputs.v + 2.0).to(BF16).to_e4m3(0.37, 2.3)
    inputs = on_device(inputs, BF16)
    truth, _ = inputs.truth(torch.float64)
    for plan in plans_of(inputs):
        out, _ = execute(inputs, plan)
        assert abs(float((out.double() * truth).sum() / truth.square().sum()) - 1) < 2e-3


@of_head_dims
@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("length", [8192, 32768])
def test_a_token_with_most_of_the_weight(length: int, rows: int, head_dim: int) -> None:
    """The first token has up to 2^20 times the weight of another, and small V, as in a model that
    puts there what no other token needs. All others together count, and none alone."""
    inputs = case([Piece(tuple(range(rows)), 0, length)], (1, 1), head_dim, seed=length)
    k, v = inputs.k.clone(), inputs.v + 0.5
    slot = inputs.table[inputs.rows, 0].long()
    inputs.q[..., 0], k[..., 0] = 8.0, 0.0  # one column makes the first token's logit
    k[slot] = 0.0
    k[slot, :, 0] = 20 / (log2(e) * 8.0 * inputs.scale)
    v[slot] /= 50
    inputs = on_device(replace(inputs, k=k, v=v).to(BF16).to_e4m3(), BF16)
    truth, truth_lse = inputs.truth(torch.float64)
    assert truth_lse.min() > 18 and truth_lse.max() < 21
    for plan in plans_of(inputs):
        out, lse = execute(inputs, plan)
        assert error(out, truth) < 0.03
        assert torch.all((lse - truth_lse).abs() <= 2.0**-10 * (4 + truth_lse.abs()))
