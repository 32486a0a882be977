# SPDX-License-Identifier: Apache-2.0
"""Replays of traces: which requests arrive when, and every backend on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.serving.client import body
from sglang_pat.bench.serving.fleet import Served
from sglang_pat.bench.serving.rows import TraceRow
from sglang_pat.bench.serving.run import (
    REQUEST_TIMEOUT_S,
    WARM_UP_TOKENS,
    Log,
    RunOptions,
    rotated,
    turn,
    warm_up,
)
from sglang_pat.bench.serving.timing import latencies, request_times
from sglang_pat.bench.serving.trace import Segments, arrivals, paths, repeated, tokens

WARM_UP_REQUESTS, WARM_UP_EVERY_S = 16, 0.2


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace at a rate: when each request arrives, in seconds, and its prompt."""

    trace: str
    rate: float
    run: int
    at_s: list[float]
    prompts: list[Segments]

    @property
    def kv_tokens(self) -> int:
        """K/V tokens of all prompts, shared ones counted every time."""
        return sum(length for path in self.prompts for _, length in path)


def replays(traces: Sequence[str], rates: Sequence[float], settings: RunOptions) -> list[Replay]:
    """All replays in order. Raises ValueError as ``trace.paths`` does."""
    return [
        make_replay(name, rate, run, settings)
        for run in range(settings.runs)
        for name in traces
        for rate in rates
    ]


def make_replay(name: str, rate: float, run: int, settings: RunOptions) -> Replay:
    """Of ``duration_s`` seconds of arrivals, the same for every backend; every run has tokens of
    its own. Raises ValueError as ``trace.paths`` does."""
    seed = f"{settings.seed} {run}"
    at_s = arrivals(rate, settings.duration_s, f"{seed} {name} {rate}")
    prompts = paths(
        name,
        len(at_s),
        context=settings.context - settings.output_tokens,
        block=settings.block_tokens,
        file=settings.trace_file,
        seed=seed,
    )
    return Replay(name, rate, run, at_s, prompts)


def run_traces(
    fleet: Sequence[Served],
    todo: Sequence[Replay],
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> None:
    """All backends on each replay, from an empty cache. Raises as ``run_workloads`` does."""
    warm_up_replay(fleet, todo[0], settings, budget)
    for replay in todo:
        kind = f"{replay.trace} {replay.rate}"
        bodies = replay_bodies(replay, settings)
        measure = partial(_replay, replay=replay, bodies=bodies, settings=settings)
        turn(rotated(fleet, replay.run), kind, measure, settings, budget, log)


def warm_up_replay(
    fleet: Sequence[Served], replay: Replay, settings: RunOptions, budget: Budget
) -> None:
    """Some short requests of a replay, one after the other, on every server."""
    bodies = _bodies(replay, settings, WARM_UP_REQUESTS, WARM_UP_TOKENS)
    at_s = [WARM_UP_EVERY_S * i for i in range(len(bodies))]
    warm_up(fleet, bodies, at_s, budget, Served.flush)


def replay_bodies(replay: Replay, settings: RunOptions) -> list[bytes]:
    """All requests of a replay."""
    return _bodies(replay, settings, len(replay.prompts), settings.output_tokens)


def _bodies(replay: Replay, settings: RunOptions, count: int, output_tokens: int) -> list[bytes]:
    """Of the first ``count`` requests."""
    seed = f"{settings.seed} {replay.run}"
    return [
        body(tokens(path, settings.vocab, seed), output_tokens, settings.stream_interval)
        for path in replay.prompts[:count]
    ]


def _replay(
    served: Served, replay: Replay, bodies: Sequence[bytes], settings: RunOptions
) -> TraceRow:
    served.flush()
    timeout_s = settings.duration_s + REQUEST_TIMEOUT_S
    answers = served.stream(bodies, at_s=replay.at_s, timeout_s=timeout_s)
    found = latencies(answers, together=False)
    of_requests = request_times(answers)
    return TraceRow(
        backend=served.backend,
        trace=replay.trace,
        rate=replay.rate,
        run=replay.run,
        requests=len(bodies),
        completed=sum(answer.tokens[-1] == settings.output_tokens for answer in answers),
        repeated=repeated(replay.prompts),
        cached=sum(answer.cached for answer in answers) / replay.kv_tokens,
        ttft_p50_ms=found.ttft_ms,
        ttft_p99_ms=found.ttft_p99_ms,
        tpot_ms=found.tpot_ms,
        tpot_p99_ms=found.tpot_p99_ms,
        ttft_mean_ms=of_requests.ttft_ms,
        e2e_mean_ms=of_requests.e2e_ms,
        e2e_p99_ms=of_requests.e2e_p99_ms,
        first_token=of_requests.first_token,
        itl_p50_ms=found.itl_p50_ms,
        itl_p99_ms=found.itl_p99_ms,
        tokens_per_s=found.tokens_per_s,
    )
