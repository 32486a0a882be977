# SPDX-License-Identifier: Apache-2.0
"""Runs of the CPU executor, compared with attention by its definition."""

from __future__ import annotations

from typing import Any

import torch

from kit.cases import Case, execute
from kit.plans import HandPlan
from sglang_pat.planner import Plan

# Relative to the norm of the output: what summation in fp32 leaves, besides rounded scores.
FP32_ERROR = 1e-6
# Of plans of any kind, by dtype.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference relative to the norm; infinite if any element is NaN."""
    distance = (out.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    return float(distance.nan_to_num(nan=float("inf")))


def check(inputs: Case, bound: float = FP32_ERROR, **options: object) -> torch.Tensor:
    """Execute and compare. Scores are sums of |q| |k| at most, rounded in fp32; an error of a score
    is a relative error of its token's weight."""
    rounding = 2**-23 * inputs.scale * float(inputs.q.norm(dim=-1).max() * _norm(inputs.k))
    rounding *= inputs.k_scale
    truth, truth_lse = inputs.truth()
    out, lse = execute(inputs, **options)  # type: ignore[arg-type]
    assert error(out, truth) < bound + rounding
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-6, atol=2 * rounding)
    return out


def _norm(k: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = k.float().norm(dim=-1).nan_to_num(nan=0.0).max()
    return norm


def check_any(inputs: Case, made: Plan | HandPlan, **options: Any) -> torch.Tensor:
    """Execute on any plan, and compare output and LSE with the definition."""
    truth, truth_lse = inputs.truth()
    out, lse = execute(inputs, made, **options)  # type: ignore[arg-type]
    distance = (out.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    assert distance < BOUNDS[inputs.q.dtype]
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    return out
