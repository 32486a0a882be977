# SPDX-License-Identifier: Apache-2.0
"""The rows of the serving benchmark, and what follows from them.

A row is one run: ``load``, ``backend``, ``run``; what SGLang's client found, under its names;
``step_ms``, the engine's own time of a step; and, of pat, ``counted``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sglang_pat.demo.counters import Counters

Row = dict[str, Any]

# Beyond this much of the engine's step, a client's inter-token time is not the engine's.
MAX_CLIENT_OVER_ENGINE = 1.10


def counted_fields(counted: Counters) -> dict[str, Any]:
    """What pat counted in a run. ``plan_us``: host microseconds of a plan; ``exposed_us``: how long
    the GPU waited for it at most, in the mean. K/V tokens are those of one layer and head; every
    layer and head reads as many."""
    made = max(counted.plans_made, 1)
    return asdict(counted) | {
        "plan_us": 1e6 * counted.plan_seconds / made,
        "exposed_us": 1e6 * counted.exposed_seconds / made,
        "kv_read_share": counted.kv_tokens_read / max(counted.kv_tokens_unpacked, 1),
    }


def step_ms(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> float | None:
    """The engine's time of a decode step of the batch size that it noted most between two readings;
    None if it noted none.

    SGLang's scheduler notes by batch size, every ``--decode-log-interval`` steps, the mean seconds
    since it last did. The first note of a run holds the prefill and the idle time before it, too,
    and is left out; of the others this is the median.
    """
    new = [list(notes)[len(before.get(size, ())) :] for size, notes in after.items()]
    most = max(new, key=len, default=[])
    return 1e3 * statistics.median(most[1:] or most) if most else None


def unique(values: Iterable[str]) -> list[str]:
    """In the order in which they first come."""
    return list(dict.fromkeys(values))


def value(row: Row, name: str) -> float | None:
    """A number of a row by its name; ``steady.NAME`` and ``counted.NAME`` are in these parts. None
    where there is none, or a busy client read all tokens at once."""
    part, _, inner = name.rpartition(".")
    found = (row.get(part) or {}).get(inner) if part else row.get(name)
    return float(found) if found else None


def values(rows: Sequence[Row], load: str, backend: str, name: str) -> list[float]:
    """``value`` of the runs of a load on a backend that have one."""
    found = [value(row, name) for row in rows if (row["load"], row["backend"]) == (load, backend)]
    return [each for each in found if each is not None]


def ratio(
    rows: Sequence[Row], load: str, name: str, *, least_is_best: bool = True
) -> tuple[float, str] | None:
    """pat's median over the best of the other backends', and that backend; None if there is nothing
    to divide."""
    medians = {
        backend: statistics.median(found)
        for backend in unique(row["backend"] for row in rows)
        if (found := values(rows, load, backend, name))
    }
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
    ("step ms", "step_ms", 7, ".2f"),
    ("plan us", "counted.plan_us", 7, ".0f"),
    ("exposed", "counted.exposed_us", 7, ".0f"),
    ("plans", "counted.plans_made", 6, ".0f"),
    ("packed", "counted.packed_steps", 6, ".0f"),
    ("steps", "counted.decode_steps", 6, ".0f"),
    ("K/V read", "counted.kv_read_share", 8, ".0%"),
)


def table(rows: Sequence[Row]) -> list[str]:
    """Medians by load and backend, of the inter-token time its spread, too; then pat against the
    better of the others, and where the client or SGLang's HTTP process, not the engine, was the
    limit."""
    heads = " ".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS)
    lines, remarks = [f"{'load':16} {'backend':12} runs {'ITL p50 ms':>22} {heads}"], []
    for load in unique(row["load"] for row in rows):
        for backend in unique(row["backend"] for row in rows if row["load"] == load):
            lines.append(_line(rows, load, backend))
            itl, step = (values(rows, load, backend, of) for of in ("median_itl_ms", "step_ms"))
            over = statistics.median(itl) / statistics.median(step) if itl and step else 0.0
            if over > MAX_CLIENT_OVER_ENGINE:
                remarks.append(
                    f"{load} {backend}: the client's inter-token time is {over:.2f} times the "
                    "engine's step, so the client or SGLang's HTTP process is the limit: raise "
                    "--stream-interval"
                )
        for name, title, least in COMPARED:
            if found := ratio(rows, load, name, least_is_best=least):
                remarks.append(f"{load}: {title}, pat / {found[1]}: {found[0]:.3f}")
    return lines + remarks


def _line(rows: Sequence[Row], load: str, backend: str) -> str:
    count = sum((row["load"], row["backend"]) == (load, backend) for row in rows)
    times = values(rows, load, backend, "median_itl_ms")
    itl = f"{statistics.median(times):.2f} ({min(times):.2f}..{max(times):.2f})" if times else "-"
    cells = []
    for _, name, width, form in _COLUMNS:
        found = values(rows, load, backend, name)
        cells.append(f"{format(statistics.median(found), form) if found else '-':>{width}}")
    return f"{load:16} {backend:12} {count:4} {itl:>22} {' '.join(cells)}"
