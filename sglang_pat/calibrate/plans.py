# SPDX-License-Identifier: Apache-2.0
"""Measures random plans, for the fit and to judge it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_pat import _C
from sglang_pat.bench.common.forests import Forest
from sglang_pat.calibrate.batches import forest
from sglang_pat.calibrate.fit import Measured, modelled
from sglang_pat.calibrate.rates import Bench, Say

# Random forests for the fit, and others for its error.
FITTED, HELD_OUT = range(13), range(1000, 1007)
# A plan that is modelled to take so many times as long as the forest's packs is not measured: the
# choice between the two is clear, whatever the factors.
COMPARABLE = 1.5


def ways(bench: Bench) -> dict[str, dict[str, Any]]:
    """How each forest is planned: by options of ``Target``. Pieces for twice the SMs there are make
    more partials; branches are measured where plans may have them."""
    found: dict[str, dict[str, Any]] = {
        "packs": {"branching": "never"},
        "more pieces": {"branching": "never", "num_sms": 2 * bench.profile.sms},
    }
    if bench.target(1).branching != "never":
        found["branches"] = {"branching": "always"}
    return found


def measure(bench: Bench, seeds: range, say: Say) -> list[Measured]:
    """One row a plan."""
    rows = []
    for i, seed in enumerate(seeds, start=1):
        batch = forest(seed)
        found = _rows(bench, batch)
        rows += found
        say(f"forest {i} of {len(seeds)}: {batch.num_queries} queries, {len(found)} plans")
    return rows


def _rows(bench: Bench, batch: Forest) -> list[Measured]:
    rows: list[Measured] = []
    for way, options in ways(bench).items():
        made, target = bench.plan(batch, **options)
        terms = _C.plan_terms(made, np.array(batch.seq_lens), batch.unique_tokens)
        row = Measured(f"{batch.name}, {way}", terms, bench.target(batch.num_queries), math.inf)
        costs = bench.profile.costs
        if rows and modelled(row, costs) > COMPARABLE * modelled(rows[0], costs):
            continue
        rows.append(replace(row, seconds=bench.machine.seconds(batch, made, target)))
    return rows
