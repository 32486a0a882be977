# SPDX-License-Identifier: Apache-2.0
"""Pictures of the serving benchmark. matplotlib is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pat.bench.plot import COLOURS, finish, require
from sglang_pat.bench.serving.rows import Row, Spread, TraceRow, spread, unique

_OTHER_COLOUR = "#a0a0a0"


def draw_workloads(groups: Sequence[tuple[str, Sequence[Row]]], path: Path) -> None:
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


def draw_traces(rows: Sequence[TraceRow], path: Path) -> None:
    """Lines over the request rate: TPOT and time to first token, a row of panels for each trace."""
    traces = unique(row.trace for row in rows)
    figure, axes = _figure(len(traces), 2)
    quantities = (("tpot_ms", "TPOT, ms"), ("ttft_p50_ms", "TTFT p50, ms"))
    for line, trace in zip(axes, traces, strict=True):
        for axis, (name, label) in zip(line, quantities, strict=True):
            for backend in unique(row.backend for row in rows):
                found = [row for row in rows if (row.trace, row.backend) == (trace, backend)]
                rates = sorted({row.rate for row in found})
                spreads = [
                    Spread.of(getattr(row, name) for row in found if row.rate == rate)
                    for rate in rates
                ]
                axis.plot(
                    rates,
                    [value.median for value in spreads if value],
                    marker="o",
                    markersize=3,
                    label=backend,
                    color=COLOURS.get(backend, _OTHER_COLOUR),
                )
            axis.set_xticks(sorted({row.rate for row in rows if row.trace == trace}))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_ylim(bottom=0)
            axis.set_xlabel("requests/s")
            axis.set_ylabel(label)
            finish(axis, trace)
    figure.savefig(path, dpi=150)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    figure = require().Figure(figsize=(9, 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
