# SPDX-License-Identifier: Apache-2.0
"""The ``sglang_pat_*`` counters, read from a server's Prometheus endpoint."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from types import SimpleNamespace
from typing import Any

from sglang_pat.stats import COUNTERS, LABELLED, NAMESPACE

FLUSH_S = 1.25  # a server writes its counters about once a second


class Counters(SimpleNamespace):
    """What pat counted since the server's start, or between two readings (see ``__sub__``).

    An attribute for each of ``stats.COUNTERS``, a number, and of ``stats.LABELLED``, numbers by
    kind or reason; what is not given is 0 or empty.
    """

    def __init__(self, **counted: Any) -> None:
        none: dict[str, Any] = dict.fromkeys(COUNTERS, 0) | {name: {} for name in LABELLED}
        super().__init__(**none | counted)

    def __sub__(self, earlier: Counters) -> Counters:
        """What came since; without the reasons and kinds that stayed."""
        since = {}
        for name, now in vars(self).items():
            before = getattr(earlier, name)
            since[name] = dict(Counter(now) - Counter(before)) if name in LABELLED else now - before
        return Counters(**since)


def parse_counters(exposition: str) -> Counters:
    """Counters from the text of a ``/metrics`` answer; what is absent there is 0.

    The sums over all label sets: of a server with data parallelism those of all its replicas.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = vars(Counters())
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            name = sample.name.removeprefix(f"{NAMESPACE}_").removesuffix("_total")
            if sample.name != f"{NAMESPACE}_{name}_total" or name not in found:
                continue
            if name not in LABELLED:
                found[name] += sample.value if name.endswith("_seconds") else int(sample.value)
            elif sample.value:
                reason = sample.labels.get(LABELLED[name][0], "")
                found[name][reason] = found[name].get(reason, 0) + int(sample.value)
    return Counters(**found)


def read_counters(url: str, *, settle_s: float = 10.0, flush_s: float = FLUSH_S) -> Counters:
    """Counters of the idle server at ``url``, once two readings ``flush_s`` seconds apart agree.

    Raises TimeoutError if they still change after ``settle_s`` seconds: the server is not idle.
    """
    deadline = time.monotonic() + settle_s
    before: Counters | None = None
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            after = parse_counters(answer.read().decode())
        if after == before:
            return after
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the counters of {url} still change after {settle_s:.0f} s; "
                "read them when no request runs"
            )
        before = after
        time.sleep(flush_s)
