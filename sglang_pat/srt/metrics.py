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
        self._metrics = _make_metrics(tuple(labels)) if export else {}
        self._exported: dict[tuple[str, ...], float] = {}
        self._add("fallbacks", {LABELLED["fallbacks"][0]: NO_REASON}, 0)

    def set_serving(self, serving: bool) -> None:
        if self._metrics:
            self._metrics["serving"].labels(**self._labels).set(int(serving))

    def flush(self) -> None:
        """Add what came since the last call to the exported counters."""
        snapshot = self._stats.snapshot()
        for name in COUNTERS:
            self._add(name, {}, snapshot[name])
        for name, (label, _) in LABELLED.items():
            for kind, count in snapshot[name].items():
                self._add(name, {label: kind}, count)

    def _add(self, name: str, label: dict[str, str], value: float) -> None:
        if not self._metrics:
            return
        key = (name, *label.values())
        counter = self._metrics[name].labels(**(self._labels | label))
        counter.inc(value - self._exported.get(key, 0))
        self._exported[key] = value

    def _run(self) -> None:
        """Publish from now on, once a second."""
        steps, summarized, failed = 0, time.monotonic(), False
        while True:
            time.sleep(FLUSH_SECONDS)
            try:
                self.flush()
            except Exception:  # a full disk under prometheus's files, say: the next second may do
                if not failed:
                    logger.exception("sglang_pat: counters were not exported; tries again")
                failed = True
            else:
                failed = False
            now = time.monotonic()
            if now - summarized >= SUMMARY_SECONDS and self._stats.steps_asked_for > steps:
                steps, summarized = self._stats.steps_asked_for, now
                logger.info("sglang_pat since its start: %s", self._stats.summary())


@lru_cache
def _make_metrics(labels: tuple[str, ...]) -> dict[str, Any]:
    """What is exported. Prometheus knows each once per process, however many backends."""
    # Imported here: it must come after SGLang has set PROMETHEUS_MULTIPROC_DIR.
    from prometheus_client import Counter, Gauge

    metrics: dict[str, Any] = {
        name: Counter(f"{NAMESPACE}_{name}", text, labels) for name, text in COUNTERS.items()
    }
    for name, (label, text) in LABELLED.items():
        # An operator's extra label may have the name of ours, which then goes before it.
        names = tuple(dict.fromkeys((*labels, label)))
        metrics[name] = Counter(f"{NAMESPACE}_{name}", text, names)
    # Ranks differ in their labels. Of a rank that was started again the newest value counts, and
    # one that prometheus_client's mark_process_dead() was told of is forgotten.
    metrics["serving"] = Gauge(
        f"{NAMESPACE}_serving", SERVING, labels, multiprocess_mode="livemostrecent"
    )
    return metrics


def start_reporter(stats: Stats, *, serving: bool) -> Reporter:
    """Publish ``stats`` from now on, as SGLang publishes its own metrics. ``serving``: whether pat
    runs this server's decode and can pack."""
    reporter = Reporter(stats, scheduler_labels(), export=exports_metrics())
    reporter.set_serving(serving)
    threading.Thread(target=reporter._run, name="sglang-pat-stats", daemon=True).start()
    return reporter


def exports_metrics() -> bool:
    """Whether this process exports metrics: by SGLang's rule the first rank of an attention group,
    unless ``--enable-metrics-for-all-schedulers``."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel, options = get_parallel(), get_observability()
    first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
    return bool(options.enable_metrics and (first or options.enable_metrics_for_all_schedulers))


def scheduler_labels() -> dict[str, str]:
    """The labels of SGLang's scheduler metrics in this process, so that both can be joined. SGLang
    builds them after the backend is made (``SchedulerMetricsCollector.init_new``), so they are
    repeated here."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import (
        get_disagg,
        get_observability,
        get_parallel,
        get_schedule,
        get_serving,
    )

    parallel, disaggregation = get_parallel(), get_disagg()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": (
            "dynamic"  # the role may change, the series must not
            if disaggregation.enable_pd_role_switch
            else DisaggregationMode.to_engine_type(disaggregation.disaggregation_mode)
        ),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if get_schedule().enable_priority_scheduling:
        labels["priority"] = ""
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(get_observability().extra_metric_labels or {})
    return {name: str(value) for name, value in labels.items()}
