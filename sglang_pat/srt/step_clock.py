# SPDX-License-Identifier: Apache-2.0
"""How long the host prepares a decode step, and whether the GPU was busy all that time."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Times the preparation of one step at a time.

    With SGLang's overlap scheduler the host prepares a step while the GPU runs the one before. Host
    time costs a user something only if the GPU runs out of work meanwhile. So an event is recorded
    behind the work that the GPU has when the preparation begins: if the event is not done when the
    preparation ends, the GPU never waited, and the host time was hidden.

    ``on_gpu``: False where there is no GPU to hide behind; nothing is hidden then.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._event: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._began = 0

    def start(self) -> None:
        """Begin; the step's work goes to the current stream."""
        if self._event is not None:
            self._event.record()
        self._began = time.perf_counter_ns()

    def elapsed_ns(self) -> int:
        """Since ``start()``, in nanoseconds."""
        return time.perf_counter_ns() - self._began

    def is_hidden(self) -> bool:
        """Whether the GPU still has work from before ``start()``."""
        return self._event is not None and not self._event.query()
