# SPDX-License-Identifier: Apache-2.0
"""Time on a CUDA device: captured graphs replayed over a cold L2, and the device's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernel.floor import Rates

# Written before every repeat, outside of the timed events: what Triton's do_bench flushes with.
FLUSH_BYTES = 256 << 20
MIN_REPEATS, MAX_REPEATS = 10, 100

_cuda: Any = torch.cuda  # its classes and functions carry no types


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph with what it needs to be replayed: its output, and the closure that holds its
    inputs, whose memory would be used again otherwise."""

    graph: Any
    out: torch.Tensor | None
    run: Callable[[], object]

    def replay(self) -> None:
        self.graph.replay()


def capture(run: Callable[[], torch.Tensor | None]) -> Captured:
    """``run`` as a graph. Three plain runs before load modules and allocate."""
    side = _cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return Captured(graph, out, run)


class Clock:
    """Times what is launched on the current stream."""

    def __init__(self, budget_ms: float) -> None:
        """``budget_ms`` bounds the time of all repeats of one measurement, flushes not counted."""
        self.budget_ms = budget_ms
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_

    def repeats(self, run: Callable[[], object]) -> int:
        """How often ``run`` fits the budget, by one trial."""
        self.times_us(run, 1)
        (trial,) = self.times_us(run, 1)
        return max(MIN_REPEATS, min(MAX_REPEATS, int(self.budget_ms * 1e3 / trial)))

    def times_us(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Device time of each of ``repeats`` runs, the L2 flushed before each."""
        pairs = []
        for _ in range(repeats):
            self._flush()
            start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def median_us(self, run: Callable[[], object]) -> float:
        return statistics.median(self.times_us(run, self.repeats(run)))

    def compare(self, runs: dict[str, Callable[[], object]]) -> tuple[dict[str, float], float]:
        """Median microseconds of each run, measured in two turns, and how far the two medians of a
        run lie apart, as a fraction, at worst: what is less than that is noise."""
        repeats = {name: self.repeats(run) for name, run in runs.items()}
        turns = [
            {name: self.times_us(run, (repeats[name] + 1) // 2) for name, run in runs.items()}
            for _ in range(2)
        ]
        medians = {name: statistics.median(turns[0][name] + turns[1][name]) for name in runs}
        noise = max(
            abs(statistics.median(turns[0][name]) / statistics.median(turns[1][name]) - 1)
            for name in runs
        )
        return medians, noise


def device_rates(clock: Clock) -> Rates:
    """Ceilings: the fastest of two reductions and a copy over 8 GB, and a bf16 product of 8192
    cubed; random data in both."""
    source, size = torch.randn(2_000_000_000, device="cuda"), 8192
    target = torch.empty_like(source)
    total, largest = (torch.empty((), device="cuda") for _ in range(2))
    rate = max(
        source.nbytes / clock.median_us(lambda: torch.sum(source, dim=0, out=total)),
        source.nbytes / clock.median_us(lambda: torch.amax(source, dim=0, out=largest)),
        2 * source.nbytes / clock.median_us(lambda: target.copy_(source)),
    )
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul_us = clock.median_us(lambda: torch.matmul(a, b, out=product))
    return Rates(bytes_per_s=rate * 1e6, flops_per_s=2 * size**3 / matmul_us * 1e6)
