# SPDX-License-Identifier: Apache-2.0
"""The first runs after a start: what is loaded, compiled or allocated late shows here.

``python -m sglang_pat.bench.serving --first-runs 10`` starts the servers, warms nothing up beyond
what SGLang itself does, and runs each workload so many times in a row on every server. A run is
what ``run_workloads`` measures: flush, put the prefix into the cache, then all requests at once.
Its table has one line a run, so that the first stands beside the tenth.

``--spy`` records the scheduler of every server with py-spy during the first and the last run of a
workload. It prints the functions whose longest single call lasted longer in the first, then what
pat's functions and SGLang's own work on the host take of a decode step in the last (``spy``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.serving import spy
from sglang_pat.bench.serving.client import AnswerTimes, body
from sglang_pat.bench.serving.fleet import Served
from sglang_pat.bench.serving.rows import Counted, counted_fields, unique
from sglang_pat.bench.serving.run import (
    REQUEST_TIMEOUT_S,
    Log,
    RunOptions,
    make_workload_batch,
    prepare,
    rotated,
)
from sglang_pat.bench.serving.timing import TooShort, latencies, longest_gap
from sglang_pat.bench.serving.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow(Counted):
    """One run. Times in milliseconds; a gap is the time between two events of a request."""

    backend: str
    workload: str
    run: int
    prime_ms: float  # to put the prefix into the cache: the server's first prefill, in its run 0
    ttft_p50_ms: float
    ttft_max_ms: float
    itl_p50_ms: float  # a token, while all requests decode
    itl_p99_ms: float
    gap_ms: float  # the longest gap of any request, from its first event on
    gap_token: int  # after so many tokens of that request
    tokens_per_s: float


def run_first(
    fleet: Sequence[Served],
    workloads: Sequence[Workload],
    settings: RunOptions,
    budget: Budget,
    log: Log,
    *,
    spies: Path | None,
) -> None:
    """All runs of the first workload, backend beside backend, then all of the next.

    ``spies``: folder for py-spy's recordings; None makes none.

    Raises:
        RequestError: a request failed.
        FileNotFoundError, ProcessLookupError: see ``spy.recording``.
    """
    for workload in workloads:
        spied: dict[str, list[Path]] = {}  # recordings by backend
        for run in range(settings.runs):
            rows = []
            for served in rotated(fleet, run):
                if not budget.allows(str(workload)):
                    return
                began = time.monotonic()
                path = None
                if spies and run in (0, settings.runs - 1):
                    name = f"spy-{served.backend}-{workload}-{run}.json".replace("*", "of")
                    path = spies / name
                    spied.setdefault(served.backend, []).append(path)
                with _spied(served, path):
                    row = _measure(served, workload, settings, run, log)
                budget.took(str(workload), time.monotonic() - began)
                rows.append((served, row))
            for served, row in rows:
                counted = served.counted()
                if row is not None:
                    fields = counted_fields(counted, settings.kv_bytes_per_token) if counted else {}
                    log.record(asdict(row) | fields)
        for recordings in spied.values():
            print("\n".join(spy.compare(recordings[0], recordings[-1])))
            steps = settings.output_tokens - 1  # the first token is the prefill's
            print("\n".join(spy.of_a_step(recordings[-1], steps, spy.HOST_PARTS)), flush=True)


@contextmanager
def _spied(served: Served, path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with spy.recording(served.server.pid, path):
        yield


def _measure(
    served: Served, workload: Workload, settings: RunOptions, run: int, log: Log
) -> FirstRow | None:
    """One run, or None, with the reason in the log, if there is nothing to measure."""
    batch = make_workload_batch(workload, settings, f"first {run}")
    bodies = [body(p, settings.output_tokens, settings.stream_interval) for p in batch.prompts]
    began = time.perf_counter()
    prepare(served, batch)
    primed = time.perf_counter()
    answers = served.stream(bodies, timeout_s=REQUEST_TIMEOUT_S)
    try:
        return row_of(answers, served.backend, workload, run, 1e3 * (primed - began))
    except TooShort as reason:
        log.leave_out(f"{workload} {served.backend} run {run}", str(reason))
        return None


def row_of(
    answers: Sequence[AnswerTimes], backend: str, workload: Workload, run: int, prime_ms: float
) -> FirstRow:
    """The row of a run. Raises TooShort as ``latencies`` does."""
    found = latencies(answers, together=True)
    gap_ms, gap_token = longest_gap(answers)
    return FirstRow(
        backend=backend,
        workload=str(workload),
        run=run,
        prime_ms=prime_ms,
        ttft_p50_ms=found.ttft_ms,
        ttft_max_ms=1e3 * max(answer.times[0] - answer.sent for answer in answers),
        itl_p50_ms=found.itl_p50_ms,
        itl_p99_ms=found.itl_p99_ms,
        gap_ms=gap_ms,
        gap_token=gap_token,
        tokens_per_s=found.tokens_per_s,
    )


def table(rows: Sequence[FirstRow]) -> list[str]:
    """A line for every run, in the order of the runs, backend after backend."""
    lines = [
        f"{'workload':14} {'backend':12} {'run':>3} {'prime':>8} {'TTFT p50':>9} {'max':>8} "
        f"{'ITL p50':>8} {'p99':>7} {'longest gap':>16} {'tokens/s':>9} {'plans':>6} {'plan us':>8}"
    ]
    keys = unique(f"{row.workload} {row.backend}" for row in rows)
    for key in keys:
        for row in (row for row in rows if f"{row.workload} {row.backend}" == key):
            plans = "-" if row.plans_made is None else f"{row.plans_made}"
            plan_us = "-" if row.plan_us is None else f"{row.plan_us:.0f}"
            lines.append(
                f"{row.workload:14} {row.backend:12} {row.run + 1:3} {row.prime_ms:8.1f} "
                f"{row.ttft_p50_ms:9.1f} {row.ttft_max_ms:8.1f} {row.itl_p50_ms:8.2f} "
                f"{row.itl_p99_ms:7.2f} {row.gap_ms:8.1f} @{row.gap_token:6} "
                f"{row.tokens_per_s:9.0f} {plans:>6} {plan_us:>8}"
            )
    return [*lines, "Times in ms; a gap is between two events of one request, @ its tokens so far."]
