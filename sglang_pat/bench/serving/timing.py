# SPDX-License-Identifier: Apache-2.0
"""Latencies of answers, from when their tokens came. Milliseconds throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from sglang_pat.bench.serving.client import AnswerTimes

# Of the time to the first token, one after the other: see first_token.py.
FIRST_TOKEN_PARTS = ("waiting", "prefill", "delivery")
LATE_PERCENT = 95  # of the times to the first token: those from there on are late


class TooShort(RuntimeError):
    """A run has no time, or no interval, to measure."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one run. ITL: inter-token latency; an event of several tokens counts as one interval of
    the mean time per token. TPOT: time per output token after a request's first event."""

    itl_p50_ms: float
    itl_p99_ms: float
    tpot_ms: float  # mean over requests
    tpot_p99_ms: float
    ttft_ms: float  # median
    ttft_p99_ms: float
    tokens_per_s: float  # output tokens, from the first request sent to the last token


def window(answers: Sequence[AnswerTimes]) -> tuple[float, float]:
    """When all requests decode: from the last first token to the first last one.

    Raises:
        TooShort: there is no such time; the answers are too short.
    """
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    if begin >= end:
        raise TooShort(
            f"no time at which all {len(answers)} requests decode: the first ends "
            f"{1e3 * (begin - end):.0f} ms before the last begins; ask for more output tokens"
        )
    return begin, end


def intervals_ms(
    answers: Sequence[AnswerTimes], begin: float = -np.inf, end: float = np.inf
) -> list[float]:
    """Milliseconds per token of every interval that lies within [begin, end] seconds."""
    found = []
    for answer in answers:
        events = list(zip(answer.times, answer.tokens, strict=True))
        for (start, before), (stop, after) in pairwise(events):
            if begin <= start and stop <= end and after > before:
                found.append(1e3 * (stop - start) / (after - before))
    return found


def tokens_between(answers: Sequence[AnswerTimes], begin: float, end: float) -> int:
    """Output tokens that arrived after ``begin`` and until ``end``, in seconds."""
    return sum(
        after - before
        for answer in answers
        for at, before, after in zip(answer.times, [0, *answer.tokens], answer.tokens, strict=False)
        if begin < at <= end
    )


def longest_gap(answers: Sequence[AnswerTimes]) -> tuple[float, int]:
    """The longest time between two events of a request, in milliseconds, and after how many tokens
    of the request it began. Prefills of other requests count, so a stall of the server shows.

    Raises:
        TooShort: no request has two events.
    """
    gaps = [
        (1e3 * (stop - start), count)
        for answer in answers
        for (start, stop), count in zip(pairwise(answer.times), answer.tokens, strict=False)
    ]
    if not gaps:
        raise TooShort("no interval between tokens was seen; ask for more output tokens")
    return max(gaps)


