# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on the CPU executor against attention by its definition; test_ops.py has what is
refused, tests/gpu/test_sinks.py the same cases for the CUDA kernels."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from kit.cases import case, check, execute
from kit.pieces import DYNAMIC, Piece
from kit.sinks import of_plans, of_sinks, planned, with_sinks

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("heads", [(16, 2), (5, 1)])
@of_sinks
@of_plans
def test_every_query_head_has_its_sink_once(name: str, sinks: str, heads: tuple[int, int]) -> None:
    inputs, hand = planned(name, heads)
    inputs = with_sinks(inputs, sinks)
    check(inputs, hand)
    check(inputs.to_e4m3(0.037, 1.75), hand)


@pytest.mark.parametrize("partial", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_sinks_need_not_be_those_of_q(
    sink_dtype: torch.dtype, dtype: torch.dtype, partial: torch.dtype
) -> None:
    """The values are exact in all of them, so these give the same bits."""
    bound = 9e-3 if partial == torch.bfloat16 else 0.0
    for name in ("one split", "two splits", "branches"):
        inputs, hand = planned(name, (16, 2))
        inputs = with_sinks(inputs.to(dtype), "mixed", sink_dtype)
        out = check(inputs, hand, bound, partial=partial)
        same = execute(with_sinks(inputs, "mixed"), hand, partial=partial)[0]
        assert torch.equal(out, same)


def test_neither_scale_nor_cap_changes_a_sink() -> None:
    """Where the logits are below -20 too, a sink of -30 counts."""
    inputs, hand = planned("two splits", (8, 2))
    for scale, cap in ((0.01, 0.0), (0.5, 2.0), (1.0, 25.0), (0.0, 0.0)):
        check(with_sinks(replace(inputs, scale=scale, logit_cap=cap), "mixed"), hand)
    keys = inputs.q[:1, :1].expand_as(inputs.k)
    low = replace(inputs, q=-inputs.q[:1, :1].expand_as(inputs.q), k=keys, scale=0.5)
    assert low.truth()[1].max() < -20 / log(2)
    check(with_sinks(low, "below"), hand)


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
