# SPDX-License-Identifier: Apache-2.0
"""Chooses between fitted factors and those taken over, by the time that plans made with them take.

A fit brings the model near the times of the plans that were measured. That need not choose better
plans: on an H100 the fitted model was within 8 %, and plans by it took 1.01 to 1.04 times as long
as those by the H200's factors (docs/calibrate.md). So what counts in the end is the time of plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.common.trees import PAPER_TREES
from sglang_pat.calibrate.batches import forest, regular
from sglang_pat.calibrate.rates import Bench, Say
from sglang_pat.profiles import Costs

# Random forests that are neither for the fit nor for its error.
SEEDS = range(2000, 2012)


@dataclass(frozen=True)
class Choice:
    """``ratio``: time of plans by the fitted factors over that by the others, the geometric mean of
    ``batches`` batches; 1 where all plans are equal. ``changed``: how many plans differ."""

    ratio: float
    batches: int
    changed: int

    @property
    def fitted(self) -> bool:
        """Whether the fitted factors stay: they must not make plans slower."""
        return self.ratio <= 1.0


def batches() -> Iterator[Forest]:
    """The paper's trees, and random forests."""
    yield from map(regular, PAPER_TREES)
    yield from map(forest, SEEDS)


def choose(bench: Bench, fitted: Costs, others: Costs, say: Say) -> Choice:
    """Time plans by both, each as the machine at hand runs them."""
    ratios: list[float] = []
    changed = 0
    for batch in batches():
        times = _seconds(bench, batch, (fitted, others))
        changed += len(times) > 1
        ratios.append(times[0] / times[-1])
    ratio = math.exp(sum(map(math.log, ratios)) / len(ratios))
    found = Choice(ratio, len(ratios), changed)
    say(
        f"plans by the fitted factors: {ratio:.3f} of the time of those by the factors of the H200 "
        f"({changed} of {len(ratios)} plans differ)"
    )
    return found


def _seconds(bench: Bench, batch: Forest, costs: Sequence[Costs]) -> list[float]:
    """One time for each different plan of the batch."""
    plans: dict[bytes, float] = {}
    for each in costs:
        by = replace(bench, profile=replace(bench.profile, costs=each))
        made, target = by.plan(batch)
        key = made.items.tobytes()
        if key not in plans:
            plans[key] = bench.machine.seconds(batch, made, target)
    return list(plans.values())
