# SPDX-License-Identifier: Apache-2.0
"""The GPU at hand as calibration sees it: plans run in captured graphs over a cold L2."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pat import _C, decode
from sglang_pat.bench.common.document import versions
from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.kernel.clock import Clock, capture
from sglang_pat.bench.kernel.kv import make_batch
from sglang_pat.calibrate.machine import CalibrationError, Device
from sglang_pat.planner import Plan
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

# Milliseconds of repeats for the time of one plan; what flushes the L2 is not counted.
BUDGET_MS = 15.0


def reason_against_a_gpu() -> str:
    """Why nothing can be measured here; empty if it can."""
    if not torch.cuda.is_available():
        return f"there is no CUDA device that torch {torch.__version__} can use"
    if not hasattr(_C, "decode_cuda"):
        return "this build of sglang-pat has no CUDA kernels (PAT_CUDA=OFF)"
    probe = _C.cuda_probe(torch.cuda.current_device())
    return "" if probe["ok"] else f"our kernels do not run on this GPU ({probe['error']})"


class CudaMachine:
    """The current CUDA device. Keeps the tensors of the last batch."""

    def __init__(self) -> None:
        self.device = _device()
        self._clock = Clock(BUDGET_MS)
        self._batch: Forest | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()

    def seconds(self, batch: Forest, plan: Plan, target: Target) -> float:
        """See ``machine.Machine``."""
        try:
            return self._seconds(batch, plan, target)
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info()
            raise CalibrationError(
                f"the GPU has not enough memory for {batch.name}: {free / 2**30:.1f} of "
                f"{total / 2**30:.1f} GiB are free. Stop what else runs on it and run this again"
            ) from None

    def _seconds(self, batch: Forest, plan: Plan, target: Target) -> float:
        q, k_cache, v_cache, table, rows, seq_lens = self._inputs(batch, target)
        workspace = Workspace(target, table.shape[1], q.device, partial_dtype=torch.float32)
        workspace.load(plan)
        workspace.snapshot(table, rows, seq_lens)
        out = torch.empty_like(q)

        def attend() -> torch.Tensor:
            return decode(
                q,
                k_cache,
                v_cache,
                table,
                rows,
                seq_lens,
                plan,
                scale=target.head_dim**-0.5,
                out=out,
                workspace=workspace,
            )

        return self._clock.median_us(capture(attend).replay) * 1e-6

    def _inputs(self, batch: Forest, target: Target) -> tuple[torch.Tensor, ...]:
        """Arguments of ``decode``: random bf16 values, consecutive slots for every node and
        tail."""
        if batch is not self._batch:
            self._batch, self._tensors = None, ()  # the memory of the last ones is free again
            torch.cuda.empty_cache()
            self._tensors, self._batch = _tensors(batch, target), batch
        return self._tensors


def _tensors(batch: Forest, target: Target, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    return make_batch(
        batch,
        num_q_heads=target.num_q_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        dtype=torch.bfloat16,
        permuted=False,
        device=device,
    ).inputs


def _device() -> Device:
    index = torch.cuda.current_device()
    found: Any = torch.cuda.get_device_properties(index)
    rates = {"sm": "clock_rate", "memory": "memory_clock_rate"}  # kHz; not of every torch
    clocks = {name: getattr(found, rate, 0) // 1000 for name, rate in rates.items()}
    driver = int(_C.cuda_probe(index)["driver_version"])
    return Device(
        name=found.name,
        multi_processor_count=found.multi_processor_count,
        major=found.major,
        minor=found.minor,
        clocks_mhz={name: clock for name, clock in clocks.items() if clock},
        versions={
            **versions(["sglang-pat", "torch"]),
            "cuda": str(torch.version.cuda),
            "driver": f"CUDA {driver // 1000}.{driver % 1000 // 10}",
        },
        memory_clock_rate=getattr(found, "memory_clock_rate", 0),
        memory_bus_width=getattr(found, "memory_bus_width", 0),
    )
