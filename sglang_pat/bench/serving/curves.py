# SPDX-License-Identifier: Apache-2.0
"""Curves from idle to saturation: a table for every figure over the load, and their picture.

The load is the request rate of a trace or the number of agents. Rows are of any kind that names
what was served (``subject``), its ``load`` and the load's ``unit``. matplotlib is imported when a
picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sglang_pat.bench.common.figures import COLOURS, head, require
from sglang_pat.bench.serving.rows import Spread, unique

OTHER_COLOUR = "#a0a0a0"
CELL = 31  # characters of a backend's column: a median and a spread of tens of seconds in ms


class Point(Protocol):
    """A run at a load. The figures are attributes, too; None where one is not known."""

    @property
    def backend(self) -> str: ...
    @property
    def subject(self) -> str: ...
    @property
    def load(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def first_token(self) -> dict[str, float] | None: ...


class Figure(NamedTuple):
    """A quantity over the load. ``name``: the attribute of a row."""

    title: str
    name: str
    least_is_best: bool = True


FIGURES = (
    Figure("TPOT mean, ms", "tpot_ms"),
    Figure("TPOT p99, ms", "tpot_p99_ms"),
    Figure("TTFT mean, ms", "ttft_mean_ms"),
    Figure("TTFT p99, ms", "ttft_p99_ms"),
    Figure("end to end mean, ms", "e2e_mean_ms"),
    Figure("end to end p99, ms", "e2e_p99_ms"),
    Figure("output tokens/s", "tokens_per_s", least_is_best=False),
)
# Of the picture: title, mean or only line, dashed line.
PANELS = (
    ("TPOT, ms: mean, p99 dashed", "tpot_ms", "tpot_p99_ms"),
    ("TTFT, ms: mean, p99 dashed", "ttft_mean_ms", "ttft_p99_ms"),
    ("end to end, ms: mean, p99 dashed", "e2e_mean_ms", "e2e_p99_ms"),
    ("output tokens/s", "tokens_per_s", None),
)


def figure_at(rows: Sequence[Point], backend: str, load: float, name: str) -> Spread | None:
    """Of one figure over the runs of a backend at a load."""
    return Spread.of(
        getattr(row, name) for row in rows if (row.backend, row.load) == (backend, load)
    )


def curve_tables(rows: Sequence[Point]) -> list[str]:
    """For every subject and figure a table: a line a load, a column a backend with the median and
    the spread over its runs, and pat's median over that of the best of the others."""
    lines = []
    for subject in unique(row.subject for row in rows):
        of_subject = [row for row in rows if row.subject == subject]
        for figure in FIGURES:
            lines += _table(of_subject, figure)
    return lines


def _table(rows: Sequence[Point], figure: Figure) -> list[str]:
    """Nothing if no row has the figure."""
    backends = unique(row.backend for row in rows)
    cells = "".join(f"{backend:>{CELL}}" for backend in backends)
    lines = ["", f"{rows[0].subject}: {figure.title}", f"{rows[0].unit:>10}{cells}  pat / best"]
    known = False
    for load in sorted({row.load for row in rows}):
        found = {name: figure_at(rows, name, load, figure.name) for name in backends}
        known = known or any(found.values())
        cells = "".join(f"{_cell(found[name]):>{CELL}}" for name in backends)
        ratio = _ratio(found, figure.least_is_best)
        lines.append(f"{load:10g}{cells}  {'-' if ratio is None else f'{ratio:.3f}':>10}")
    return lines if known else []


def _cell(found: Spread | None) -> str:
    """A median and its spread; of a single run its value."""
    if found is None:
        return "-"
    return f"{found}" if found.least < found.most else f"{found.median:.2f}"


def _ratio(found: dict[str, Spread | None], least_is_best: bool) -> float | None:
    ours = found.get("pat")
    others = [each.median for name, each in found.items() if each and name != "pat"]
    if ours is None or not others:
        return None
    best = min(others) if least_is_best else max(others)
    return ours.median / best if best else None


def draw_curves(groups: Sequence[tuple[str, Sequence[Any]]], path: Path) -> None:
    """Lines over the load, with bars from the least to the most run: a row of panels for each
    title and subject, in it TPOT, TTFT, end-to-end time and output tokens/s."""
    parts = [
        (f"{subject}, {title}", [row for row in rows if row.subject == subject])
        for title, rows in groups
        for subject in unique(row.subject for row in rows)
    ]
    figure, axes = panels(len(parts), len(PANELS))
    for line, (title, rows) in zip(axes, parts, strict=True):
        for axis, (label, name, dashed) in zip(line, PANELS, strict=True):
            draw_lines(axis, rows, name)
            if dashed:
                draw_lines(axis, rows, dashed, linestyle="--", labelled=False)
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
            head(axis, title if axis is line[0] else "")
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=150)


def draw_lines(
    axis: Any, rows: Sequence[Point], name: str, *, linestyle: str = "-", labelled: bool = True
) -> None:
    """A line a backend over the load; loads at which the figure is not known are left out."""
    for backend in unique(row.backend for row in rows):
        loads = sorted({row.load for row in rows if row.backend == backend})
        found = [(load, at) for load in loads if (at := figure_at(rows, backend, load, name))]
        axis.errorbar(
            [load for load, _ in found],
            [at.median for _, at in found],
            yerr=[
                [at.median - at.least for _, at in found],
                [at.most - at.median for _, at in found],
            ],
            elinewidth=0.8,
            linestyle=linestyle,
            marker="o",
            markersize=3,
            label=backend if labelled else None,
            color=COLOURS.get(backend, OTHER_COLOUR),
        )
    axis.set_xlabel(rows[0].unit)


def panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes by row and column."""
    figure = require().Figure(figsize=(max(9, 3.6 * columns), 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
