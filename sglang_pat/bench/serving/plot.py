# SPDX-License-Identifier: Apache-2.0
"""Pictures of the serving benchmark. matplotlib is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pat.bench.common.figures import COLOURS, finish, head, require
from sglang_pat.bench.serving.rows import Spread, TraceRow, WorkloadRow, spread, unique

_OTHER_COLOUR = "#a0a0a0"


def draw_workloads(groups: Sequence[tuple[str, Sequence[WorkloadRow]]], path: Path) -> None:
    """Bars: inter-token time by workload and backend, with the spread; a panel for each title."""
    figure, axes = _figure(len(groups), 1)
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
                color=COLOURS.get(backend, _OTHER_COLOUR),
            )
        axis.set_xticks(range(len(workloads)), workloads, fontsize=8)
        axis.set_ylabel("inter-token time, ms")
        finish(axis, title)
    figure.savefig(path, dpi=150)


def draw_traces(groups: Sequence[tuple[str, Sequence[TraceRow]]], path: Path) -> None:
    """Lines over the request rate: a row of panels for each trace, in it TPOT and time to first
    token of each title."""
    traces = unique(row.trace for _, rows in groups for row in rows)
    figure, axes = _figure(len(traces), 2 * len(groups))
    for line, trace in zip(axes, traces, strict=True):
        for i, (title, all_rows) in enumerate(groups):
            rows = [row for row in all_rows if row.trace == trace]
            tpot, ttft = line[2 * i : 2 * i + 2]
            _over_rate(tpot, rows, "tpot_ms")
            tpot.set_ylabel("TPOT, ms")
            _over_rate(ttft, rows, "ttft_p50_ms")
            ttft.set_ylabel("TTFT p50, ms")
            head(tpot, f"{trace}, {title}")
            head(ttft, "")
    axes[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=150)


def _over_rate(axis: Any, rows: Sequence[TraceRow], name: str) -> None:
    """A line a backend: medians of the runs."""
    for backend in unique(row.backend for row in rows):
        found = [row for row in rows if row.backend == backend]
        rates = sorted({row.rate for row in found})
        spreads = [Spread.of(getattr(r, name) for r in found if r.rate == rate) for rate in rates]
        axis.plot(
            rates,
            [value.median for value in spreads if value],
            marker="o",
            markersize=3,
            label=backend,
            color=COLOURS.get(backend, _OTHER_COLOUR),
        )
    axis.set_xticks(sorted({row.rate for row in rows}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("requests/s")
    axis.set_ylim(bottom=0)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    figure = require().Figure(figsize=(max(9, 3.6 * columns), 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
