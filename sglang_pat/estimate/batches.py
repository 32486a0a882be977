# SPDX-License-Identifier: Apache-2.0
"""Which requests decode together, and how far each has come."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step of B requests. ``requests`` [B]: their numbers, a request of several samples
    once for each; ``produced`` [B]: output tokens that each has before the step."""

    requests: list[int]
    produced: list[int]


def closed_loop(queue: Sequence[tuple[int, int]], concurrency: int, count: int) -> list[DecodeStep]:
    """Up to ``count`` steps, evenly spaced, of a server that runs ``concurrency`` requests at a
    time: where one ends, the next of ``queue`` takes its place.

    ``queue``: number and output tokens (1 or more) of each request, in the order in which they
    come. With more requests than places the first ones are in the middle of their answers when the
    run begins, evenly spread, as in a run that has been going on: else requests of equal length
    would begin and end together. Only steps in which every place is taken are looked at, with fewer
    requests than places those before the first one ends. A request is in as many of the steps as
    its output is long. No chance is in it: equal arguments give equal steps.
    """
    places = min(concurrency, len(queue))
    runs: list[tuple[int, int, int]] = []  # request, first step and the one after its last
    ends: list[int] = []
    for place, (request, output) in enumerate(queue[:places]):
        age = output * (places - 1 - place) // places if len(queue) > places else 0
        runs.append((request, -age, output - age))
        ends.append(output - age)
    heapq.heapify(ends)
    for request, output in queue[places:]:
        start = ends[0]
        runs.append((request, start, start + output))
        heapq.heapreplace(ends, start + output)
    full = ends[0]  # steps in which every place is taken
    steps = sorted({(2 * i + 1) * full // (2 * count) for i in range(count)})
    return [_at(step, runs) for step in steps]


def _at(step: int, runs: Sequence[tuple[int, int, int]]) -> DecodeStep:
    running = [(request, step - start) for request, start, end in runs if start <= step < end]
    return DecodeStep([request for request, _ in running], [produced for _, produced in running])
