# SPDX-License-Identifier: Apache-2.0
"""What is exported to Prometheus, under which labels, and that processes do not blur each other."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit import forks
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sglang.srt import runtime_context
from sglang.srt.observability import metrics_collector
from sglang.srt.runtime_context import SpawnRanks
from sglang.srt.server_args import ServerArgs

from sglang_pat.demo.counters import parse_counters
from sglang_pat.srt import metrics
from sglang_pat.srt.metrics import exports_metrics, scheduler_labels
from sglang_pat.stats import Stats


@pytest.fixture
def published() -> Iterator[None]:
    """SGLang's configuration as a scheduler publishes it."""
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        args = ServerArgs(model_path="dummy", device="cpu", served_model_name="a-model")
        ranks = SpawnRanks(world_rank=0)
        context = runtime_context.create_context(args, role="scheduler", ranks=ranks)
    with runtime_context.use_context(context):
        yield


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"dp_rank": 3}},
        {"disagg": {"disaggregation_mode": "decode"}},
        {"disagg": {"enable_pd_role_switch": True}},
        {"schedule": {"enable_priority_scheduling": True}},
        {"observability": {"extra_metric_labels": {"cell": "b"}}},
    ],
)
def test_labels_are_those_of_sglangs_scheduler(
    published: None, changes: dict[str, dict[str, Any]]
) -> None:
    """As it gives them to its collector."""
    collector = mock.Mock()
    with ExitStack() as overrides:
        overrides.enter_context(runtime_context.get_observability().override(enable_metrics=True))
        for space, values in changes.items():
            bag = getattr(runtime_context, f"get_{space}")()
            overrides.enter_context(bag.override(**values))
        resolve = mock.patch.object(metrics_collector, "resolve_collector_class")
        overrides.enter_context(resolve).return_value = collector
        metrics_collector.SchedulerMetricsCollector.init_new(
            server_args=runtime_context.get_server_args(),
            enable_priority_scheduling="schedule" in changes,
            enable_lora=False,
            enable_hierarchical_cache=False,
        )
        labels = scheduler_labels()
    sglangs = collector.call_args.kwargs["labels"].items()
    assert labels == {name: str(value) for name, value in sglangs}
    assert labels["model_name"] == "a-model"


@pytest.mark.parametrize(
    ("metrics", "all_ranks", "tp_rank", "exported"),
    [
        (False, False, 0, False),
        (True, False, 0, True),
        (True, False, 1, False),
        (True, True, 1, True),
        (False, True, 1, False),
    ],
)
def test_ranks_export_as_sglangs_do(
    published: None, metrics: bool, all_ranks: bool, tp_rank: int, exported: bool
) -> None:
    options = {"enable_metrics": metrics, "enable_metrics_for_all_schedulers": all_ranks}
    ranks = {"tp_size": 2, "moe_tp_size": 2, "attn_tp_size": 2, "tp_rank": tp_rank}
    with (
        runtime_context.get_observability().override(**options),
        runtime_context.get_parallel().override(**ranks, attn_tp_rank=tp_rank),
    ):
        assert exports_metrics() is exported


# Processes of a server. Each says whether it serves, and adds 5 decode steps.

_PROCESS = """
import sys
from sglang_pat.srt.metrics import Reporter
from sglang_pat.stats import Stats

serving, *labels = sys.argv[1:]
stats = Stats()
reporter = Reporter(stats, dict(label.split("=") for label in labels), export=True)
for one in serving:
    reporter.set_serving(one == "1")
stats.decode_steps = 5
stats.fall_back("a reason")
for _ in range(2):
    reporter.flush()
"""


def test_each_rank_is_a_series_of_its_own(tmp_path: Path) -> None:
    """Of a rank that was started again the gauge is that of the newest process: the older one's
    neither stays beside it nor is added to it. Fallbacks are 0 before the first, so that their sum
    is there to alert on; an operator's label of the name of ours does not displace it."""
    (tmp_path / "process_of_a_server.py").write_text(_PROCESS)
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} | forks.search_path(tmp_path)
    for arguments in (
        ("1", "dp_rank=0"),
        ("0", "dp_rank=1"),
        ("10", "dp_rank=0"),
        ("1", "dp_rank=2", "reason=none"),
    ):
        program = ["process_of_a_server", *arguments]
        ended = forks.run(program, env=env, cwd=tmp_path, timeout=120)
        assert ended.returncode == 0, ended.stderr
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    text = generate_latest(registry).decode()
    of = 'sglang_pat_fallbacks_total{dp_rank="0",reason='
    assert {
        'sglang_pat_decode_steps_total{dp_rank="0"} 10.0',
        'sglang_pat_decode_steps_total{dp_rank="1"} 5.0',
        f'{of}"a reason"}} 2.0',
        f'{of}"none"}} 0.0',
        'sglang_pat_fallbacks_total{dp_rank="2",reason="a reason"} 1.0',
    } <= set(text.splitlines())
    gauges = [line for line in text.splitlines() if line.startswith("sglang_pat_serving{")]
    assert sorted(line for line in gauges if "reason" not in line) == [
        'sglang_pat_serving{dp_rank="0"} 0.0',
        'sglang_pat_serving{dp_rank="1"} 0.0',
    ]
    assert parse_counters(text).fallbacks == {"a reason": 4}


def test_a_failure_to_export_ends_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, and all is exported as soon as it works again."""
    reporter = metrics.Reporter(Stats(), {}, export=False)
    full = OSError("No space left on device")
    flush = mock.Mock(side_effect=[None, full, full, None, None])
    monkeypatch.setattr(reporter, "flush", flush)
    sleep = mock.Mock(side_effect=[None] * 5 + [InterruptedError])
    monkeypatch.setattr(metrics.time, "sleep", sleep)
    with pytest.raises(InterruptedError):
        reporter._run()
    assert flush.call_count == 5
    (said,) = caplog.messages
    assert "were not exported" in said


def test_totals_are_logged_once_a_minute_if_steps_ran(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of single requests, too."""
    caplog.set_level(logging.INFO, logger="sglang_pat")
    stats, now = Stats(), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now == 70:
            stats.small_batch(1)
        if now > 250:
            raise InterruptedError

    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(InterruptedError):
        metrics.Reporter(stats, {}, export=False)._run()
    (said,) = caplog.messages
    assert said.endswith("as intended: 1 x small_batch")
