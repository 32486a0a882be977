# SPDX-License-Identifier: Apache-2.0
"""What ``sglang-pat estimate --break-even`` prints and writes: tables for people, data for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_pat.estimate.break_even.surface import LEVELS, PAYS, REQUESTS, SHARED, Surface
from sglang_pat.estimate.report import head_of_model

_WIDTH = 100
_NEVER = "-"


@dataclass(frozen=True, slots=True)
class Panel:
    """One GPU. ``gpu``: its short name; ``machine``: it in words; ``compared``: whether modelled
    times of this GPU and model were ever compared with measured ones; ``memory_bytes``: its
    memory."""

    gpu: str
    machine: str
    kv_dtype: str
    surface: Surface
    compared: bool
    memory_bytes: int


def text(panels: Sequence[Panel]) -> str:
    """The tables of all GPUs."""
    return "\n\n".join("\n".join(_lines(panel)) for panel in panels)


def _lines(panel: Panel) -> list[str]:
    surface = panel.surface
    title = head_of_model(surface.model, panel.kv_dtype, panel.machine)
    ratios = [
        [
            f"{row[0].requests}",
            *(f"{point.ratio:.3f}{'*' if point.ratio <= PAYS else ' '}" for point in row),
        ]
        for row in surface.grid()
    ]
    limits = [
        [f"{requests}", *(_tokens(surface.break_even(requests, level)) for level in LEVELS)]
        for requests in REQUESTS
    ]
    return [
        title,
        f"all requests begin with the same tokens, and each has {surface.private:,} of its own",
        "",
        f"time per token with pat over that without, * where it is at most {PAYS:g}",
        *_table(["requests \\ shared", *(f"{shared:,} " for shared in SHARED)], ratios),
        "",
        "shared tokens from which on pat takes at most so much of the time",
        *_table(["requests", *(f"{level:g}" for level in LEVELS)], limits),
        *_notes(panel),
    ]


def _tokens(shared: int | None) -> str:
    return _NEVER if shared is None else f"{shared:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _notes(panel: Panel) -> list[str]:
    notes = [
        f"({_NEVER}: not up to {SHARED[-1]:,} tokens; every time is modelled, none is measured)"
    ]
    if panel.compared:
        notes.append(
            "The model was compared with measurements of this GPU and model, at a few of these "
            "points: docs/estimate.md says how far off it was."
        )
    else:
        notes.append(
            "The model was never compared with a measurement of this GPU and model: "
            "docs/estimate.md says with which it was."
        )
    points = [point for row in panel.surface.grid() for point in row]
    most = max(points, key=lambda point: point.bytes_needed)
    if most.bytes_needed > panel.memory_bytes:
        notes.append(
            f"note: {most.requests} requests on {most.shared:,} shared tokens take "
            f"{most.bytes_needed / 1e9:.0f} GB with the weights, of a GPU that has "
            f"{panel.memory_bytes / 1e9:.0f}: a server would run fewer at a time"
        )
    return [line for note in notes for line in textwrap.wrap(note, _WIDTH)]


def data(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The same as plain data. Times in ms; a break-even of None is beyond the longest prefix."""
    return [
        {
            "gpu": panel.gpu,
            "machine": panel.machine,
            "compared": panel.compared,
            "target": asdict(panel.surface.model.target),
            "rows": [
                {
                    "requests": point.requests,
                    "shared": point.shared,
                    "modelled_ms": point.packed_s * 1e3,
                    "modelled_unpacked_ms": point.unpacked_s * 1e3,
                    "ratio": point.ratio,
                    "fits": point.bytes_needed <= panel.memory_bytes,
                }
                for row in panel.surface.grid()
                for point in row
            ],
            "break_even": [
                {
                    "requests": requests,
                    "shared": {
                        f"{level:g}": panel.surface.break_even(requests, level) for level in LEVELS
                    },
                }
                for requests in REQUESTS
            ],
        }
        for panel in panels
    ]
