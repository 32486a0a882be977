# SPDX-License-Identifier: Apache-2.0
"""Latencies of answers, from when their tokens came. Milliseconds throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.serving.client import AnswerTimes


class TooShort(RuntimeError):
    """A run has no time, or no interval, to measure."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one run. ITL: inter-token latency; an event of several tokens counts as one interval of
    the mean time per token. TPOT: time per output token after a request's first event."""

    itl_p50_ms: float
    itl_p99_ms: float
    tpot_ms: float  # mean over requests
    ttft_ms: float  # median
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


def latencies(answers: Sequence[AnswerTimes]) -> Latencies:
    """Inter-token latencies only while all requests decode.

    Raises:
        TooShort: there is no interval to measure.
    """
    intervals = intervals_ms(answers, *window(answers))
    if not intervals:
        raise TooShort("no interval between tokens was seen; ask for more output tokens")
    tpots = [
        1e3 * (answer.times[-1] - answer.times[0]) / (answer.tokens[-1] - answer.tokens[0])
        for answer in answers
        if answer.tokens[-1] > answer.tokens[0]
    ]
    ttfts = [1e3 * (answer.times[0] - answer.sent) for answer in answers]
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    return Latencies(
        itl_p50_ms=_percentile(intervals, 50),
        itl_p99_ms=_percentile(intervals, 99),
        tpot_ms=float(np.mean(tpots)),
        ttft_ms=_percentile(ttfts, 50),
        tokens_per_s=sum(answer.tokens[-1] for answer in answers) / seconds,
    )


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
