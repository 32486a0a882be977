# SPDX-License-Identifier: Apache-2.0
"""Values of float8_e4m3fn and their scales, one by one, in every kind of work unit."""

from __future__ import annotations

from dataclasses import replace
from math import e, log2

import pytest
import torch
from kit.cases import E4M3, case
from kit.device import error, execute, multiplies_e4m3, on_device, plans_of
from kit.pieces import DYNAMIC, Piece

BF16, FP16 = torch.bfloat16, torch.float16
ROWS = [1, 8, 12, 16, 32, 64, 128]  # packed rows: every kind of unit


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_value_of_v_arrives_in_its_column(
    head_dim: int, rows: int, dtype: torch.dtype
) -> None:
    """One token has all the weight, so the output is its V, bit for bit; NaN stays NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float().cuda()
    inputs = on_device(case([Piece(tuple(range(rows)), 0, 1)], (1, 1), head_dim), dtype)
    plans = plans_of(inputs)
    slot = inputs.table[inputs.rows[0], 0].long()
    k = torch.zeros_like(inputs.k).to(E4M3)
    for first in range(0, 256, 64):
        row = values.roll(-first)[:head_dim]
        v = torch.full_like(inputs.v, float("nan"))
        v[slot] = row.to(dtype)
        for plan in plans:
            out, lse = execute(replace(inputs, k=k, v=v.to(E4M3)), plan)
            want = row.to(dtype).expand_as(out)
            torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
            assert not lse.any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_value_of_k_meets_its_column_of_q(
    head_dim: int, rows: int, dtype: torch.dtype
) -> None:
    """q picks one column, so with one token the LSE is that value of K."""
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float().cuda()
    values = values[~values.isnan()]
    inputs = on_device(case([Piece(tuple(range(rows)), 0, 1)], (1, 1), head_dim), dtype)
    plans = plans_of(inputs)
    slot = inputs.table[inputs.rows[0], 0].long()
    v = torch.zeros_like(inputs.v).to(E4M3)
    k = torch.full_like(inputs.k, float("nan"))
    for first in range(0, 256, max(rows, 7)):
        columns = torch.arange(first, first + rows, device="cuda") % head_dim
        k[slot] = row = values.roll(-first).repeat(2)[:head_dim].to(dtype)
        q = torch.nn.functional.one_hot(columns, head_dim).to(dtype)[:, None]
        for plan in plans:
            _, lse = execute(replace(inputs, q=q, k=k.to(E4M3), v=v, scale=1.0), plan)
            want = row.float()[columns][:, None] * log2(e)
            # Weights in e4m3 are 2^8 times greater, which the LSE takes off again.
            rounding = 8 * 2.0**-24 if multiplies_e4m3(plan) else 0
            torch.testing.assert_close(lse, want, rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_scales(rows: int, cap: float) -> None:
    """A power of two in k_scale is the same as in scale, in v_scale the same as in the output; and
    neither is ignored."""
    everyone = tuple(range(rows))
    pieces = [Piece(everyone, 0, 150), *(Piece((i,), 150, DYNAMIC) for i in everyone)]
    inputs = on_device(case(pieces, (1, 1), 128, logit_cap=cap).to(FP16).to_e4m3(), FP16)
    out, lse = execute(inputs)
    other, other_lse = execute(replace(inputs, k_scale=4.0, scale=inputs.scale / 4))
    assert torch.equal(out, other) and torch.equal(lse, other_lse)
    double, double_lse = execute(replace(inputs, v_scale=2.0))
    torch.testing.assert_close(double, 2 * out, rtol=0, atol=2.0**-23)  # of numbers near zero
    assert torch.equal(lse, double_lse) and out.any()
    sharper, sharper_lse = execute(replace(inputs, k_scale=4.0))
    assert error(sharper, out.double()) > 0.01 and not torch.equal(sharper_lse, lse)


@pytest.mark.parametrize("rows", ROWS)
def test_queries_beyond_fp16(rows: int) -> None:
    """They become the greatest number that fp16 has."""
    inputs = on_device(case([Piece(tuple(range(rows)), 0, 1)], (1, 1), 128).to(BF16), BF16)
    v = torch.zeros_like(inputs.v).to(E4M3)
    q = torch.zeros_like(inputs.q)
    q[..., 5], q[..., 70] = 1e30, -3e38
    k = torch.ones_like(inputs.k)
    k[..., 70] = -0.5
    for plan in plans_of(inputs):
        _, lse = execute(replace(inputs, q=q, k=k.to(E4M3), v=v, scale=1.0), plan)
        want = torch.full_like(lse, 1.5 * 65504 * log2(e))
        torch.testing.assert_close(lse, want, rtol=1e-6, atol=0)


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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_of_all_magnitudes(head_dim: int) -> None:
    """For wgmma a row of q is the sum of two e4m3 numbers, scaled by its greatest value: neither
    rows of other magnitudes nor a great value beside small ones may cost precision."""
    inputs = case([Piece(tuple(range(64)), 0, 300)], (1, 1), head_dim)
    magnitudes = torch.logspace(-6, 3, 64, base=2)[:, None, None]
    q = inputs.q * magnitudes
    q[::3, :, 5] *= 100
    k = inputs.k.clone()
    k[..., 5] = k[..., 5].sign() / 64  # so that the great values of q do not decide alone
    inputs = on_device(replace(inputs, q=q, k=k).to(BF16).to_e4m3(), BF16)
    truth, truth_lse = inputs.truth(torch.float64)
    out, lse = execute(inputs)
    assert error(out, truth) < 0.04
    assert torch.all((lse - truth_lse).abs() <= 2.0**-10 * (4 + truth_lse.abs()))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
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


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_queries_that_are_no_numbers_do_not_look_like_any(value: float) -> None:
    """In fp16, which holds infinity; others of the item are not touched."""
    inputs = on_device(case([Piece(tuple(range(64)), 0, 100)], (1, 1), 128), FP16).to_e4m3()
    inputs.q[5, :, 7] = value
    out, _ = execute(inputs)
    assert not out[5].isfinite().any()
    assert out[:5].isfinite().all() and out[6:].isfinite().all()
