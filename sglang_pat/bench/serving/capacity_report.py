# SPDX-License-Identifier: Apache-2.0
"""Capacities that follow from probes: their table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_pat.bench.common.figures import finish
from sglang_pat.bench.serving.curves import draw_lines, panels
from sglang_pat.bench.serving.probe import AGENTS, LEAST_REQUESTS, CapacityRow, broken
from sglang_pat.bench.serving.rows import unique
from sglang_pat.bench.serving.search import Bracket, close_enough

SHOWN_OVER_LIMIT = 1.6  # the top of the picture, over the loosest limit


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one backend under one limit. ``found``: the ends are as close as they were to become."""

    ends: Bracket
    found: bool

    @classmethod
    def of(cls, rows: Sequence[CapacityRow], limit_ms: float, resolution: float) -> Capacity:
        """From the probes of one backend and subject."""
        ends = ends_of(rows, limit_ms)
        if ends.held is None or ends.broke is None:
            return cls(ends, False)
        whole = rows[0].unit == AGENTS
        return cls(ends, close_enough(ends.held, ends.broke, resolution, whole))

    def __str__(self) -> str:
        """The load, or what bounds it."""
        if self.ends.held is None:
            return "-" if self.ends.broke is None else f"under {self.ends.broke:.4g}"
        if self.ends.broke is None:
            return f"at least {self.ends.held:.4g}"
        if self.found:
            return f"{self.ends.held:.4g}"
        return f"at least {self.ends.held:.4g}, at most {self.ends.broke:.4g}"


def ends_of(rows: Sequence[CapacityRow], limit_ms: float) -> Bracket:
    """Between which loads the capacity of one backend and subject lies."""
    return Bracket.of((row.load, broken(row, limit_ms) is None) for row in rows)


def ratio(ours: Capacity, others: Sequence[Capacity]) -> str:
    """Our capacity over the best of the others, or what bounds it; a dash where nothing does."""
    if ours.ends.held is None or not others:
        return "-"
    if all(other.found for other in others):
        best = max(other.ends.held or 0.0 for other in others)
        return f"{'' if ours.found else 'at least '}{ours.ends.held / best:.2f}"
    if any(other.ends.broke is None for other in others):
        return "-"
    most = max(other.ends.broke or 0.0 for other in others)
    return f"at least {ours.ends.held / most:.2f}"


def capacity_table(
    rows: Sequence[CapacityRow], limits_ms: Sequence[float], resolution: float
) -> list[str]:
    """For every subject, limit and backend the capacity, what the probe there showed, how the
    smallest load beyond broke the limit, and pat's capacity over the best of the others."""
    lines = []
    for subject in unique(row.subject for row in rows):
        of_subject = [row for row in rows if row.subject == subject]
        lines += [
            "",
            f"{subject}: the most {of_subject[0].unit} with p99 TPOT under a limit, "
            f"to {resolution:.0%}",
            f"{'limit ms':>8} {'backend':12} {'capacity':>26} {'TPOT p99':>9} {'TTFT p99':>9} "
            f"{'begun':>6} {'ended':>6} {'tokens/s':>9} {'pat / best':>14}  broken at",
        ]
        for limit in sorted(limits_ms):
            lines += _of_limit(of_subject, limit, resolution)
        lines += notes(of_subject, limits_ms)
    return lines


def _of_limit(rows: Sequence[CapacityRow], limit_ms: float, resolution: float) -> list[str]:
    backends = unique(row.backend for row in rows)
    found = {
        backend: Capacity.of([row for row in rows if row.backend == backend], limit_ms, resolution)
        for backend in backends
    }
    lines = []
    for backend in backends:
        mine = found[backend]
        others = [found[name] for name in backends if name != backend]
        over_best = ratio(mine, others) if backend == "pat" else ""
        at = _at(rows, backend, mine.ends.held)
        over = _at(rows, backend, mine.ends.broke)
        reason = f"{over.load:.4g}: {broken(over, limit_ms)}" if over else "none"
        lines.append(
            f"{limit_ms:8g} {backend:12} {mine!s:>26} {_cells(at)} {over_best:>14}  {reason}"
        )
    return lines


def _cells(row: CapacityRow | None) -> str:
    """Of the probe at a capacity."""
    if row is None:
        return f"{'-':>9} {'-':>9} {'-':>6} {'-':>6} {'-':>9}"
    return (
        f"{_number(row.tpot_p99_ms, '.2f'):>9} {_number(row.ttft_p99_ms, '.1f'):>9} "
        f"{row.begun:6.0%} {_number(row.ended, '.0%'):>6} {row.tokens_per_s:9.0f}"
    )


def _at(rows: Sequence[CapacityRow], backend: str, load: float | None) -> CapacityRow | None:
    found = [row for row in rows if (row.backend, row.load) == (backend, load)]
    return found[-1] if found else None


def notes(rows: Sequence[CapacityRow], limits_ms: Sequence[float]) -> list[str]:
    """What makes the capacities of one subject doubtful; a line each."""
    lines = []
    for backend in unique(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        for limit in sorted(limits_ms):
            ends = ends_of(mine, limit)
            again = sorted(
                row.load
                for row in mine
                if ends.broke is not None and row.load > ends.broke and not broken(row, limit)
            )
            where = f"{rows[0].subject} {backend}, {limit:g} ms"
            if again:
                loads = ", ".join(f"{load:.4g}" for load in again)
                lines.append(f"{where}: held again at {loads}, above what broke it: noise")
            over = _at(mine, backend, ends.broke)
            if over and 0 < over.requests < LEAST_REQUESTS:
                lines.append(
                    f"{where}: the p99 at {over.load:.4g} is of {over.requests} requests, fewer "
                    f"than {LEAST_REQUESTS}: raise --duration-s"
                )
    return lines


def draw_capacity(
    groups: Sequence[tuple[str, Sequence[CapacityRow]]], limits_ms: Sequence[float], path: Path
) -> None:
    """p99 TPOT over the load, a line a backend and a panel for each title and subject; limits are
    horizontal, and a cross marks a probe that broke a limit by its queue alone."""
    parts = [
        (f"{subject}, {title}", [row for row in rows if row.subject == subject])
        for title, rows in groups
        for subject in unique(row.subject for row in rows)
    ]
    figure, axes = panels(len(parts), 1)
    for axis, (title, rows) in zip(axes[:, 0], parts, strict=True):
        draw_lines(axis, rows, "tpot_p99_ms")
        for limit in limits_ms:
            axis.axhline(limit, color="#606060", linewidth=0.8, linestyle=":")
        queued = [row for row in rows if row.tpot_p99_ms and broken(row, float("inf"))]
        if queued:
            points = [row.load for row in queued], [row.tpot_p99_ms for row in queued]
            axis.plot(*points, "x", color="black", label="a queue grew")
        axis.set_ylim(0, SHOWN_OVER_LIMIT * max(limits_ms))
        axis.set_ylabel("p99 TPOT, ms")
        finish(axis, title)
    figure.savefig(path, dpi=150)


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else f"{value:{how}}"
