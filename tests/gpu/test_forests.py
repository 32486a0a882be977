# SPDX-License-Identifier: Apache-2.0
"""1,000 random forests: the CUDA executor against the CPU executor on the same plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit import cases as kit_cases
from kit.cases import case
from kit.device import DevicePlan, error, execute, on_device
from kit.pieces import forest

from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

CONFIGS = [
    (heads, head_dim, dtype, partial)
    for heads in ((8, 2), (3, 3), (10, 2), (16, 1), (7, 1))
    for head_dim, dtype, partial in (
        (128, torch.bfloat16, torch.float32),
        (128, torch.float16, torch.float32),
        (64, torch.bfloat16, torch.bfloat16),
        (256, torch.bfloat16, torch.float32),
    )
]


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_fifty_forests(config: int) -> None:
    heads, head_dim, dtype, partial = CONFIGS[config]
    target = Target.h200(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, max_queries=64
    )
    workspace = Workspace(target, 4096, partial_dtype=partial)
    for seed in range(50):
        rng = np.random.default_rng(1000 * config + seed)
        pieces = forest(rng, int(rng.integers(1, 41)))
        inputs = case(pieces, heads, head_dim, seed=seed).to(dtype)
        plan = inputs.plan()
        # fp32 partials on both: the CPU's half precision is always bf16.
        want, want_lse = kit_cases.execute(inputs, plan, threads=8)
        out, lse = execute(on_device(inputs, dtype), DevicePlan(plan), workspace=workspace)
        bound = 6e-3 if dtype == torch.bfloat16 else 1e-3
        assert error(out.cpu(), want.double()) < bound, (config, seed)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=4e-6, atol=1e-5)
