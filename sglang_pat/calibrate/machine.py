# SPDX-License-Identifier: Apache-2.0
"""What calibration needs of a machine: its properties, and the time of a plan. ``gpu.CudaMachine``
is the one there is; the tests have another, which computes times from costs that they know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sglang_pat.bench.common.forests import Forest
from sglang_pat.planner import Plan
from sglang_pat.target import Target


class CalibrationError(RuntimeError):
    """Nothing can be measured, or no rate follows from the times; the message says what to do."""


@dataclass(frozen=True)
class Device:
    """A GPU as torch names it. ``clocks_mhz`` and ``versions`` go into its profile as they are."""

    name: str
    multi_processor_count: int
    major: int
    minor: int
    clocks_mhz: Mapping[str, int]
    versions: Mapping[str, str]
    memory_clock_rate: int = 0  # kHz; 0: not known
    memory_bus_width: int = 0  # bits


class Machine(Protocol):
    @property
    def device(self) -> Device: ...

    def seconds(self, batch: Forest, plan: Plan, target: Target) -> float:
        """Of one layer, forward, merge and launch, with a cold L2. ``plan`` is of
        ``batch`` and made for ``target``, bf16 with partials of fp32. Raises CalibrationError where
        it cannot run."""
        ...
