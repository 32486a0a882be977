# SPDX-License-Identifier: Apache-2.0
"""What a server of single requests is made of, and what it logs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang_pat.srt import factory, metrics
from sglang_pat.srt.support import Reason
from sglang_pat.stats import Stats


def test_a_server_whose_batches_stay_too_small_gets_the_stock_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def reasons(_server: Any, min_batch: int) -> list[Reason]:
        asked.append(min_batch)
        return [Reason("batches stay too small", "raise it")]

    stock = object()
    monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "3")
    monkeypatch.setattr(factory.support, "idle_reasons", reasons)
    monkeypatch.setattr(factory.support, "by_runner", lambda _: None)
    monkeypatch.setattr(factory.stock, "build_stock", lambda _: ("fa3", stock))
    monkeypatch.setattr(factory, "start_reporter", lambda *_, **__: None)
    monkeypatch.setattr(factory.launch, "refuse_unsafe", lambda _: None)
    runner = SimpleNamespace(
        is_draft_worker=False, server_args=None, model_config=None, kv_cache_dtype=None
    )
    assert factory.make_pat_backend(runner) is stock and asked == [3]


def test_a_server_of_single_requests_logs_its_totals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a minute, as one that packs; not without any step."""

    class Stopped(Exception):
        pass

    class Clock:
        def __init__(self, minutes: int) -> None:
            self.seconds, self.end = 0.0, 60.0 * minutes

        def monotonic(self) -> float:
            return self.seconds

        def sleep(self, seconds: float) -> None:
            self.seconds += seconds
            if self.seconds > self.end + 1:
                raise Stopped

    caplog.set_level(logging.INFO, logger="sglang_pat")
    stats = Stats()
    for steps in (0, 3):
        for _ in range(steps):
            stats.small_batch(1)
        monkeypatch.setattr(metrics, "time", Clock(minutes=2))
        with pytest.raises(Stopped):
            metrics.Reporter(stats, {}, export=False)._run()
        said = [line for line in caplog.messages if "since its start" in line]
        assert len(said) == bool(steps)
    assert said[0].endswith("as intended: 3 x small_batch")
