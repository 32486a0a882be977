# SPDX-License-Identifier: Apache-2.0
"""The rows of the serving benchmark, and what follows from them.

A row is one run: ``load``, ``backend``, ``run``; what SGLang's client found, under its names; and,
of pat, ``counted``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_pat.demo.counters import Counters

Row = dict[str, Any]


def counted_fields(counted: Counters) -> dict[str, Any]:
    """What pat counted in a run. ``plan_us``: host microseconds of a plan; ``exposed_us``: how long
    the GPU waited for it at most, in the mean. K/V tokens are those of one layer and head; every
    layer and head reads as many."""
    made = max(counted.plans_made, 1)
    return vars(counted) | {
        "plan_us": 1e6 * counted.plan_seconds / made,
        "exposed_us": 1e6 * counted.exposed_seconds / made,
        "kv_read_share": counted.kv_tokens_read / max(counted.kv_tokens_unpacked, 1),
    }


def numbers(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Those of all runs by load, backend and name; what a row has in ``steady`` and ``counted`` as
    ``steady.NAME``. A time of 0, of a client that read all tokens at once, is none."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        flat = row | {
            f"{part}.{name}": each
            for part in ("steady", "counted")
            for name, each in row.get(part, {}).items()
        }
        names = found.setdefault(row["load"], {}).setdefault(row["backend"], {})
        for name, each in flat.items():
            if isinstance(each, int | float) and (each or name == "run"):
                names.setdefault(name, []).append(float(each))
    return found


def ratio(
    of_load: Mapping[str, Mapping[str, Sequence[float]]], name: str, least_is_best: bool = True
) -> tuple[float, str] | None:
    """pat's median over the best of the other backends', and that backend; None if there is nothing
    to divide."""
    medians = {b: statistics.median(each[name]) for b, each in of_load.items() if name in each}
    ours = medians.pop("pat", None)
    if ours is None or not medians:
        return None
    best = (min if least_is_best else max)(medians, key=lambda backend: medians[backend])
    return ours / medians[best], best


COMPARED = (
    ("median_itl_ms", "inter-token time", True),
    ("median_tpot_ms", "time per output token", True),
    ("steady.output_throughput", "output tokens/s", False),
)
# Title, name, width and format of the columns.
_COLUMNS = (
    ("p99", "p99_itl_ms", 7, ".2f"),
    ("TPOT p50", "median_tpot_ms", 8, ".2f"),
    ("TTFT p50", "median_ttft_ms", 8, ".1f"),
    ("tokens/s", "steady.output_throughput", 8, ".0f"),
    ("plan us", "counted.plan_us", 7, ".0f"),
    ("exposed", "counted.exposed_us", 7, ".0f"),
    ("K/V read", "counted.kv_read_share", 8, ".0%"),
)


def table(rows: Iterable[Row]) -> list[str]:
    """Medians by load and backend, of the inter-token time its spread, too; then pat against the
    better of the others."""
    heads = " ".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS)
    lines, remarks = [f"{'load':16} {'backend':12} runs {'ITL p50 ms':>22} {heads}"], []
    for load, of_load in numbers(rows).items():
        for backend, found in of_load.items():
            lines.append(f"{load:16} {backend:12} {_cells(found)}")
        for name, title, least in COMPARED:
            if best := ratio(of_load, name, least):
                remarks.append(f"{load}: {title}, pat / {best[1]}: {best[0]:.3f}")
    return lines + remarks


def _cells(found: Mapping[str, Sequence[float]]) -> str:
    times = found.get("median_itl_ms")
    itl = f"{statistics.median(times):.2f} ({min(times):.2f}..{max(times):.2f})" if times else "-"
    cells = [
        f"{format(statistics.median(found[name]), form) if name in found else '-':>{width}}"
        for _, name, width, form in _COLUMNS
    ]
    return f"{len(found['run']):4} {itl:>22} {' '.join(cells)}"
