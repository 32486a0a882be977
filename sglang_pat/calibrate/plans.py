# SPDX-License-Identifier: Apache-2.0
"""Measures random plans, for the fit and to judge it."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_pat import _C
from sglang_pat.calibrate.batches import Batch, forest
from sglang_pat.calibrate.fit import Measured
from sglang_pat.calibrate.rates import Bench, Say

# Random forests for the fit, and others for its error.
FITTED, HELD_OUT = range(12), range(1000, 1006)


def ways(bench: Bench) -> dict[str, dict[str, Any]]:
    """How each forest is planned: by options of ``Target``. Pieces for twice the SMs there are make
    more partials; branches are measured where plans may have them."""
    found: dict[str, dict[str, Any]] = {
        "packs": {"branching": "never"},
        "more pieces": {"branching": "never", "units": 2 * bench.profile.sms},
    }
    if bench.target(1).branching != "never":
        found["branches"] = {"branching": "always"}
    return found


def measure(bench: Bench, seeds: range, say: Say) -> list[Measured]:
    """One row a plan. Plans of one forest that are equal are measured once."""
    rows = []
    for i, seed in enumerate(seeds, start=1):
        batch = forest(seed)
        seen: set[bytes] = set()
        for way, options in ways(bench).items():
            made, target = bench.plan(batch, **options)
            content = made.items.tobytes() + made.members.tobytes()
            if content in seen:
                continue
            seen.add(content)
            seconds = bench.machine.seconds(batch, made, target)
            rows.append(_row(bench, batch, way, made, seconds))
        say(f"forest {i} of {len(seeds)}: {batch.num_queries} queries, {len(seen)} plans")
    return rows


def _row(bench: Bench, batch: Batch, way: str, made: _C.Plan, seconds: float) -> Measured:
    terms = _C.plan_terms(made, np.array(batch.seq_lens), batch.unique_tokens)
    return Measured(f"{batch.name}, {way}", terms, bench.target(batch.num_queries), seconds)
