# SPDX-License-Identifier: Apache-2.0
"""Picture of workloads. matplotlib is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_pat.bench.common.figures import COLOURS, finish
from sglang_pat.bench.serving.curves import OTHER_COLOUR, panels
from sglang_pat.bench.serving.rows import WorkloadRow, spread, unique


def draw_workloads(groups: Sequence[tuple[str, Sequence[WorkloadRow]]], path: Path) -> None:
    """Bars: inter-token time by workload and backend, with the spread; a panel for each title."""
    figure, axes = panels(len(groups), 1)
    for axis, (title, rows) in zip(axes[:, 0], groups, strict=True):
        backends, workloads = (unique(getattr(r, n) for r in rows) for n in ("backend", "workload"))
        width = 0.8 / len(backends)
        for place, backend in enumerate(backends):
            found = [
                (x + (place - (len(backends) - 1) / 2) * width, value)
                for x, workload in enumerate(workloads)
                if (value := spread(rows, workload, backend, "itl_p50_ms"))
            ]
            axis.bar(
                [x for x, _ in found],
                [value.median for _, value in found],
                width,
                yerr=[
                    [value.median - value.least for _, value in found],
                    [value.most - value.median for _, value in found],
                ],
                error_kw={"linewidth": 0.8},
                label=backend,
                color=COLOURS.get(backend, OTHER_COLOUR),
            )
        axis.set_xticks(range(len(workloads)), workloads, fontsize=8)
        axis.set_ylabel("inter-token time, ms")
        finish(axis, title)
    figure.savefig(path, dpi=150)
