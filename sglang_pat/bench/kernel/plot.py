# SPDX-License-Identifier: Apache-2.0
"""Pictures of the kernel benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_pat.bench.common.figures import COLOURS, finish, require
from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel.report import CONTESTANTS, TreeRow, groups


def draw(kind: str, rows: Sequence[TreeRow], path: Path) -> None:
    """Write a picture of the rows of a document of ``kind``: trees, sweep, ragged,
    drafts or batches."""
    panels = groups(rows)
    figure = require().Figure(figsize=(12, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (title, members) in zip(axes, panels, strict=True):
        (_sweep if kind == "sweep" else _trees)(axis, members)
        finish(axis, title)
    figure.savefig(path, dpi=150)


def _trees(axis: Any, rows: Sequence[TreeRow]) -> None:
    """Bars: every contestant as a multiple of the floor."""
    times = {name: [getattr(row, name) for row in rows] for name in CONTESTANTS}
    bars(axis, [row.spec for row in rows], times, [row.floor_us for row in rows], log=True)
    axis.set_ylabel("time / floor")


def bars(
    axis: Any,
    specs: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    units: Sequence[float],
    *,
    log: bool,
) -> None:
    """Bars side by side at every tree, one a name: its values as multiples of the trees' units, and
    a line at 1. No bar for None."""
    width = 0.8 / len(values)
    for place, (name, column) in enumerate(values.items()):
        shift = (place - (len(values) - 1) / 2) * width
        found = [(x + shift, v / units[x]) for x, v in enumerate(column) if v is not None]
        places, heights = [x for x, _ in found], [height for _, height in found]
        axis.bar(places, heights, width, label=name, color=COLOURS[name])
    axis.axhline(1, color="black", linewidth=0.8)
    if log:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    axis.margins(x=0.01)
    axis.set_xticks(range(len(specs)), [_label(spec) for spec in specs], fontsize=5)


def _sweep(axis: Any, rows: Sequence[TreeRow]) -> None:
    """Lines: the best peer's time over pat's by batch, one line a shared length."""
    lengths = sorted({Tree.parse(row.spec).tokens[0] for row in rows})
    for place, length in enumerate(lengths):
        points = sorted(
            (tree.num_queries, best / row.pat)
            for row in rows
            if (tree := Tree.parse(row.spec)).tokens[0] == length and (best := row.best())
        )
        shade = 0.75 * (1 - place / max(1, len(lengths) - 1))
        axis.plot(
            [queries for queries, _ in points],
            [gain for _, gain in points],
            marker="o",
            markersize=3,
            color=(0.75, shade, shade),
            label=f"{length} shared tokens",
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("queries")
    axis.set_ylabel("best peer / pat")


def _label(spec: str) -> str:
    """The tree, or the name of a forest, on two or more short lines."""
    if "_" not in spec:
        return spec.replace("-", "\n")
    nodes, tokens = spec.split("_")
    return "\n".join(_wrap(nodes) + _wrap(tokens))


def _wrap(numbers: str, most: int = 12) -> list[str]:
    lines = [""]
    for number in numbers.split(","):
        joined = f"{lines[-1]},{number}" if lines[-1] else number
        if len(joined) > most:
            lines.append(number)
        else:
            lines[-1] = joined
    return lines
