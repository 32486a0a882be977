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

RANKS = SpawnRanks(world_rank=0)


@pytest.fixture(scope="module")
def context() -> Any:
    """SGLang's configuration as a scheduler publishes it."""
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        return runtime_context.create_context(
            ServerArgs(model_path="dummy", device="cpu", served_model_name="a-model"),
            role="scheduler",
            ranks=RANKS,
        )


@pytest.fixture
def published(context: Any) -> Iterator[None]:
    with runtime_context.use_context(context):
        yield


def _sglangs_own() -> dict[str, str]:
    """The labels that SGLang's scheduler gives to its collector."""
    collector = mock.Mock()
    with mock.patch.object(metrics_collector, "resolve_collector_class", lambda *_: collector):
        metrics_collector.SchedulerMetricsCollector.init_new(
            server_args=runtime_context.get_server_args(),
            enable_priority_scheduling=runtime_context.get_schedule().enable_priority_scheduling,
            enable_lora=False,
            enable_hierarchical_cache=False,
        )
    return {name: str(value) for name, value in collector.call_args.kwargs["labels"].items()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"model_name": "a-model", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}),
        ({"parallel": {"dp_rank": 3}}, {"dp_rank": "3"}),
        ({"disagg": {"disaggregation_mode": "decode"}}, {"engine_type": "decode"}),
        ({"disagg": {"enable_pd_role_switch": True}}, {"engine_type": "dynamic"}),
        ({"schedule": {"enable_priority_scheduling": True}}, {"priority": ""}),
        ({"observability": {"extra_metric_labels": {"cell": "b"}}}, {"cell": "b"}),
    ],
)
def test_labels_are_those_of_sglangs_scheduler(
    published: None, changes: dict[str, dict[str, Any]], expected: dict[str, str]
) -> None:
    with ExitStack() as overrides:
        overrides.enter_context(runtime_context.get_observability().override(enable_metrics=True))
        for space, values in changes.items():
            bag = getattr(runtime_context, f"get_{space}")()
            overrides.enter_context(bag.override(**values))
        labels = scheduler_labels()
        assert labels == _sglangs_own()
    assert labels.items() >= expected.items()
    assert ("dp_rank" in labels) == ("dp_rank" in expected)


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
reporter.flush()
reporter.flush()
"""


def _scrape(folder: Path, *processes: tuple[str, ...]) -> list[str]:
    """The lines of pat's metrics after these processes have run and ended, one after another."""
    (folder / "process_of_a_server.py").write_text(_PROCESS)
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)} | forks.search_path(folder)
    for arguments in processes:
        program = ["process_of_a_server", *arguments]
        ended = forks.run(program, env=env, cwd=folder, timeout=120)
        assert ended.returncode == 0, ended.stderr
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if line.startswith("sglang_pat_"))


def test_each_rank_is_a_series_of_its_own(tmp_path: Path) -> None:
    """Of a rank that was started again the gauge is that of the newest process: the older one's
    neither stays beside it nor is added to it. Fallbacks are 0 before the first, so that their sum
    is there to alert on; an operator's label of the name of ours does not displace it."""
    lines = _scrape(
        tmp_path,
        ("1", "dp_rank=0"),
        ("0", "dp_rank=1"),
        ("10", "dp_rank=0"),
        ("1", "dp_rank=2", "reason=none"),
    )
    of = 'sglang_pat_fallbacks_total{dp_rank="0",reason='
    assert {
        'sglang_pat_decode_steps_total{dp_rank="0"} 10.0',
        'sglang_pat_decode_steps_total{dp_rank="1"} 5.0',
        f'{of}"a reason"}} 2.0',
        f'{of}"none"}} 0.0',
        'sglang_pat_fallbacks_total{dp_rank="2",reason="a reason"} 1.0',
    } <= set(lines)
    assert [line for line in lines if "serving" in line and "reason" not in line] == [
        'sglang_pat_serving{dp_rank="0"} 0.0',
        'sglang_pat_serving{dp_rank="1"} 0.0',
    ]
    assert parse_counters("\n".join(lines)).fallbacks == {"a reason": 4}


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
