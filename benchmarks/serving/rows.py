# SPDX-License-Identifier: Apache-2.0
"""What is measured, run by run, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_pat.demo.counters import Counters

# Beyond this much of the engine's step time, a client's inter-token time is not the engine's.
MAX_CLIENT_OVER_ENGINE = 1.10
BASE = "fa3"  # what pat prefills with on Hopper


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What pat's counters say of a run. None: of another backend."""

    decode_steps: int | None = None
    packed_steps: int | None = None
    plans_made: int | None = None
    plan_us: float | None = None  # host time of pat in a decode step that made a plan
    # Plans during which the GPU always had work; and the host time of the other plans, over all of
    # them: the GPU waited at most so long for a plan, in the mean. None in older documents.
    hidden_plans: int | None = None
    exposed_us: float | None = None
    reuse_us: float | None = None  # and in one that kept the last
    kv_saved_bytes: int | None = None  # K/V that packing did not read, over all layers and heads
    # Of a layer and head: what was read, and what would have been if nothing were packed.
    kv_tokens_read: int | None = None
    kv_tokens_unpacked: int | None = None
    base_forwards: dict[str, int] | None = None  # what is the base backend's to run, by kind
    fallbacks: dict[str, int] | None = None  # what pat should have served but did not, by reason

    @property
    def hidden_share(self) -> float | None:
        """Fraction of the new plans that were hidden: from half on, the GPU waited for none in the
        median. None without new plans, or if they were not counted."""
        if self.hidden_plans is None or not self.plans_made:
            return None
        return self.hidden_plans / self.plans_made


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRow(Counted):
    """One run of a workload. None: the backend, or SGLang, does not say."""

    backend: str
    workload: str
    groups: int
    per_group: int
    prefix: int
    private: int
    run: int
    itl_p50_ms: float  # while all requests decode
    itl_p99_ms: float
    tpot_ms: float  # mean over requests, from a request's first token to its last
    ttft_ms: float  # median
    tokens_per_s: float
    step_ms: float | None  # by the engine's own clock
    cached_tokens: int  # of the prompt of the request that had the fewest

    @property
    def client_over_engine(self) -> float | None:
        return self.itl_p50_ms / self.step_ms if self.step_ms else None


