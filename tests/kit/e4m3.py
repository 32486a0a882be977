# SPDX-License-Identifier: Apache-2.0
"""Cases of K and V in float8_e4m3fn on a GPU, and what their results are held to."""

from __future__ import annotations

from typing import Any

import torch

from kit.cases import Case
from kit.device import DevicePlan, error, execute, on_device

BF16, FP16 = torch.bfloat16, torch.float16
K_SCALE, V_SCALE = 0.37, 2.3
# Half of the distance between neighbouring numbers, relative: how far rounding goes.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}


def stored(inputs: Case, dtype: torch.dtype) -> Case:
    """The case on the GPU with e4m3 K and V, slots that no query owns NaN."""
    scaled = inputs.to(dtype).to_e4m3(K_SCALE, V_SCALE)
    assert all(cache.float().isnan().any() for cache in (scaled.k, scaled.v))
    return on_device(scaled, dtype)


def check_e4m3(inputs: Case, plan: Any = None, **options: Any) -> torch.Tensor:
    """Execute and compare with fp64 attention over the dequantised K and V. They are exact in fp16,
    and so is q, but for bf16 values below 6e-5; weights are rounded to fp16 once, and the output to
    its dtype, once more if partials have two bytes. The LSE has the errors of sums in fp32."""
    truth, truth_lse = inputs.truth(torch.float64)
    out, lse = execute(inputs, plan, **options)
    roundings = 1 + (options.get("partial_dtype", torch.float32) != torch.float32)
    bound = ROUNDING[FP16] + roundings * ROUNDING[inputs.q.dtype]
    assert error(out, truth) <= bound
    empty = truth_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and not out[empty].any()
    difference = (lse - truth_lse).abs()[~empty]
    assert torch.all(difference <= 1e-5 + 4e-6 * truth_lse[~empty].abs())
    return out


def wide(inputs: Case) -> DevicePlan:
    hand = inputs.plan(wide=True)
    assert hand.header["num_wide_items"][0] > 0
    return DevicePlan(hand)


def plans_of(inputs: Case) -> list[DevicePlan]:
    """The case's plan; and one with wide items, if any can be."""
    rows = max(len(piece.queries) for piece in inputs.pieces) * inputs.heads[0] // inputs.heads[1]
    return [DevicePlan(inputs.plan())] + ([wide(inputs)] if rows > 64 else [])
