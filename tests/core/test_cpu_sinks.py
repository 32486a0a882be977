# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: on the CPU executor against attention by its definition, and what ``decode``
says of them. tests/gpu/test_sinks.py has the same cases for the CUDA kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from kit.cases import Case, case, check, execute
from kit.pieces import DYNAMIC, Piece, forest, paths_of, shared
from kit.sinks import of_plans, of_sinks, planned, with_sinks

from sglang_pat import decode
from sglang_pat.planner import plan
from sglang_pat.target import CUTS, Target

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


@of_plans
def test_sinks_of_minus_infinity_are_none(name: str) -> None:
    """Bit by bit."""
    inputs, hand = planned(name, (8, 2))
    plain = execute(inputs, hand)
    for one, other in zip(plain, execute(with_sinks(inputs, "none"), hand), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("cut", CUTS)
def test_plans_of_the_planner(cut: str, draft_tokens: int) -> None:
    for seed in range(3):
        pieces, heads = forest(np.random.default_rng(seed), 10), (16, 2)
        tails = (draft_tokens, draft_tokens + 9, draft_tokens + 130)
        inputs = case(pieces, heads, seed=seed, draft_tokens=draft_tokens, tails=tails)
        target = Target.cpu(
            threads=4,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=64,
            draft_tokens=draft_tokens,
            max_queries=64,
            cuts=(cut,),
        )
        made = plan(paths_of(pieces, len(inputs.rows)), inputs.seq_lens.tolist(), target)
        check(with_sinks(inputs, "mixed"), made)


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


def test_parts_with_one_sink_merge_into_the_whole() -> None:
    """What the LSE is for: the first tokens with sinks and the others without are two states."""
    whole = with_sinks(case([Piece((0,), 0, 100)], (8, 2)), "mixed")
    parts = [
        replace(
            whole,
            table=whole.table[:, first:last],
            seq_lens=torch.tensor([last - first]),
            pieces=[Piece((0,), 0, last - first)],
            sinks=whole.sinks if first == 0 else None,
        )
        for first, last in ((0, 30), (30, 100))
    ]
    outs, lses = (torch.stack(each) for each in zip(*map(execute, parts), strict=True))
    weights = torch.softmax(lses * log(2), dim=0)[..., None]
    torch.testing.assert_close((weights * outs).sum(0), execute(whole)[0], rtol=1e-5, atol=1e-6)


def test_values_are_read_where_they_lie() -> None:
    """As a weight update leaves them, at the next call."""
    inputs, hand = planned("one split", (8, 2))
    inputs = with_sinks(inputs, "above", torch.bfloat16)
    before = check(inputs, hand)
    assert inputs.sinks is not None
    inputs.sinks.copy_(torch.linspace(-3, 3, 8))
    assert not torch.equal(check(inputs, hand), before)
    assert torch.equal(execute(as_parameter(inputs), hand)[0], execute(inputs, hand)[0])


def as_parameter(inputs: Case) -> Case:
    """As a model holds its sinks."""
    assert inputs.sinks is not None
    return replace(inputs, sinks=torch.nn.Parameter(inputs.sinks, requires_grad=False))


WRONG: dict[str, tuple[Any, str]] = {
    "type": ([0.0] * 8, "sinks is of type list, must be a torch.Tensor"),
    "heads": (torch.zeros(7), "sinks is (7,) torch.float32 on cpu"),
    "dims": (torch.zeros(1, 8), "must be contiguous (8,), one a query head"),
    "strides": (torch.zeros(16)[::2], "with strides (2,), must be contiguous"),
    "dtype": (torch.zeros(8, dtype=torch.float64), "of float32, bfloat16 or float16"),
    "device": (torch.zeros(8, device="meta"), "on meta with strides (1,), must be"),
}


@pytest.mark.parametrize(("sinks", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(sinks: Any, message: str) -> None:
    inputs = case(shared(2, 9), (8, 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(*inputs.inputs, inputs.plan(), scale=1.0, sinks=sinks)
