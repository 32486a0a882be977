# SPDX-License-Identifier: Apache-2.0
"""The modelled time per token over requests and shared tokens, and where pat begins to pay."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_pat.estimate.batches import DecodeStep
from sglang_pat.estimate.planning import estimate
from sglang_pat.estimate.requests import Prompts, Request
from sglang_pat.estimate.step import StepModel

REQUESTS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # that decode at a time
# Tokens that all of them begin with.
SHARED: tuple[int, ...] = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Time per token with pat over that without: what counts as paying, and what is worth more.
LEVELS = (0.98, 0.9, 0.75, 0.5)
PAYS = LEVELS[0]
RESOLUTION = 16  # tokens of a break-even; every length of SHARED is a multiple


@dataclass(frozen=True, slots=True)
class Point:
    """One modelled decode step. ``packed_s``, ``unpacked_s``: seconds per token with pat and
    without; ``bytes_needed``: of the GPU's memory, for K/V and weights."""

    requests: int
    shared: int
    packed_s: float
    unpacked_s: float
    bytes_needed: float

    @property
    def ratio(self) -> float:
        """Time per token with pat over that without."""
        return self.packed_s / self.unpacked_s


@dataclass(slots=True)
class Surface:
    """What ``model`` says of batches in which all requests share one prefix, and each has
    ``private`` tokens of its own (1 or more): the rest of its prompt, and what it has written."""

    model: StepModel
    private: int
    _known: dict[tuple[int, int], Point] = field(default_factory=dict)

    def at(self, requests: int, shared: int) -> Point:
        """The step of so many requests on one prefix of ``shared`` tokens. The target of the model
        must hold them."""
        key = (requests, shared)
        if key not in self._known:
            self._known[key] = self._plan(requests, shared)
        return self._known[key]

    def grid(self) -> list[list[Point]]:
        """A row for each of ``REQUESTS``, with a point for each of ``SHARED``."""
        return [[self.at(requests, shared) for shared in SHARED] for requests in REQUESTS]

    def break_even(self, requests: int, level: float) -> int | None:
        """Shared tokens from which on pat takes at most ``level`` of the time, to ``RESOLUTION``
        tokens; None if that needs more than the longest of ``SHARED``.

        From there on no point of the grid is above ``level``. Between the two points of the
        grid where that begins it is taken to begin once, and halving finds it.
        """
        above = [i for i, shared in enumerate(SHARED) if self.at(requests, shared).ratio > level]
        last = max(above, default=-1)
        if last + 1 == len(SHARED):
            return None
        if last < 0:
            return SHARED[0]
        low, high = SHARED[last], SHARED[last + 1]
        while high - low > RESOLUTION:
            middle = (low + high) // (2 * RESOLUTION) * RESOLUTION
            if self.at(requests, middle).ratio > level:
                low = middle
            else:
                high = middle
        return high

    def _plan(self, requests: int, shared: int) -> Point:
        length = shared + self.private
        # One name stands for all that a request has to itself: only its length counts.
        batch = [
            Request(number + 1, np.append(np.arange(shared), shared + number), length, output=1)
            for number in range(requests)
        ]
        found = estimate(
            Prompts(batch), [DecodeStep([*range(requests)], [0] * requests)], self.model
        )
        held = round(found.mean("held"))
        return Point(
            requests,
            shared,
            found.packed_step_s,
            found.unpacked_step_s,
            self.model.bytes_needed(held),
        )
