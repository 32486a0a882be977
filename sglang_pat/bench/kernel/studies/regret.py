# SPDX-License-Identifier: Apache-2.0
"""How much the default loses to the best of a list of other rules: its regret."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sglang_pat.bench.kernel.report import geomean
from sglang_pat.bench.kernel.studies.engine import BASE, StudyRow
from sglang_pat.bench.kernel.studies.ratios import MARGIN, by_family, listed, mean


def regret(row: StudyRow, alternatives: Sequence[str]) -> tuple[float, str] | None:
    """The default's time over that of the best alternative, and that one's name; None if one of
    both has no time."""
    times = {name: row.times[name] for name in alternatives if name in row.times}
    if BASE not in row.times or not times:
        return None
    best = min(times, key=times.__getitem__)
    return row.times[BASE] / times[best], best


def regrets(rows: Sequence[StudyRow], alternatives: Sequence[str]) -> Iterator[str]:
    """Regret by family, how often it is a regression, and which alternatives were best."""
    best: Counter[str] = Counter()
    lost = []
    every = []
    for family, members in by_family(rows).items():
        found = [(row, each) for row in members if (each := regret(row, alternatives))]
        if not found:
            continue
        values = [value for _, (value, _) in found]
        every += values
        best.update(name for _, (_, name) in found)
        lost += [
            f"{row.spec} {value:.3f} of {name} (noise {row.noise:.1%})"
            for row, (value, name) in found
            if value > MARGIN
        ]
        yield f"{family}: default over the best alternative {geomean(values):.3f}, at worst " + (
            f"{max(values):.3f}"
        )
    if not every:
        yield "no row has the default and an alternative"
        return
    yield f"all {len(every)} rows: {geomean(every):.3f}, at worst {max(every):.3f}"
    yield f"more than {MARGIN - 1:.0%} over the best, {len(lost)}: {'; '.join(lost) or 'none'}"
    yield "best alternative of so many rows: " + ", ".join(
        f"{name} {count}" for name, count in best.most_common()
    )
    fixed = {name: value for name in alternatives if (value := mean(rows, name))}
    yield f"each alternative, always taken, over default: {listed(fixed)}"
