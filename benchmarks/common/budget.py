# SPDX-License-Identifier: Apache-2.0
"""Time that a benchmark may take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Budget:
    """Time for runs: none starts that would not end before ``deadline`` (``time.monotonic``), if
    it takes as long as the longest of its kind so far."""

    deadline: float
    spent_out: bool = False
    _longest: dict[str, float] = field(default_factory=dict)

    def allows(self, kind: str) -> bool:
        longest = self._longest.get(kind, max(self._longest.values(), default=0.0))
        self.spent_out = self.spent_out or time.monotonic() + longest > self.deadline
        return not self.spent_out

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def __str__(self) -> str:
        """To go behind a line; nothing without a limit."""
        return f"; {self.left_s():.0f} s left" if math.isfinite(self.deadline) else ""

    def took(self, kind: str, seconds: float) -> None:
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
