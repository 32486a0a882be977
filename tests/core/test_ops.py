# SPDX-License-Identifier: Apache-2.0
"""``decode`` and ``Workspace`` refuse what does not fit, with what was given and what fits; what a
GPU is needed for is in tests/gpu/test_errors.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.cases import Case, case
from kit.pieces import Piece

from sglang_pat.ops import decode

# A prefix of 40 tokens and three tails of 10: 70 slots and 50 that nobody owns, a table [6, 55].
PIECES = [Piece((0, 1, 2), 0, 40), *(Piece((i,), 40, 10) for i in range(3))]
HEADS = (8, 2)
meta = methodcaller("to", "meta")  # the only other device that every machine has


def arguments_of(inputs: Case) -> dict[str, Any]:
    """All of ``decode``'s arguments; what it writes to holds NaN."""
    num_queries, num_q_heads, _ = inputs.q.shape
    return {
        "q": inputs.q,
        "k_cache": inputs.k,
        "v_cache": inputs.v,
        "req_to_token": inputs.table,
        "rows": inputs.rows,
        "seq_lens": inputs.seq_lens,
        "plan": inputs.plan(),
        "scale": inputs.scale,
        "logit_cap": inputs.logit_cap,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
        "out": torch.full((num_queries, num_q_heads, inputs.v.shape[2]), float("nan")),
        "lse": torch.full((num_queries, num_q_heads), float("nan")),
        "partial_dtype": torch.float32,
        "workspace": None,
    }


@pytest.fixture(scope="module")
def inputs() -> Case:
    """D is 64 and Dv 48, so that neither can pass for the other."""
    return case(PIECES, HEADS, 64, 48)


@pytest.mark.parametrize("index", [torch.int16, torch.int32, torch.int64], ids=str)
def test_what_fits_runs(inputs: Case, index: torch.dtype) -> None:
    """The case that all below change: without this, a refusal says nothing of its change."""
    fits = replace(inputs, rows=inputs.rows.to(index), seq_lens=inputs.seq_lens.to(index))
    arguments = arguments_of(fits)
    out, lse = arguments["out"], arguments["lse"]
    assert decode(**arguments) is out
    truth, truth_lse = inputs.truth()
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(decode(**(arguments | {"out": None, "lse": None})), out)


def test_a_stride_that_nothing_takes_is_free() -> None:
    """Of a dimension of one, as a table cut to one token has it."""
    one = case([Piece((0,), 0, 1)], HEADS)
    table = one.table[:, ::6]
    assert table.shape[1] == 1 and table.stride(1) == 6
    out = decode(**(arguments_of(one) | {"req_to_token": table}))
    torch.testing.assert_close(out.double(), one.truth()[0], rtol=1e-4, atol=1e-5)


