# SPDX-License-Identifier: Apache-2.0
"""A machine that calibration can measure without a GPU: its times follow from costs that a test
knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_pat import _C
from sglang_pat.bench.common.forests import Forest
from sglang_pat.calibrate.machine import Device
from sglang_pat.planner import Plan
from sglang_pat.profiles import Costs
from sglang_pat.target import Target

H200 = Device(
    name="NVIDIA H200",
    multi_processor_count=132,
    major=9,
    minor=0,
    clocks_mhz={"sm": 1980, "memory": 3201},
    versions={"torch": "2.9.0", "driver": "CUDA 13.0"},
)
# Costs and a launch for one.
TRUTH = Costs(
    bytes_per_s=3.3e12,
    flops_per_s=450e12,
    item_overhead_s=0.4e-6,
    sm_speedup=1.6,
    merge_round_s=1.1e-6,
    reread_weight=0.6,  # of a token read again: the model's factor, too
    reread_factor=0.6,
    wide_factor=0.0,
    merge_factor=1.2,
    branch_overhead_s=2e-7,
)
LAUNCH_S = 7e-6


class SyntheticMachine:
    """Time of a plan: the launch, the cost model's time with the true costs or the products' if
    that is longer, and the overheads of all items spread over the SMs, of which the cost model
    knows nothing. ``noise``: standard deviation of the relative error of a time."""

    def __init__(
        self, costs: Costs, *, launch_s: float, noise: float = 0.0, device: Device = H200
    ) -> None:
        self.device = device
        self.costs, self.launch_s, self.noise = costs, launch_s, noise
        self.measured = 0
        self._rng = np.random.default_rng(7)

    def seconds(self, batch: Forest, plan: Plan, target: Target) -> float:
        self.measured += 1
        assert plan.num_partials <= target.max_partials and not plan.degraded
        true = replace(
            target,
            num_sms=self.device.multi_processor_count,
            bytes_per_s=self.costs.bytes_per_s,
            reread_factor=self.costs.reread_factor,
            wide_factor=self.costs.wide_factor,
            merge_factor=self.costs.merge_factor,
            branch_overhead_s=self.costs.branch_overhead_s,
        )
        terms = _C.plan_terms(plan, np.array(batch.seq_lens), batch.unique_tokens)
        # The products of fixed segments: tails are short here.
        lens = np.maximum(plan.segments["kv_len"], 0)
        rows = plan.segments["num_queries"] * (target.num_q_heads // target.num_kv_heads)
        operations = 4.0 * target.num_kv_heads * target.head_dim * float(np.sum(lens * rows))
        work = max(_C.plan_seconds(true.native, terms), operations / self.costs.flops_per_s)
        work += plan.num_items * target.num_kv_heads * self.costs.item_overhead_s / true.num_sms
        return (self.launch_s + work) * (1 + self.noise * float(self._rng.standard_normal()))
