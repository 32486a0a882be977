# SPDX-License-Identifier: Apache-2.0
"""The ``sglang_pat_*`` counters, read from a server's Prometheus endpoint."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from sglang_pat.stats import COUNTERS, LABELLED, NAMESPACE

_PREFIX = f"{NAMESPACE}_"
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

    def __add__(self, other: Counters) -> Counters:
        """Of two servers together."""
        numbers: dict[str, Any] = {
            name: getattr(self, name) + getattr(other, name) for name in COUNTERS
        }
        return Counters(
            **numbers,
            base_forwards=dict(Counter(self.base_forwards) + Counter(other.base_forwards)),
            base_layers=dict(Counter(self.base_layers) + Counter(other.base_layers)),
            fallbacks=dict(Counter(self.fallbacks) + Counter(other.fallbacks)),
        )

    def __sub__(self, earlier: Counters) -> Counters:
        numbers: dict[str, Any] = {
            name: getattr(self, name) - getattr(earlier, name) for name in COUNTERS
        }
        return Counters(
            **numbers,
            base_forwards=_grown(self.base_forwards, earlier.base_forwards),
            base_layers=_grown(self.base_layers, earlier.base_layers),
            fallbacks=_grown(self.fallbacks, earlier.fallbacks),
        )


def _grown(now: dict[str, int], earlier: dict[str, int]) -> dict[str, int]:
    """What came to each count; without those that stayed."""
    return {
        name: count - earlier.get(name, 0)
        for name, count in now.items()
        if count > earlier.get(name, 0)
    }


def parse_counters(exposition: str) -> Counters:
    """Counters from the text of a ``/metrics`` answer; what is absent there is 0.

    The sums over all label sets: of a server with data parallelism those of all its replicas.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: defaultdict[str, float] = defaultdict(float)
    labelled: dict[str, defaultdict[str, int]] = {name: defaultdict(int) for name in LABELLED}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if not sample.name.startswith(_PREFIX) or not sample.name.endswith("_total"):
                continue
            name = sample.name[len(_PREFIX) : -len("_total")]
            if name in LABELLED:
                label, _ = LABELLED[name]
                if not sample.value:
                    continue  # nothing was counted under it
                labelled[name][sample.labels.get(label, "")] += int(sample.value)
            else:
                totals[name] += sample.value
    numbers: dict[str, Any] = {
        name: totals[name] if name.endswith("_seconds") else int(totals[name]) for name in COUNTERS
    }
    return Counters(
        **numbers,
        base_forwards=dict(labelled["base_forwards"]),
        base_layers=dict(labelled["base_layers"]),
        fallbacks=dict(labelled["fallbacks"]),
    )


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
