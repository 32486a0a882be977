# SPDX-License-Identifier: Apache-2.0
"""Where the time to the first token goes, by the clocks of SGLang's scheduler.

``--enable-metrics`` makes SGLang write into each answer when its scheduler began the prefill of the
request, and when it had the result. With the client's own clock these divide the time to the first
token into three parts, one after the other:

``waiting``: from sending until the prefill begins: HTTP, and the queue, where a request waits for
the running step to end, and for room.
``prefill``: until the scheduler has the result, with the decode steps between the chunks of a long
prompt.
``delivery``: until the first event is here: detokenizer, HTTP, and this client.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from sglang_pat.bench.serving.client import AnswerTimes
from sglang_pat.bench.serving.curves import Point
from sglang_pat.bench.serving.rows import Spread, unique

PARTS = ("waiting", "prefill", "delivery")
LATE_PERCENT = 95  # of the times to the first token: those from there on are late


def first_token_ms(answers: Sequence[AnswerTimes]) -> dict[str, float] | None:
    """Means of the parts in milliseconds, by name, over all answers that have begun, and as
    ``late_...`` over those of them whose first token was late. None if the server does not say."""
    known = [answer for answer in answers if answer.times and answer.prefill]
    if not known:
        return None
    totals = [answer.times[0] - answer.sent for answer in known]
    limit = np.percentile(totals, LATE_PERCENT)
    late = [answer for answer, total in zip(known, totals, strict=True) if total >= limit]
    return _means(known) | {f"late_{name}": mean for name, mean in _means(late).items()}


def _means(answers: Sequence[AnswerTimes]) -> dict[str, float]:
    edges = [(a.sent, *(a.prefill or ()), a.times[0]) for a in answers]
    return {
        name: 1e3 * fmean(edge[i + 1] - edge[i] for edge in edges) for i, name in enumerate(PARTS)
    }


def first_token_table(rows: Sequence[Point]) -> list[str]:
    """For every subject, load and backend, medians over the runs; nothing if no row has them."""
    names = [*PARTS, *(f"late_{name}" for name in PARTS)]
    lines = []
    for key in dict.fromkeys((row.subject, row.load, row.unit) for row in rows):
        of_load = [row for row in rows if (row.subject, row.load, row.unit) == key]
        for backend in unique(row.backend for row in of_load):
            parts = [row.first_token for row in of_load if row.backend == backend]
            found = [Spread.of(each[name] for each in parts if each) for name in names]
            if all(found):
                subject, load, unit = key
                cells = "".join(f"{each.median:9.1f}" for each in found if each)
                lines.append(f"{subject:13} {f'{load:g} {unit}':>15} {backend:12}{cells}")
    if not lines:
        return []
    heads = "".join(f"{name:>9}" for name in PARTS)
    return [
        "",
        f"time to the first token by parts, means in ms: of all, then of the latest "
        f"{100 - LATE_PERCENT} %",
        f"{'':13} {'':>15} {'':12}{heads}{heads}",
        *lines,
    ]
