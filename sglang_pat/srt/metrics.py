# SPDX-License-Identifier: Apache-2.0
"""Counters on SGLang's Prometheus endpoint, and a periodic line in the log.

SGLang runs ``prometheus_client`` in its multi-process mode: each process writes its counters to
files that the HTTP server adds up. A thread copies ours there once a second, so that a decode step
pays for integer additions only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sglang_pat.stats import COUNTERS, LABELLED, NAMESPACE, Stats

logger = logging.getLogger("sglang_pat")

FLUSH_SECONDS = 1.0
SUMMARY_SECONDS = 60.0
# The reason of a series of fallbacks that is always 0. Without it, a sum over all reasons would
# have no value before the first fallback.
NO_REASON = "none"
SERVING = "1: pat runs this server's decode and can pack; 0: SGLang's own attention runs it."


class Reporter:
    """Publishes one ``Stats``. ``labels`` go on every exported metric; nothing is exported without
    ``export``."""

    def __init__(self, stats: Stats, labels: Mapping[str, str], *, export: bool) -> None:
        self._stats = stats
        self._labels = dict(labels)
        self._counters = _make_counters(tuple(labels)) if export else {}
        self._serving = _make_gauge(tuple(labels)).labels(**labels) if export else None
        self._exported: dict[tuple[str, ...], float] = {}
        self._add("fallbacks", {LABELLED["fallbacks"][0]: NO_REASON}, 0)

    def start(self) -> None:
        """Publish from now on, once a second, from a thread that ends with the process."""
        threading.Thread(target=self._run, name="sglang-pat-stats", daemon=True).start()

    def set_serving(self, serving: bool) -> None:
        """Say whether pat runs this server's decode and can pack."""
        if self._serving is not None:
            self._serving.set(int(serving))

    def flush(self) -> None:
        """Add what came since the last call to the exported counters."""
        snapshot = self._stats.snapshot()
        for name in COUNTERS:
            self._add(name, {}, snapshot[name])
        for name, (label, _) in LABELLED.items():
            for kind, count in snapshot[name].items():
                self._add(name, {label: kind}, count)

    def _add(self, name: str, label: dict[str, str], value: float) -> None:
        if name not in self._counters:
            return
        key = (name, *label.values())
        counter = self._counters[name].labels(**(self._labels | label))
        counter.inc(value - self._exported.get(key, 0))
        self._exported[key] = value

    def _run(self) -> None:
        steps, summarized = 0, time.monotonic()
        while True:
            time.sleep(FLUSH_SECONDS)
            self.flush()
            now = time.monotonic()
            if now - summarized >= SUMMARY_SECONDS and self._stats.steps_asked_for > steps:
                steps, summarized = self._stats.steps_asked_for, now
                logger.info("sglang_pat since its start: %s", self._stats.summary())


@lru_cache
def _make_counters(labels: tuple[str, ...]) -> dict[str, Any]:
    """The exported counters. Prometheus knows each once per process, however many backends."""
    # Imported here: it must come after SGLang has set PROMETHEUS_MULTIPROC_DIR.
    from prometheus_client import Counter

    counters = {
        name: Counter(f"{NAMESPACE}_{name}", text, labels) for name, text in COUNTERS.items()
    }
    for name, (label, text) in LABELLED.items():
        # An operator's extra label may have the name of ours, which then goes before it.
        names = tuple(dict.fromkeys((*labels, label)))
        counters[name] = Counter(f"{NAMESPACE}_{name}", text, names)
    return counters


@lru_cache
def _make_gauge(labels: tuple[str, ...]) -> Any:
    from prometheus_client import Gauge

    # Ranks differ in their labels. Of a rank that was started again the newest value counts, and
    # one that prometheus_client's mark_process_dead() was told of is forgotten.
    return Gauge(f"{NAMESPACE}_serving", SERVING, labels, multiprocess_mode="livemostrecent")
