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

from sglang_pat.bench.serving.curves import Point
from sglang_pat.bench.serving.rows import Spread, unique
from sglang_pat.bench.serving.timing import FIRST_TOKEN_PARTS, LATE_PERCENT


def first_token_table(rows: Sequence[Point]) -> list[str]:
    """For every subject, load and backend, medians over the runs; nothing if no row has them."""
    names = [*FIRST_TOKEN_PARTS, *(f"late_{name}" for name in FIRST_TOKEN_PARTS)]
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
    heads = "".join(f"{name:>9}" for name in FIRST_TOKEN_PARTS)
    return [
        "",
        f"time to the first token by parts, means in ms: of all, then of the latest "
        f"{100 - LATE_PERCENT} %",
        f"{'':13} {'':>15} {'':12}{heads}{heads}",
        *lines,
    ]