OUT = "must be (3, 8, 48) torch.float32 on cpu"
LSE = "must be contiguous (3, 8) float32 on cpu"
TENSOR = "must be a torch.Tensor: convert it with torch.as_tensor"
LISTS = ("q", "k_cache", "v_cache", "req_to_token", "rows", "seq_lens", "out", "lse")
NAN, INF, E4M3 = float("nan"), float("inf"), torch.float8_e4m3fn
OTHER_BATCH = [Piece((0, 1), 0, 40)]
# Argument, what becomes of it, and what is said.
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    *((name, torch.Tensor.tolist, f"{name} is of type list, {TENSOR}") for name in LISTS),
    ("q", lambda _: None, f"q is of type NoneType, {TENSOR}"),
    ("plan", lambda _: None, "plan is of type NoneType, must be a Plan: make it with sglang_pat"),
    ("plan", lambda _: torch.zeros(3), "plan is of type Tensor, must be a Plan"),
    ("q", lambda t: t[0], "q has shape (8, 64), must have 3 dimensions"),
    ("q", lambda t: t[..., ::2], "q has strides (536, 67, 2), the last must be 1"),
    ("q", meta, "q is on meta: sglang_pat decodes on CPU and CUDA devices"),
    ("q", torch.Tensor.int, "q is torch.int32, must be float32, bfloat16 or float16"),
    ("k_cache", lambda t: t[0], "k_cache has shape (2, 64), must have 3 dimensions"),
    ("k_cache", meta, "k_cache is on meta, q on cpu: move one of them"),
    ("k_cache", torch.Tensor.bfloat16, "k_cache is torch.bfloat16 and v_cache torch.float32, must"),
    ("k_cache", lambda t: t[..., :56], "k_cache has head dim 56, q has 64"),
    ("v_cache", lambda t: t[0], "v_cache has shape (2, 48), must have 3 dimensions"),
    ("v_cache", meta, "v_cache is on meta, q on cpu: move one of them"),
    ("v_cache", torch.Tensor.half, "and v_cache torch.float16, must both be torch.float32 as q is"),
    (
        "v_cache",
        lambda t: t.to(E4M3),
        "and v_cache torch.float8_e4m3fn, must both be torch.float32",
    ),
    ("v_cache", lambda t: t.to(torch.float8_e5m2), "v_cache torch.float8_e5m2, must both"),
    ("v_cache", lambda t: t[1:], "v_cache has 119 slots of 2 heads, k_cache 120 of 2"),
    ("v_cache", lambda t: t[:, 1:], "120 slots of 1 heads, k_cache 120 of 2"),
    ("k_scale", lambda _: 2.0, "k_scale is 2.0 and v_scale 1.0, must be 1 where K and V"),
    ("v_scale", lambda _: 0.5, "only float8_e4m3fn has scales"),
    ("k_scale", lambda _: 0.0, "k_scale is 0.0, must be from 1.2e-38 to 3.4e+38"),
    ("v_scale", lambda _: NAN, "v_scale is nan, must be from 1.2e-38"),
    ("k_scale", lambda _: 1e-60, "k_scale is 1e-60, must be from 1.2e-38"),
    ("v_scale", lambda _: 1e60, "v_scale is 1e+60, must be from 1.2e-38"),
    ("k_scale", torch.tensor, "k_scale is of type Tensor, must be a float, one"),
    ("req_to_token", lambda t: t[0], "has shape (55,), must have 2 dimensions"),
    ("req_to_token", lambda t: t[:, ::2], "strides (55, 2), the last must be 1"),
    ("req_to_token", meta, "req_to_token is on meta, q on cpu"),
    ("req_to_token", torch.Tensor.long, "is torch.int64, must be int32"),
    ("rows", lambda t: t[:2], "rows has shape (2,), q has 3 queries"),
    ("rows", lambda t: t[:, None], "rows has shape (3, 1), q has 3 queries"),
    ("rows", torch.Tensor.float, "rows is torch.float32, must be an integer type"),
    ("rows", torch.Tensor.bool, "rows is torch.bool, must be an integer type"),
    ("rows", meta, "rows is on meta, where tensors have no values"),
    ("rows", lambda t: t + 6, "is outside of req_to_token with 6 rows"),
    ("seq_lens", lambda t: t[:2], "seq_lens has shape (2,), q has 3 queries"),
    ("seq_lens", lambda t: t + 0j, "seq_lens is torch.complex64, must be an int"),
    ("seq_lens", lambda t: t + 6, "length 56 is outside of req_to_token with 55"),
    ("plan", lambda _: case(OTHER_BATCH, HEADS).plan(), "the plan is for 2 queries, the arguments"),
    ("plan", lambda _: case(PIECES, (8, 4)).plan(), "for 8 query and 4 KV heads, the arguments"),
    ("scale", lambda _: NAN, "scale is nan, must be finite"),
    ("logit_cap", lambda _: -1.0, "is -1, must be finite and 0 (off) or more"),
    ("logit_cap", lambda _: INF, "logit_cap is inf, must be finite"),
    ("out", lambda t: t[0], "out has shape (8, 48), must have 3 dimensions"),
    ("out", lambda t: t.mT.contiguous().mT, "(384, 1, 8), the last must be 1"),
    ("out", lambda t: t[1:], f"out is (2, 8, 48) torch.float32 on cpu, {OUT}"),
    ("out", torch.Tensor.half, f"out is (3, 8, 48) torch.float16 on cpu, {OUT}"),
    ("out", meta, f"out is (3, 8, 48) torch.float32 on meta, {OUT}"),
    ("lse", lambda t: t.T.contiguous().T, f"torch.float32 on cpu with strides (1, 3), {LSE}"),
    ("lse", lambda t: t[1:], f"lse is (2, 8) torch.float32 on cpu with strides (8, 1), {LSE}"),
    ("lse", torch.Tensor.double, f"lse is (3, 8) torch.float64 on cpu with strides (8, 1), {LSE}"),
    ("lse", meta, f"lse is (3, 8) torch.float32 on meta with strides (8, 1), {LSE}"),
    ("partial_dtype", lambda _: torch.half, "partial_dtype is torch.float16, must be float32 or b"),
    ("workspace", lambda _: ON_GPU, "workspace is on cuda:0, q on cpu: leave it out"),
]
ON_GPU = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_wrong_arguments_of_decode(
    inputs: Case, name: str, change: Callable[[Any], Any], message: str
) -> None:
    """Each is refused before anything is written."""
    arguments = arguments_of(inputs)
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(**(arguments | {name: change(arguments[name])}))
    assert arguments["out"].isnan().all() and arguments["lse"].isnan().all()
