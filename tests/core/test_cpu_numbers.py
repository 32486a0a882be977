# SPDX-License-Identifier: Apache-2.0
"""Numbers that the CPU executor rounds, joins and caps: extreme scores, halves, uneven parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import Case, case, check, error, execute
from kit.pieces import Piece, forest, shared

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@HALVES
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (14, 2)])
def test_half_precision(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """At most twice the error of attention computed in that dtype by torch."""
    inputs = case(forest(np.random.default_rng(1), 9), heads, 80, 96).to(dtype)
    truth, _ = inputs.truth()
    plain, _ = inputs.truth(dtype)
    check(inputs, bound=2 * error(plain, truth) + 1e-6)


def of_values(values: torch.Tensor, tokens: int) -> Case:
    """Queries that give equal weights to ``tokens`` tokens each, whose V are ``values``."""
    count, dtype = len(values), values.dtype
    queries = count // tokens
    inputs = case([Piece((i,), 0, tokens) for i in range(queries)], (1, 1), 8, 256).to(dtype)
    k, table = torch.zeros(count, 1, 8, dtype=dtype), torch.arange(count, dtype=torch.int32)
    return replace(
        inputs, k=k, v=values, table=table.view(queries, tokens), rows=torch.arange(queries)
    )


@HALVES
def test_every_half_value_is_read_and_written_as_torch_does(dtype: torch.dtype) -> None:
    """One token's weight is 1, so that its V comes out unchanged: all 65536 values of a dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 256)
    out, _ = execute(of_values(values, 1))
    torch.testing.assert_close(out, values, rtol=0, atol=0, equal_nan=True)


@HALVES
def test_halves_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Two equal tokens average their V: exact in fp32, rounded once on the way out."""
    torch.manual_seed(0)
    size = torch.tensor([1e-7, 1e-5, 1.0, 300.0, 6e4]).repeat_interleave(200).view(-1, 1, 1)
    values = (torch.randn(1000, 1, 256).clamp(-1.05, 1.05) * size).to(dtype)
    out, _ = execute(of_values(values, 2))
    assert torch.equal(out, (values.float().view(500, 2, 1, 256).sum(1) / 2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_partials(dtype: torch.dtype) -> None:
    """Outputs rounded to bf16 before the merge, everything else in fp32."""
    inputs = case(shared(6, 120, splits=4), tails=(1, 50)).to(dtype)
    out = check(inputs, bound=8e-3, partial=torch.bfloat16)
    assert error(out, execute(inputs)[0].double()) > 1e-5


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("token", [0, 63, 64, 149])
def test_one_token_wins(token: int, group: int, splits: int) -> None:
    """In an item or one of several splits: what lies far below it adds nothing, in either order."""
    inputs = case(shared(1, 150, splits), (group, 1))
    k, v = inputs.k.clone(), inputs.v.clone()
    slot = inputs.table[inputs.rows[0], token].long()
    k[slot], v[slot] = 1e4 * inputs.q[0, 0].sign(), 1e4
    assert torch.all(check(replace(inputs, k=k, v=v))[0, 0] == 1e4)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_equal_and_large_scores(group: int) -> None:
    """All keys alike: the mean of V, and log2 of the number of tokens above the score. V of 1e4
    costs no relative accuracy; scores of 1e4 leave no second token."""
    inputs = case(shared(2, 128, splits=2), (group, 1), tails=(7,))
    for size in (0.0, 1.0, 1e4):
        check(replace(inputs, k=torch.full_like(inputs.k, size)))
    check(replace(inputs, v=inputs.v * 1e4))
    check(replace(inputs, scale=1e4))


@pytest.mark.parametrize("logit_cap", [0.5, 30.0, 1e3])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("scale", [0.01, 0.125, 5.0])
def test_soft_cap(logit_cap: float, group: int, scale: float) -> None:
    inputs = case(shared(3, 100, splits=2), (group, 1), logit_cap=logit_cap)
    out = check(replace(inputs, scale=scale))
    uncapped, _ = replace(inputs, scale=scale, logit_cap=0.0).truth()
    assert logit_cap > 100 or scale < 0.1 or error(out, uncapped) > 1e-3
