# SPDX-License-Identifier: Apache-2.0
"""How the rows of a study are printed and drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sglang_pat.bench.common.document import Document
from sglang_pat.bench.common.figures import head, require
from sglang_pat.bench.kernel.report import wrong_outputs
from sglang_pat.bench.kernel.studies.catalogue import STUDIES
from sglang_pat.bench.kernel.studies.engine import BASE, PERMUTED, StudyRow
from sglang_pat.bench.kernel.studies.ratios import by_family, means

COLUMNS = 3  # panels side by side in a picture
LABELS = 16  # that an axis of times has room for, one above the other
COLOURS = 10  # of lines, before matplotlib begins again
# Where the axis of times may have a number: a logarithmic one has too few by itself.
TICKS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def show(document: Document, picture: Path | None) -> int:
    """Print the rows of a document and draw them; exit status 1 if an output is wrong or a rule did
    not run."""
    study = STUDIES[document["study"]]
    rows = [StudyRow(**row) for row in document["rows"]]
    print(f"\n{study.title}")
    for heads, members in _by_heads(rows):
        print("\n".join(["", *table(heads, members)]))
        print("\n".join(f"  {line}" for line in study.summary(members)))
    for each in document["left_out"]:
        print(f"left out: {each}")
    if picture and rows:
        draw(study.title, rows, picture)
    for line in complaints(rows):
        print(line)
    return 0 if all(row.is_sound for row in rows) else 1


def _by_heads(rows: Sequence[StudyRow]) -> list[tuple[str, list[StudyRow]]]:
    return [(heads, list(members)) for heads, members in groupby(rows, lambda row: row.heads)]


def _names(rows: Iterable[StudyRow]) -> list[str]:
    """Of all rules and peers that have a time in any row, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row.times))


def table(heads: str, rows: Sequence[StudyRow]) -> list[str]:
    """The time of BASE, and the others' as multiples of it, by family with geometric means."""
    names = [name for name in _names(rows) if name != BASE]
    title = f"{heads} heads: {BASE} in us, the others' times over it"
    columns = [f"{name:>{_width(name)}}" for name in names]
    lines = [title, f"{'':44}{BASE:>10}" + "".join(columns)]
    for family, members in by_family(rows).items():
        for row in members:
            base = row.times.get(BASE)
            first = "-" if base is None else f"{base:.1f}"
            lines.append(f"{row.spec:44}{first:>10}" + _cells(row.over_base, names))
        if len(members) > 1:
            label = f"geometric mean, {family}"
            lines.append(f"{label:44}{'':10}" + _cells(means(members), names))
    return lines


def _cells(found: dict[str, float], names: Iterable[str]) -> str:
    shown = {name: f"{found[name]:.3f}" if name in found else "-" for name in names}
    return "".join(f"{text:>{_width(name)}}" for name, text in shown.items())


def _width(name: str) -> int:
    """Of a column."""
    return max(9, len(name) + 2)


def complaints(rows: Sequence[StudyRow]) -> list[str]:
    """Outputs that are wrong, plans that ran out of room, and what did not run, a line each; a
    peer that often fails for one reason has one line."""
    lines = []
    failures: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        where = f"{row.heads} {row.spec}"
        lines += wrong_outputs(row)
        lines += [f"{where}: {name}: {why}" for name, why in row.degraded.items()]
        for name, why in row.failed.items():
            failures.setdefault((name, why), []).append(where)
    for (name, why), places in failures.items():
        more = f" and {len(places) - 1} more rows" if len(places) > 1 else ""
        lines.append(f"{places[0]}{more}: {name} did not run: {why}")
    return lines


def draw(title: str, rows: Sequence[StudyRow], path: Path) -> None:
    """Write a picture: a panel for each family and heads, with a line a rule or peer through its
    times over that of BASE, batch by batch."""
    found = panels(rows)
    lines_of_panels = -(-len(found) // COLUMNS)
    figure = require().Figure(figsize=(16, 0.8 + 3.4 * lines_of_panels), layout="constrained")
    axes = figure.subplots(lines_of_panels, COLUMNS, squeeze=False).flatten()
    names = [name for name in _names(rows) if name != BASE]
    for axis, (what, members) in zip(axes, found, strict=False):
        _panel(axis, names, members)
        head(axis, what)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    where = {"loc": "outside upper center", "ncols": 8, "frameon": False}
    figure.legend(handles, labels, title=title, fontsize=8, **where)
    figure.savefig(path, dpi=100)


def panels(rows: Sequence[StudyRow]) -> list[tuple[str, list[StudyRow]]]:
    """By heads and family, as title and rows; families of one batch share a panel."""
    found = []
    for heads, of_heads in _by_heads(rows):
        families = by_family(of_heads)
        found += [
            (f"{family}, {heads} heads", members)
            for family, members in families.items()
            if len(members) > 1
        ]
        alone = [row for members in families.values() if len(members) == 1 for row in members]
        if alone:
            what = alone[0].family if len(alone) == 1 else "one batch of each kind"
            found.append((f"{what}, {heads} heads", alone))
    return found


def _panel(axis: Any, names: Sequence[str], rows: Sequence[StudyRow]) -> None:
    places = range(len(rows))
    axis.axhline(1, color="black", linewidth=1.2, label=BASE)
    for place, name in enumerate(names):
        values = [row.over_base.get(name, float("nan")) for row in rows]
        again = ":" if place >= COLOURS else "-"  # a colour that another line has as well
        style = "--" if name.endswith(PERMUTED) else again
        axis.plot(places, values, style, marker="o", markersize=3, linewidth=1, label=name)
    axis.set_yscale("log", base=2)
    axis.set_yticks(ticks(*axis.get_ylim()))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.tick_params(axis="y", labelsize=7)
    specs = [row.spec for row in rows]
    axis.set_xticks(places, specs, fontsize=6, rotation=30, ha="right")
    axis.set_ylabel(f"time / {BASE}", fontsize=8)


def ticks(low: float, high: float) -> list[float]:
    """Those of TICKS from ``low`` to ``high`` whose numbers have room beside one another; 1 goes
    before the others, which go upwards."""
    apart = math.log(high / low) / LABELS
    shown: list[float] = []
    for tick in sorted(TICKS, key=lambda tick: (tick != 1, tick)):
        if low <= tick <= high and all(abs(math.log(tick / other)) >= apart for other in shown):
            shown.append(tick)
    return sorted(shown)
