# SPDX-License-Identifier: Apache-2.0
"""One probe of a capacity: what of it counts, and when it breaks a limit.

TPOT is a request's time from its first event to its last over the tokens behind the first; p99 is
over requests. Of agents those count that were sent after every agent's first answer had begun; what
still runs when the time is up is cut off. Of a trace all arrivals count; after the last one there
is a grace of the output tokens at the loosest limit, then the rest is cut off. What was cut off
counts as far as it came if that is ``CUT_TOKENS`` or more: without it the slower of two backends
would be judged by its short answers alone.

A probe also breaks a limit if fewer than ``KEPT_UP`` of the requests had begun when the time was
up, but for those of the last ``DUE_S`` seconds, or, of a trace, had ended after the grace: while a
queue grows, TPOT may stay short. Times to the first token are of the requests that began, so they
are too short where few did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pat.bench.serving.agents import OUTPUT_TOKENS
from sglang_pat.bench.serving.client import AnswerTimes
from sglang_pat.bench.serving.rows import Counted
from sglang_pat.bench.serving.timing import request_times, tokens_between

AGENTS, REQUESTS_PER_S = "agents", "requests/s"  # units of loads
CUT_TOKENS = OUTPUT_TOKENS[0]  # of the shortest turn of an agent
DUE_S = 0.5  # that a request may wait when the time is up without being late
KEPT_UP = 0.9  # the least fraction of requests that begin, and end, in time
LEAST_REQUESTS = 100  # with fewer a 99th percentile is one of the two slowest requests


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow(Counted):
    """One probe. Times are None if no request had them."""

    backend: str
    subject: str  # what was served: a team without its agents, or a trace
    unit: str  # of the load
    load: float
    probe: int
    window_s: float  # in which requests were sent
    requests: int  # that the TPOTs are of
    begun: float  # fraction that had begun when the window closed, of those sent DUE_S before
    ended: float | None  # fraction that ended after the grace or before; None: it was not waited
    tpot_ms: float | None  # mean
    tpot_p99_ms: float | None
    ttft_mean_ms: float | None
    ttft_p99_ms: float | None
    e2e_mean_ms: float | None
    e2e_p99_ms: float | None
    tokens_per_s: float
    first_token: dict[str, float] | None = None  # by parts, see first_token.py


def broken(row: CapacityRow, limit_ms: float) -> str | None:
    """How the probe broke the limit; None if it held it."""
    if row.tpot_p99_ms is None:
        return "no request was sent, began and came far enough in time"
    if row.tpot_p99_ms >= limit_ms:
        return f"p99 TPOT {row.tpot_p99_ms:.1f} ms"
    if row.window_s <= DUE_S:  # so that ``begun`` is of no request
        return f"the load was there for the last {row.window_s:.2f} s only"
    if row.begun < KEPT_UP:
        return f"only {row.begun:.0%} had begun"
    if row.ended is not None and row.ended < KEPT_UP:
        return f"only {row.ended:.0%} ended in time"
    return None


def row_of(
    answers: Sequence[AnswerTimes],
    begin: float,
    close: float,
    *,
    backend: str,
    subject: str,
    unit: str,
    load: float,
    probe: int,
    grace_s: float | None,
) -> CapacityRow:
    """A row from the answers to the requests sent within [begin, close] seconds of their clock.
    ``grace_s``: for which answers were waited for after that; None if they were cut off."""
    found = request_times(
        answers, begin, close, grace_s=grace_s or 0.0, due_s=DUE_S, cut_tokens=CUT_TOKENS
    )
    return CapacityRow(
        backend=backend,
        subject=subject,
        unit=unit,
        load=load,
        probe=probe,
        window_s=close - begin,
        requests=found.tpots,
        begun=found.begun,
        ended=None if grace_s is None else found.ended,
        tpot_ms=found.tpot_ms,
        tpot_p99_ms=found.tpot_p99_ms,
        ttft_mean_ms=found.ttft_ms,
        ttft_p99_ms=found.ttft_p99_ms,
        e2e_mean_ms=found.e2e_ms,
        e2e_p99_ms=found.e2e_p99_ms,
        tokens_per_s=tokens_between(answers, begin, close) / max(close - begin, 1e-9),
        first_token=found.first_token,
    )