def counted_fields(counted: Counters, kv_bytes_per_token: int) -> dict[str, Any]:
    """The fields of a row that pat's counters give.

    pat counts K/V tokens of one layer and K/V head; every layer and head reads as many.
    """
    saved = counted.kv_tokens_unpacked - counted.kv_tokens_read
    reused = counted.host_seconds - counted.plan_seconds
    return {
        "decode_steps": counted.decode_steps,
        "packed_steps": counted.packed_steps,
        "plans_made": counted.plans_made,
        "plan_us": 1e6 * counted.plan_seconds / max(counted.plans_made, 1),
        "hidden_plans": counted.hidden_plans,
        "exposed_us": 1e6 * counted.exposed_seconds / max(counted.plans_made, 1),
        "reuse_us": 1e6 * reused / max(counted.decode_steps - counted.plans_made, 1),
        "kv_saved_bytes": saved * kv_bytes_per_token,
        "kv_tokens_read": counted.kv_tokens_read,
        "kv_tokens_unpacked": counted.kv_tokens_unpacked,
        "base_forwards": counted.base_forwards,
        "fallbacks": counted.fallbacks,
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity over runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None if there is no value."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}..{self.most:.2f})"


def spread(rows: Sequence[WorkloadRow], workload: str, backend: str, name: str) -> Spread | None:
    """Of field ``name`` over the runs of a workload on a backend."""
    return Spread.of(
        getattr(row, name) for row in rows if (row.workload, row.backend) == (workload, backend)
    )


def ratio(
    rows: Sequence[WorkloadRow], workload: str, name: str, base: str | None = None
) -> float | None:
    """pat's median over that of ``base``, or of the better of the other backends if ``base`` is
    None; None if there is nothing to divide."""
    ours = spread(rows, workload, "pat", name)
    others = [
        found.median
        for backend in ([base] if base else unique(row.backend for row in rows))
        if backend != "pat" and (found := spread(rows, workload, backend, name))
    ]
    least = min(others, default=0.0)  # 0 where a busy machine gave all tokens at once
    return ours.median / least if ours and least else None


def unique(values: Iterable[str]) -> list[str]:
    """In the order in which they first come."""
    return list(dict.fromkeys(values))


def table(rows: Sequence[WorkloadRow], limits: Mapping[str, float]) -> list[str]:
    """Medians and spreads by workload and backend, then pat against the better of the others.

    ``limits``: by workload, how much of their inter-token time pat may need.
    """
    backends = unique(row.backend for row in rows)
    lines = [
        f"{'workload':14} {'backend':12} runs  {'ITL p50 ms':>22} {'p99':>7} {'TPOT':>7} "
        f"{'TTFT p50':>9} {'tokens/s':>9} {'step ms':>8} {'ITL/step':>8} {COUNTED_HEADS}"
    ]
    workloads = unique(row.workload for row in rows)
    for workload in workloads:
        for backend in backends:
            found = [row for row in rows if (row.workload, row.backend) == (workload, backend)]
            if found:
                lines.append(_line(found))
    # Prefill is the base backend's, so the time to the first token is compared with that.
    base = BASE if BASE in backends else None
    lines += [
        "",
        f"{'pat / better of others':26} {'ITL p50':>8} {'limit':>6}  {'TPOT':>6} "
        f"{'TTFT' + (f'/{base}' if base else ''):>8}",
    ]
    for workload in workloads:
        itl, most = ratio(rows, workload, "itl_p50_ms"), limits.get(workload)
        verdict = "" if itl is None or most is None else "met" if itl <= most else "MISSED"
        lines.append(
            f"{workload:26} {_number(itl, 3):>8} {_number(most, 2):>6}  "
            f"{_number(ratio(rows, workload, 'tpot_ms'), 3):>6} "
            f"{_number(ratio(rows, workload, 'ttft_ms', base), 3):>8}  {verdict}".rstrip()
        )
    return lines + warnings(rows)


def _median(rows: Sequence[Counted], name: str) -> float | None:
    found = Spread.of(getattr(row, name) for row in rows)
    return found.median if found else None


COUNTED_HEADS = (
    f"{'plan us':>8} {'hidden':>6} {'exposed':>7} {'reuse us':>8} {'packed':>9} {'K/V saved':>10}"
)


def counted_cells(rows: Sequence[Counted]) -> str:
    """Of pat's counters, under COUNTED_HEADS."""
    names = ("plan_us", "exposed_us", "reuse_us", "decode_steps", "packed_steps", "kv_saved_bytes")
    plan, exposed, reuse, steps, packed, saved = (_median(rows, name) for name in names)
    hidden = Spread.of(row.hidden_share for row in rows)
    return (
        f"{_number(plan, 0):>8} {f'{hidden.median:.0%}' if hidden else '-':>6} "
        f"{_number(exposed, 0):>7} {_number(reuse, 0):>8} "
        f"{'-' if packed is None else f'{packed:.0f}/{steps:.0f}':>9} "
        f"{'-' if saved is None else f'{saved / 1e9:.3g} GB':>10}"
    )


def _line(rows: Sequence[WorkloadRow]) -> str:
    median = partial(_median, rows)
    return (
        f"{rows[0].workload:14} {rows[0].backend:12} {len(rows):4}  "
        f"{Spread.of(row.itl_p50_ms for row in rows)!s:>22} {_number(median('itl_p99_ms'), 2):>7} "
        f"{_number(median('tpot_ms'), 2):>7} {_number(median('ttft_ms'), 1):>9} "
        f"{_number(median('tokens_per_s'), 0):>9} {_number(median('step_ms'), 2):>8} "
        f"{_number(median('client_over_engine'), 2):>8} {counted_cells(rows)}"
    )


def warnings(rows: Sequence[WorkloadRow]) -> list[str]:
    """Where the client was the limit, or the cache did not hold what it should; a line each."""
    lines = []
    for workload in unique(row.workload for row in rows):
        for backend in unique(row.backend for row in rows):
            found = spread(rows, workload, backend, "client_over_engine")
            if found and found.median > MAX_CLIENT_OVER_ENGINE:
                lines.append(
                    f"{workload} {backend}: the client's inter-token time is "
                    f"{found.median:.2f} times the engine's step, so the client or SGLang's HTTP "
                    "process is the limit: raise --stream-interval"
                )
    cold = unique(
        f"{row.workload} {row.backend}: a prompt found {row.cached_tokens} of "
        f"{row.prefix + row.private} tokens in the cache"
        for row in rows
        if row.cached_tokens < row.prefix + row.private
    )
    return lines + cold


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
