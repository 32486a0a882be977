# SPDX-License-Identifier: Apache-2.0
"""Whether a new plan was hidden behind the GPU: asked of an event, counted, shown. No GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.serving.table import counted_fields
from sglang_pat.demo.counters import Counters
from sglang_pat.srt.step_clock import StepClock
from sglang_pat.stats import Stats


class FakeEvent:
    """An event of a GPU whose earlier work lasts until ``done`` is set."""

    done = False
    records = 0

    def record(self) -> None:
        type(self).records += 1

    def query(self) -> bool:
        assert self.records, "asked before it was recorded"
        return self.done


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    fake = type("Event", (FakeEvent,), {})
    monkeypatch.setattr(torch.cuda, "Event", fake)
    return fake


def test_a_preparation_is_hidden_while_the_gpu_is_busy(event: type[FakeEvent]) -> None:
    clock = StepClock(on_gpu=True)
    clock.start()
    assert event.records == 1
    assert clock.is_hidden()
    event.done = True
    assert not clock.is_hidden()
    assert clock.elapsed_ns() > 0


def test_nothing_is_hidden_without_a_gpu(event: type[FakeEvent]) -> None:
    clock = StepClock(on_gpu=False)
    clock.start()
    assert not clock.is_hidden()
    assert not event.records


def test_hidden_plans_are_not_exposed() -> None:
    stats = Stats()
    stats.plans_made = 2
    stats.host_time(300, made=True, hidden=True)
    stats.host_time(500, made=True, hidden=False)
    stats.host_time(70, made=False, hidden=False)  # a step that kept its plan exposes none
    counted = stats.snapshot()
    assert counted["hidden_plans"] == 1
    assert counted["exposed_seconds"] == pytest.approx(500e-9)
    assert counted["plan_seconds"] == pytest.approx(800e-9)
    assert "1 of 2 plans hidden behind the GPU" in stats.summary()


def test_a_row_says_what_was_hidden() -> None:
    counted = Counters(decode_steps=10, plans_made=4, hidden_plans=3, exposed_seconds=80e-6)
    row = counted_fields(counted)
    assert row["hidden_share"] == 0.75
    assert row["exposed_us"] == pytest.approx(20)
    assert counted_fields(Counters())["hidden_share"] is None
