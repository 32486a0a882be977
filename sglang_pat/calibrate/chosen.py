# SPDX-License-Identifier: Apache-2.0
"""Chooses between fitted factors and those taken over, by the time that plans made with them take.

A fit brings the model near the times of the plans that were measured. That need not choose better
plans: on an H100 the fitted model was within 8 %, and plans by it took 1.01 to 1.04 times as long
as those by the H200's factors (docs/calibrate.md). So fitted factors must be accurate, and plans by
them no slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.common.trees import PAPER_TREES
from sglang_pat.bench.kernel.report import geomean
from sglang_pat.calibrate.batches import forest, regular
from sglang_pat.calibrate.rates import Bench, Say
from sglang_pat.planner import Plan
from sglang_pat.profiles import Costs
from sglang_pat.target import Target

# Fitted factors with more error are not used. The H200's have as much, and choose plans well.
MAX_ERROR = 0.08
# Random forests that are neither for the fit nor for its error.
SEEDS = range(2000, 2012)


@dataclass(frozen=True)
class Choice:
    """``ratio``: time of plans by the fitted factors over that by the others, the geometric mean of
    ``batches`` batches; 1 where all plans are equal. ``changed``: how many plans differ.
    ``error``: of the model with the fitted factors, on plans that were not fitted."""

    ratio: float
    batches: int
    changed: int
    error: float

    @property
    def accurate(self) -> bool:
        """Whether the model with the fitted factors is near enough to the measured times."""
        return self.error <= MAX_ERROR

    @property
    def fitted(self) -> bool:
        """Whether the fitted factors stay: accurate ones that do not make plans slower."""
        return self.accurate and self.ratio <= 1.0

    def __str__(self) -> str:
        """Which factors the profile has, and why."""
        times = (
            f"over {self.batches} batches, plans by the fitted ones take {self.ratio:.3f} of the "
            "time of plans by the H200's"
        )
        if self.fitted:
            return f"fitted: {times}"
        too_high = f"the error of the fitted ones is {self.error:.2%}, more than {MAX_ERROR:.0%}"
        return (
            "the H200's, with the measured bandwidth and product rate: "
            f"{times if self.accurate else too_high}"
        )


def batches() -> Iterator[Forest]:
    """The paper's trees, and random forests."""
    yield from map(regular, PAPER_TREES)
    yield from map(forest, SEEDS)


def choose(bench: Bench, fitted: Costs, others: Costs, error: float, say: Say) -> Choice:
    """Time plans by both, each as the machine at hand runs them. ``error``: of ``fitted``."""
    ratios = [_ratio(bench, batch, fitted, others) for batch in batches()]
    different = [ratio for ratio in ratios if ratio is not None]
    say(f"{len(ratios)} batches planned by both kinds of factors: {len(different)} plans differ")
    equal = [1.0] * (len(ratios) - len(different))
    return Choice(geomean([*different, *equal]), len(ratios), len(different), error)


def _ratio(bench: Bench, batch: Forest, fitted: Costs, others: Costs) -> float | None:
    """Time of the plan by ``fitted`` over that by ``others``; None if the two plans are equal."""
    made, target = _plan(bench, batch, fitted)
    other, its_target = _plan(bench, batch, others)
    if made.items.tobytes() == other.items.tobytes():
        return None
    seconds = bench.machine.seconds
    return seconds(batch, made, target) / seconds(batch, other, its_target)


def _plan(bench: Bench, batch: Forest, costs: Costs) -> tuple[Plan, Target]:
    return replace(bench, profile=replace(bench.profile, costs=costs)).plan(batch)
