# SPDX-License-Identifier: Apache-2.0
"""Fits the factors of the model of a plan's time (csrc/pack/cost_model.h) to measured plans.

Minimised is the sum of squared relative errors, with no factor below zero. The model is asked for
everything that it counts: it is linear in the factors, but for the smooth maximum over the longest
branch. So its slopes at the present factors are the columns of a least-squares problem, which is
solved again with the factors found until the error no longer falls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_pat import _C
from sglang_pat.profiles import Costs
from sglang_pat.target import Target

# The factors, each with the step that its slope is taken over, which is small beside its value.
STEPS = {
    "reread_factor": 1e-3,
    "wide_factor": 1e-3,
    "merge_factor": 1e-3,
    "branch_overhead_s": 1e-10,
}
FACTORS = tuple(STEPS)
_MAX_ROUNDS = 20


@dataclass(frozen=True)
class Measured:
    """One plan with its time. ``terms``: what the model counts of it; ``target``: the machine and
    the heads that it ran with; ``seconds``: of one layer, forward, merge and launch."""

    label: str
    terms: _C.PlanTerms
    target: Target
    seconds: float


@dataclass(frozen=True)
class Fitted:
    """``launch_s``: seconds beside the modelled ones. ``absent``: the factors of which no plan had
    anything: they are as they were given."""

    costs: Costs
    launch_s: float
    absent: tuple[str, ...]

    def seconds(self, row: Measured) -> float:
        """What the model says of a plan, and the launch."""
        return self.launch_s + modelled(row, self.costs)

    def error(self, rows: Sequence[Measured]) -> float:
        """Root mean square of the relative errors."""
        ratios = [self.seconds(row) / row.seconds - 1 for row in rows]
        return math.sqrt(sum(ratio * ratio for ratio in ratios) / len(ratios))


COSTS_OF_MODEL = ("bytes_per_s", *FACTORS)


def modelled(row: Measured, costs: Costs) -> float:
    """Seconds of a plan without the launch, by the cost model with other costs."""
    native = replace(row.target, **{name: getattr(costs, name) for name in COSTS_OF_MODEL}).native
    return _C.plan_seconds(native, row.terms)


def fit(rows: Sequence[Measured], costs: Costs) -> Fitted:
    """The factors and the launch that fit ``rows`` best, with the rates of ``costs``.

    Raises ValueError for fewer plans than twice the unknowns, or for times that are not positive.
    """
    unknowns = 1 + len(FACTORS)
    if len(rows) < 2 * unknowns:
        raise ValueError(f"{len(rows)} plans cannot fit {unknowns} unknowns: measure more")
    for row in rows:
        if not (math.isfinite(row.seconds) and row.seconds > 0):
            raise ValueError(f"{row.label} took {row.seconds} s, must be positive: measure again")
    best = _solve(rows, costs)
    for _ in range(_MAX_ROUNDS):
        found = _solve(rows, best.costs)
        if found.error(rows) >= best.error(rows) * (1 - 1e-9):
            break
        best = found
    return best


def _solve(rows: Sequence[Measured], costs: Costs) -> Fitted:
    """The factors that fit best if the model's slopes were everywhere those at ``costs``."""
    from scipy.optimize import nnls  # SGLang depends on it; planning does not need it

    slopes = np.array([[_slope(row, costs, name) for name in FACTORS] for row in rows])
    at = np.array([modelled(row, costs) for row in rows])
    factors = np.array([getattr(costs, name) for name in FACTORS])
    fixed = at - slopes @ factors  # of the model, what no factor changes
    seconds = np.array([row.seconds for row in rows])
    columns = np.column_stack([np.ones(len(rows)), slopes])
    present = np.any(columns != 0.0, axis=0, keepdims=True)[0]
    # What is absent keeps its value, which has no part in any time.
    weighted = columns[:, present] / seconds[:, None]
    scale = _column_norms(weighted)
    solution, _ = nnls(weighted / scale, (seconds - fixed) / seconds)
    found = np.concatenate([[0.0], factors])
    found[present] = solution / scale
    absent = tuple(name for name, has in zip(FACTORS, present[1:], strict=True) if not has)
    values = dict(zip(FACTORS, map(float, found[1:]), strict=True))
    return Fitted(replace(costs, **values), float(found[0]), absent)


def _slope(row: Measured, costs: Costs, name: str) -> float:
    """Of a plan's modelled seconds over a factor."""
    step = STEPS[name]
    more = replace(costs, **{name: getattr(costs, name) + step})
    return (modelled(row, more) - modelled(row, costs)) / step


def _column_norms(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """So that seconds and multiples of a read weigh alike in the solver."""
    return np.asarray(np.linalg.norm(matrix, axis=0))
