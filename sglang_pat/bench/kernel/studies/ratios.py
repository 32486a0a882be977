# SPDX-License-Identifier: Apache-2.0
"""What the summaries of studies are made of: times of rows over one another."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pat.bench.kernel.report import geomean
from sglang_pat.bench.kernel.studies.engine import BASE, StudyRow

MARGIN = 1.02  # BASE may be this much slower than another before a summary names the row


def by_family(rows: Sequence[StudyRow]) -> dict[str, list[StudyRow]]:
    """In the order in which families come first."""
    found: dict[str, list[StudyRow]] = {}
    for row in rows:
        found.setdefault(row.family, []).append(row)
    return found


def ratio(row: StudyRow, name: str, over: str = BASE) -> float | None:
    """The time of one over that of another; None unless both have one."""
    if name not in row.times or over not in row.times:
        return None
    return row.times[name] / row.times[over]


def mean(rows: Sequence[StudyRow], name: str, over: str = BASE) -> float | None:
    """Geometric mean of ``ratio`` over the rows that have it; None if none has."""
    found = [each for row in rows if (each := ratio(row, name, over)) is not None]
    return geomean(found) if found else None


def means(rows: Sequence[StudyRow]) -> dict[str, float]:
    """Of each name but BASE, the mean over BASE."""
    names = dict.fromkeys(name for row in rows for name in row.times if name != BASE)
    return {name: found for name in names if (found := mean(rows, name)) is not None}


def listed(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items()) or "none"


def faster(rows: Sequence[StudyRow], names: Sequence[str]) -> str:
    """The rows in which one of ``names`` is faster than BASE by more than MARGIN, each with the
    fastest of them, its time over that of BASE and the row's noise; and their number."""
    lost = []
    for row in rows:
        others = {name: row.over_base[name] for name in names if name in row.over_base}
        if others and MARGIN * min(others.values()) < 1:
            best = min(others, key=others.__getitem__)
            lost.append(f"{row.spec} {best} {others[best]:.3f} (noise {row.noise:.1%})")
    return f"{len(lost)} of {len(rows)} rows: {'; '.join(lost) or 'none'}"