def latencies(answers: Sequence[AnswerTimes], *, together: bool) -> Latencies:
    """``together``: inter-token latencies only while all requests decode.

    Raises:
        TooShort: there is no interval to measure.
    """
    intervals = intervals_ms(answers, *(window(answers) if together else ()))
    if not intervals:
        raise TooShort("no interval between tokens was seen; ask for more output tokens")
    tpots = _tpots_ms(answers)
    ttfts = [1e3 * (answer.times[0] - answer.sent) for answer in answers]
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    return Latencies(
        itl_p50_ms=_percentile(intervals, 50),
        itl_p99_ms=_percentile(intervals, 99),
        tpot_ms=float(np.mean(tpots)),
        tpot_p99_ms=_percentile(tpots, 99),
        ttft_ms=_percentile(ttfts, 50),
        ttft_p99_ms=_percentile(ttfts, 99),
        tokens_per_s=sum(answer.tokens[-1] for answer in answers) / seconds,
    )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Of the requests that were sent in a window: means and 99th percentiles over requests. TPOT:
    from a request's first event to its last over the tokens behind the first; end to end: from
    sending to the last event. None: no request has that time."""

    sent: int
    begun: float  # fraction of those sent ``due_s`` before it closed that had a token then
    ended: float  # fraction that ended until the grace behind it was over
    tpots: int  # requests that the TPOTs are of
    tpot_ms: float | None
    tpot_p99_ms: float | None
    ttft_ms: float | None
    ttft_p99_ms: float | None
    e2e_ms: float | None
    e2e_p99_ms: float | None
    first_token: dict[str, float] | None  # ``first_token_ms``


def request_times(
    answers: Sequence[AnswerTimes],
    begin: float = -np.inf,
    close: float = np.inf,
    *,
    grace_s: float = 0.0,
    due_s: float = 0.0,
    cut_tokens: int | None = None,
) -> RequestTimes:
    """Of the requests sent within [begin, close] seconds. TPOT and end-to-end time are of those
    that ended ``grace_s`` after ``close`` or before, TTFT of those that began at all. Whoever was
    sent less than ``due_s`` before ``close`` need not have begun.

    ``cut_tokens``: TPOT also counts, as far as they came, requests that were cut off with so many
    tokens or more. Long and slow requests are the first to be cut off, so a 99th percentile
    without them would be one of the short and fast.
    """
    sent = [answer for answer in answers if begin <= answer.sent <= close]
    ended = [a for a in sent if a.whole and a.times[-1] <= close + grace_s]
    due = [a for a in sent if a.sent <= close - due_s]
    cut = [a for a in sent if not a.whole and a.times] if cut_tokens is not None else []
    decoded = ended + [a for a in cut if a.tokens[-1] >= (cut_tokens or 0)]
    ttfts = [1e3 * (a.times[0] - a.sent) for a in sent if a.times]
    e2es = [1e3 * (a.times[-1] - a.sent) for a in ended]
    tpots = _tpots_ms(decoded)
    return RequestTimes(
        sent=len(sent),
        begun=sum(bool(a.times) and a.times[0] <= close for a in due) / max(len(due), 1),
        ended=len(ended) / max(len(sent), 1),
        tpots=len(tpots),
        tpot_ms=float(np.mean(tpots)) if tpots else None,
        tpot_p99_ms=_percentile(tpots, 99) if tpots else None,
        ttft_ms=float(np.mean(ttfts)) if ttfts else None,
        ttft_p99_ms=_percentile(ttfts, 99) if ttfts else None,
        e2e_ms=float(np.mean(e2es)) if e2es else None,
        e2e_p99_ms=_percentile(e2es, 99) if e2es else None,
        first_token=first_token_ms(sent),
    )


def first_token_ms(answers: Sequence[AnswerTimes]) -> dict[str, float] | None:
    """Means of the parts in milliseconds, by name, over all answers that have begun, and as
    ``late_...`` over those of them whose first token was late. None if the server does not say."""
    known = [answer for answer in answers if answer.times and answer.prefill]
    if not known:
        return None
    totals = [answer.times[0] - answer.sent for answer in known]
    limit = _percentile(totals, LATE_PERCENT)
    late = [answer for answer, total in zip(known, totals, strict=True) if total >= limit]
    return _part_means(known) | {f"late_{name}": mean for name, mean in _part_means(late).items()}


def _part_means(answers: Sequence[AnswerTimes]) -> dict[str, float]:
    edges = [(a.sent, *(a.prefill or ()), a.times[0]) for a in answers]
    parts = zip(*([end - start for start, end in pairwise(each)] for each in edges), strict=True)
    return {name: 1e3 * fmean(part) for name, part in zip(FIRST_TOKEN_PARTS, parts, strict=True)}


def _tpots_ms(answers: Sequence[AnswerTimes]) -> list[float]:
    """Of the answers with more than one event."""
    return [
        1e3 * (answer.times[-1] - answer.times[0]) / (answer.tokens[-1] - answer.tokens[0])
        for answer in answers
        if answer.tokens[-1] > answer.tokens[0]
    ]


def step_ms(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], requests: int
) -> float | None:
    """The engine's own time per decode step of ``requests`` requests; None if it noted none.

    SGLang's scheduler notes by batch size, every ``--decode-log-interval`` steps, the mean time
    since it last did. The first note of a run holds the prefill and the idle time before it, too,
    and is left out; of the others this is the median.
    """
    size = str(requests)
    notes = list(after.get(size, ()))[len(before.get(size, ())) :]
    rest = notes[1:] or notes
    return 1e3 * float(np.median(rest)) if rest else None


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
