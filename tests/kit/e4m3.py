# SPDX-License-Identifier: Apache-2.0
"""Cases of K and V in float8_e4m3fn on a GPU, and what their results are held to."""

from __future__ import annotations

from typing import Any

import torch

from kit.cases import E4M3, Case
from kit.device import DevicePlan, error, execute, may_be_joint, on_device
from kit.plans import joint

BF16, FP16 = torch.bfloat16, torch.float16
K_SCALE, V_SCALE = 0.37, 2.3
# Half of the distance between neighbouring numbers, relative: how far rounding goes.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, E4M3: 2.0**-4}
# Hopper adds up products of e4m3 with about 14 bits: a logit may be so far from the true one,
# relative to the greatest sum on the way to it.
SUMMING = 2.0**-11


def stored(inputs: Case, dtype: torch.dtype) -> Case:
    """The case on the GPU with e4m3 K and V, slots that no query owns NaN."""
    scaled = inputs.to(dtype).to_e4m3(K_SCALE, V_SCALE)
    assert all(cache.float().isnan().any() for cache in (scaled.k, scaled.v))
    return on_device(scaled, dtype)


def multiplies_e4m3(plan: Any) -> bool:
    """Whether wgmma runs some of the plan's items, and so with K, V and weights in e4m3."""
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    return on_hopper and plan.num_wide_items + plan.num_heavy_items > 0


def check_e4m3(inputs: Case, plan: Any = None, **options: Any) -> torch.Tensor:
    """Execute and compare with fp64 attention over the dequantised K and V. They are exact in fp16,
    and so is q, but for bf16 values below 6e-5; weights are rounded once, to fp16 or, for wgmma, to
    e4m3, and the output to its dtype, once more if partials have two bytes. The LSE has the errors
    of sums in fp32 or, for wgmma, of what it adds up with fewer bits. A case's own plan is executed
    a second time as a joint one if it can be."""
    truth, truth_lse = inputs.truth(torch.float64)
    if plan is None:
        plan = DevicePlan(inputs.plan())
        if may_be_joint(inputs, plan):
            check_e4m3(inputs, DevicePlan(joint(plan.hand)), **options)
    out, lse = execute(inputs, plan, **options)
    roundings = 1 + (options.get("partial_dtype", torch.float32) != torch.float32)
    few_bits = multiplies_e4m3(plan)
    # Half of the distance is the most; of many numbers the mean of squares is half of that.
    of_weights = ROUNDING[E4M3] / 2 if few_bits else ROUNDING[FP16]
    assert error(out, truth) <= of_weights + roundings * ROUNDING[inputs.q.dtype]
    empty = truth_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and not out[empty].any()
    difference = (lse - truth_lse).abs()[~empty]
    greatest = truth_lse[~empty].abs() + 4 * few_bits  # of logits that cancel out, too
    assert torch.all(difference <= 1e-5 + (SUMMING if few_bits else 4e-6) * greatest)
    return out


def wide(inputs: Case) -> DevicePlan:
    hand = inputs.plan(wide=True)
    assert hand.header["num_wide_items"][0] > 0
    return DevicePlan(hand)


def plans_of(inputs: Case) -> list[DevicePlan]:
    """The case's plan; and one with wide items, if any can be."""
    rows = max(len(piece.queries) for piece in inputs.pieces) * inputs.heads[0] // inputs.heads[1]
    return [DevicePlan(inputs.plan())] + ([wide(inputs)] if rows > 64 else [])
