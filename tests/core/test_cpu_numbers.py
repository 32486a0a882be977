# SPDX-License-Identifier: Apache-2.0
"""Numbers that the CPU executor rounds and joins: halves, extreme scores, attention sinks."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from kit.cases import Case, case, check, execute
from kit.pieces import DYNAMIC, Piece, shared
from kit.sinks import with_sinks

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


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


@pytest.mark.parametrize("group", [1, 4, 8])
def test_equal_and_large_scores(group: int) -> None:
    """All keys alike: the mean of V, and log2 of the number of tokens above the score. V of 1e4
    costs no relative accuracy; scores of 1e4 leave no second token."""
    inputs = case(shared(2, 128, splits=2), (group, 1), tails=(7,))
    for size in (0.0, 1.0, 1e4):
        check(replace(inputs, k=torch.full_like(inputs.k, size)))
    check(replace(inputs, v=inputs.v * 1e4))
    check(replace(inputs, scale=1e4))


def test_neither_scale_nor_cap_changes_a_sink() -> None:
    """Where the logits are below -20 too, a sink of -30 counts."""
    inputs = case(shared(4, 40), (8, 2))
    for scale, cap in ((0.01, 0.0), (0.5, 2.0), (1.0, 25.0), (0.0, 0.0)):
        check(with_sinks(replace(inputs, scale=scale, logit_cap=cap), "mixed"))
    keys = inputs.q[:1, :1].expand_as(inputs.k)
    low = replace(inputs, q=-inputs.q[:1, :1].expand_as(inputs.q), k=keys, scale=0.5)
    assert low.truth()[1].max() < -20 / log(2)
    check(with_sinks(low, "below"))


@pytest.mark.parametrize("sinks", ["above", "mixed", "none"])
def test_without_tokens_a_sink_is_all_there_is(sinks: str) -> None:
    """In a query that has an item, and in one that has none: output 0, and the sink as LSE."""
    for parts in ([Piece((0,), 0, DYNAMIC), Piece((1,), 0, 5)], [Piece((1,), 0, 40)]):
        inputs = with_sinks(case(parts, (8, 2), tails=(0,)), sinks)
        assert inputs.sinks is not None and inputs.seq_lens[0] == 0
        check(inputs)
        out, lse = execute(inputs)
        assert not out[0].any()
        torch.testing.assert_close(lse[0], inputs.sinks / log(2))
