# SPDX-License-Identifier: Apache-2.0
"""The fit of the cost model's factors: factors that are known come out again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.trees import target

from sglang_pat import _C, gpus, plan
from sglang_pat.calibrate.batches import forest
from sglang_pat.calibrate.fit import FACTORS, Measured, fit, modelled
from sglang_pat.profiles import Costs
from sglang_pat.target import Target

BASE = gpus.h200().costs
LAUNCH_S = 6e-6
TRUTH = replace(
    BASE, reread_factor=0.65, wide_factor=0.2, merge_factor=1.1, branch_overhead_s=2.5e-7
)
WAYS: tuple[dict[str, Any], ...] = (
    {"branching": "never"},
    {"branching": "always"},
    {"branching": "never", "num_sms": 264},
)


def rows_of(seeds: range, truth: Costs, noise: float = 0.0, ways: Any = WAYS) -> list[Measured]:
    """Plans of random forests, with times of the model itself, the launch and noise added."""
    rng = np.random.default_rng(3)
    rows = []
    for seed in seeds:
        batch = forest(seed)
        for way in ways:
            made = plan(batch.paths, batch.seq_lens, target(**way))
            terms = _C.plan_terms(made, np.array(batch.seq_lens), batch.unique_tokens)
            row = Measured(f"{batch.name} {way}", terms, target(), 1.0)
            seconds = (LAUNCH_S + modelled(row, truth)) * (1 + noise * rng.standard_normal())
            rows.append(replace(row, seconds=seconds))
    return rows


def test_factors_come_out_again_without_noise() -> None:
    rows = rows_of(range(8), TRUTH)
    fitted = fit(rows, BASE)
    for name in FACTORS:
        assert getattr(fitted.costs, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3), name
    assert fitted.launch_s == pytest.approx(LAUNCH_S, rel=1e-3)
    assert fitted.error(rows) < 1e-5 and fitted.absent == ()
    assert fitted.costs.bytes_per_s == BASE.bytes_per_s  # measured, not fitted
    assert fitted.costs.item_overhead_s == BASE.item_overhead_s


@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_with_noise_the_error_on_other_plans_is_the_noise(noise: float) -> None:
    fitted = fit(rows_of(range(12), TRUTH, noise), BASE)
    held_out = rows_of(range(1000, 1008), TRUTH, noise)
    assert 0.6 * noise < fitted.error(held_out) < 1.5 * noise
    exact = rows_of(range(1000, 1008), TRUTH)
    assert fitted.error(exact) < 0.6 * noise
    assert fitted.costs.reread_factor == pytest.approx(TRUTH.reread_factor, abs=5 * noise)
    assert fitted.costs.merge_factor == pytest.approx(TRUTH.merge_factor, abs=12 * noise)


def test_no_factor_is_below_zero() -> None:
    """Times in which rereads cost nothing, with noise that would push their factor below it."""
    free = replace(TRUTH, reread_factor=0.0, wide_factor=0.0)
    for shift in (0.97, 1.0):
        rows = [
            replace(row, seconds=row.seconds * (shift if row.terms.reread_tokens else 1.0))
            for row in rows_of(range(10), free)
        ]
        costs = fit(rows, BASE).costs
        assert min(getattr(costs, name) for name in FACTORS) >= 0
        assert costs.reread_factor < 0.05


def test_a_branch_that_runs_last_is_no_reason_for_other_factors() -> None:
    """Plans whose time is that of their longest branch say nothing of the terms beside it."""
    rows = rows_of(range(12), TRUTH)
    last = [
        row
        for row in rows
        if modelled(row, TRUTH) == modelled(row, replace(TRUTH, branch_overhead_s=0.0))
        and row.terms.branches
    ]
    assert last, "no forest with a branch that runs last: choose other seeds"
    assert fit(rows, BASE).costs.branch_overhead_s == pytest.approx(
        TRUTH.branch_overhead_s, rel=1e-3
    )


def test_what_no_plan_has_keeps_its_value() -> None:
    """On a GPU without branches their overhead is not fitted, and that is said."""
    fitted = fit(rows_of(range(12), TRUTH, ways=WAYS[::2]), BASE)
    assert fitted.absent == ("branch_overhead_s",)
    assert fitted.costs.branch_overhead_s == BASE.branch_overhead_s
    assert fitted.costs.merge_factor == pytest.approx(TRUTH.merge_factor, rel=1e-3)


def test_too_few_plans_and_impossible_times_are_refused() -> None:
    rows = rows_of(range(4), TRUTH)
    with pytest.raises(ValueError, match="9 plans cannot fit 5 unknowns"):
        fit(rows[:9], BASE)
    for seconds in (0.0, float("nan")):
        with pytest.raises(ValueError, match=r"forest 0 .* took .* s, must be positive"):
            fit([replace(rows[0], seconds=seconds), *rows[1:]], BASE)


def test_a_target_of_one_head_fits_as_well() -> None:
    """Units, heads and head dim are the row's, not the H200's."""
    small = Target.h200(
        num_q_heads=8, num_kv_heads=1, head_dim=64, max_queries=512, num_sms=78, branching="never"
    )
    rows = [
        replace(row, target=small, seconds=LAUNCH_S + modelled(replace(row, target=small), TRUTH))
        for row in rows_of(range(8), TRUTH)
    ]
    assert fit(rows, BASE).error(rows) < 1e-5
