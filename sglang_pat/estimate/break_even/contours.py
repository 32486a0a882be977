# SPDX-License-Identifier: Apache-2.0
"""The picture of ``sglang-pat estimate --break-even``: a panel a GPU, a line a level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pat.estimate.break_even.figures import COLOURS, head, require
from sglang_pat.estimate.break_even.report import Panel
from sglang_pat.estimate.break_even.surface import LEVELS, REQUESTS, SHARED, Surface

_INSTEAD = "drop --plot: the tables and --json FILE have the same numbers"
_TICKS = (128, 512, 2048, 8192, SHARED[-1])


def check() -> None:
    """Raises SystemExit that says how to get matplotlib, or what to do without it."""
    require(_INSTEAD)


def draw(panels: Sequence[Panel], footer: str, path: Path) -> None:
    """Shared tokens over requests, both by powers of two: the break-even of each level as a line,
    and above it, the more pat gains, the darker. ``footer``: how and when it was made."""
    figure = require(_INSTEAD).Figure(figsize=(4.8 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    axes[0].set_ylabel("tokens that all requests share")
    figure.supxlabel(footer, fontsize=7, color="#606060")
    figure.savefig(path, dpi=150)


def _panel(axis: Any, panel: Panel) -> None:
    surface = panel.surface
    for level in LEVELS:
        requests, shared = _line(surface, level)
        if not requests:
            continue
        axis.fill_between(requests, shared, SHARED[-1], color=COLOURS["pat"], alpha=0.18, lw=0)
        axis.plot(requests, shared, color=COLOURS["pat"], linewidth=1.2, marker="o", markersize=2.5)
        axis.annotate(
            f"{level:g}",
            (requests[-1], shared[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(REQUESTS, [str(requests) for requests in REQUESTS])
    axis.set_yticks(_TICKS, [f"{tokens:,}" for tokens in _TICKS])
    axis.minorticks_off()
    axis.set_xlim(REQUESTS[0], REQUESTS[-1] * 1.6)
    axis.set_ylim(SHARED[1] / 4, SHARED[-1])
    axis.set_xlabel("requests that decode at a time")
    name = surface.model.model.name
    compared = "" if panel.compared else ", never compared with a measurement"
    head(axis, f"{panel.gpu.upper()}, {name}: modelled time with pat over without{compared}")


def _line(surface: Surface, level: float) -> tuple[list[int], list[int]]:
    """Requests and shared tokens of those points of a level that lie in the picture."""
    found = [(requests, surface.break_even(requests, level)) for requests in REQUESTS]
    known = [(requests, shared) for requests, shared in found if shared is not None]
    return [requests for requests, _ in known], [shared for _, shared in known]
