# SPDX-License-Identifier: Apache-2.0
"""Runs: which backend does what, when, and when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from benchmarks.common.budget import Budget
from benchmarks.serving.client import body
from benchmarks.serving.fleet import Served
from benchmarks.serving.rows import Counted, WorkloadRow, counted_fields
from benchmarks.serving.timing import TooShort, latencies, step_ms
from benchmarks.serving.workload import RunPrompts, Workload, make_prompts

REQUEST_TIMEOUT_S = 300.0
WARM_UP_TOKENS = 16


class Log(Protocol):
    """Where runs go."""

    def record(self, row: dict[str, Any]) -> None:
        """Keep a row, and write all of them."""

    def leave_out(self, run: str, reason: str) -> None:
        """Keep that a run could not be measured; the others go on."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is the same for all backends. Rates are in requests/s."""

    vocab: int
    kv_bytes_per_token: int
    new_tokens: int
    output_tokens: int
    stream_interval: int
    runs: int
    seed: int
    duration_s: float  # of agents' turns


T = TypeVar("T")


def rotated(fleet: Sequence[T], by: int) -> list[T]:
    """The servers in another order for every run, so that none is always first."""
    by %= len(fleet)
    return [*fleet[by:], *fleet[:by]]


def run_workloads(
    fleet: Sequence[Served],
    workloads: Sequence[Workload],
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> None:
    """All backends on a workload, one after the other, then the next workload, then all again.

    Raises:
        RequestError: a request failed.
    """
    largest = max(workloads, key=lambda workload: workload.requests)
    batch = make_workload_batch(largest, settings, "warm-up")
    bodies = [body(p, WARM_UP_TOKENS, settings.stream_interval) for p in batch.prompts]
    warm_up(fleet, bodies, budget, lambda served: prepare(served, batch))
    for run in range(settings.runs):
        for workload in workloads:
            kind = str(workload)
            batch = make_workload_batch(workload, settings, str(run))
            bodies = [
                body(prompt, settings.output_tokens, settings.stream_interval)
                for prompt in batch.prompts
            ]
            measure = partial(_measure, workload=workload, batch=batch, bodies=bodies, run=run)
            turn(rotated(fleet, run), kind, measure, settings, budget, log)


def warm_up(
    fleet: Sequence[Served],
    bodies: Sequence[bytes],
    budget: Budget,
    prepare: Callable[[Served], None],
) -> None:
    """Requests to every server that no row counts: kernels are compiled at their first use."""
    for served in fleet:
        if budget.allows("warm-up"):
            began = time.monotonic()
            prepare(served)
            served.stream(bodies, timeout_s=REQUEST_TIMEOUT_S)
            served.counted()
            budget.took("warm-up", time.monotonic() - began)


def make_workload_batch(workload: Workload, settings: RunOptions, name: str) -> RunPrompts:
    """The requests of the run ``name``, the same for every backend."""
    seed = f"{settings.seed} {workload} {name}"
    return make_prompts(workload, new=settings.new_tokens, vocab=settings.vocab, seed=seed)


def prepare(served: Served, batch: RunPrompts) -> None:
    """An empty prefix cache, then what ``batch`` wants in it."""
    served.flush()
    for level in batch.prime:
        served.prime(level)


def _measure(
    served: Served,
    workload: Workload,
    batch: RunPrompts,
    bodies: Sequence[bytes],
    run: int,
) -> WorkloadRow:
    prepare(served, batch)
    before = served.step_notes()
    answers = served.stream(bodies, timeout_s=REQUEST_TIMEOUT_S)
    after = served.step_notes()
    found = latencies(answers)
    return WorkloadRow(
        backend=served.backend,
        workload=str(workload),
        groups=workload.groups,
        per_group=workload.per_group,
        prefix=workload.prefix,
        private=workload.private,
        run=run,
        itl_p50_ms=found.itl_p50_ms,
        itl_p99_ms=found.itl_p99_ms,
        tpot_ms=found.tpot_ms,
        ttft_ms=found.ttft_ms,
        tokens_per_s=found.tokens_per_s,
        step_ms=step_ms(before, after, workload.requests),
        cached_tokens=min(answer.cached for answer in answers),
    )


def turn(
    fleet: Sequence[Served],
    kind: str,
    measure: Callable[[Served], Counted],
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> None:
    """One run on each server. pat's counters appear late, so they complete the rows at the end."""
    rows: list[tuple[Served, dict[str, Any]]] = []
    for served in fleet:
        if not budget.allows(kind):
            break
        began = time.monotonic()
        try:
            row = asdict(measure(served))
        except TooShort as reason:
            row = {}
            log.leave_out(f"{kind} {served.backend}", str(reason))
        else:
            log.record(row)
        budget.took(kind, time.monotonic() - began)
        rows.append((served, row))
    for served, row in rows:
        if counted := served.counted():
            row.update(counted_fields(counted, settings.kv_bytes_per_token))
