# SPDX-License-Identifier: Apache-2.0
"""The ``sglang_pat_*`` counters, read from a server's Prometheus endpoint."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sglang_pat.stats import LABELLED, NAMESPACE

_FLUSH_S = 1.25  # a server writes its counters about once a second


@dataclass(frozen=True, slots=True)
class Counters:
    """What pat counted since the server's start, or between two readings (see ``__sub__``).

    ``kv_tokens_read`` is what the plans' items read, of one layer and KV head, over all decode
    steps; ``kv_tokens_unpacked`` is the sum of sequence lengths, what an attention that shares
    nothing would read. ``plan_seconds`` is of the steps that made a plan, ``exposed_seconds`` of
    those of them that the GPU waited for, ``host_seconds`` of all steps. ``base_forwards`` counts
    by kind what the stock attention is meant to serve, ``base_layers`` by reason the layers that
    are its own by their kind, ``fallbacks`` by reason what it served, or what was not shared,
    without being meant to.
    """

    decode_steps: int = 0
    verify_steps: int = 0
    packed_steps: int = 0
    branched_steps: int = 0
    kv_tokens_read: int = 0
    kv_tokens_unpacked: int = 0
    plans_made: int = 0
    degraded_plans: int = 0
    hidden_plans: int = 0
    plans_reused: int = 0
    plan_seconds: float = 0.0
    exposed_seconds: float = 0.0
    host_seconds: float = 0.0
    base_forwards: dict[str, int] = field(default_factory=dict)
    base_layers: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)

    def __sub__(self, earlier: Counters) -> Counters:
        """What came since; without the reasons and kinds that stayed."""
        since: dict[str, Any] = {}
        for each in fields(self):
            now, before = getattr(self, each.name), getattr(earlier, each.name)
            is_labelled = isinstance(now, dict)
            since[each.name] = dict(Counter(now) - Counter(before)) if is_labelled else now - before
        return Counters(**since)


def parse_counters(exposition: str) -> Counters:
    """Counters from the text of a ``/metrics`` answer; what is absent there is 0.

    The sums over all label sets: of a server with data parallelism those of all its replicas.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, Any] = asdict(Counters())
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


def read_counters(url: str, *, settle_s: float = 10.0) -> Counters:
    """Counters of the idle server at ``url``, once two readings a flush apart agree.

    Raises:
        TimeoutError: they still change after ``settle_s`` seconds; the server is not idle.
    """
    deadline = time.monotonic() + settle_s
    before = _scrape(url)
    while True:
        time.sleep(_FLUSH_S)
        after = _scrape(url)
        if after == before:
            return after
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the counters of {url} still change after {settle_s:.0f} s; "
                "read them when no request runs"
            )
        before = after


def _scrape(url: str) -> Counters:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return parse_counters(answer.read().decode())
