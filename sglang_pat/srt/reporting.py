# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's processes export pat's metrics, and under which labels."""

from __future__ import annotations

from sglang_pat.srt.metrics import Reporter
from sglang_pat.stats import Stats


def start_reporter(stats: Stats, *, serving: bool) -> Reporter:
    """Publish ``stats`` from now on, as SGLang publishes its own metrics.

    ``serving``: whether pat runs this server's decode and can pack; exported as the gauge
    ``sglang_pat_serving``. If that changes later: ``Reporter.set_serving``.
    """
    reporter = Reporter(stats, scheduler_labels(), export=exports_metrics())
    reporter.set_serving(serving)
    reporter.start()
    return reporter


def exports_metrics() -> bool:
    """Whether this process exports metrics: by SGLang's rule the first rank of an attention group,
    unless ``--enable-metrics-for-all-schedulers``."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel, options = get_parallel(), get_observability()
    first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
    return bool(options.enable_metrics and (first or options.enable_metrics_for_all_schedulers))


def scheduler_labels() -> dict[str, str]:
    """The labels of SGLang's scheduler metrics in this process, so that both can be joined and
    replicas told apart.

    SGLang builds them inside ``SchedulerMetricsCollector.init_new``, after the backend is made, so
    they are repeated here; ``tests/test_reporting.py`` compares the two.
    """
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
