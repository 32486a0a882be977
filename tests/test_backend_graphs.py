# SPDX-License-Identifier: Apache-2.0
"""A decode graph that has captured a layer of pat is never replayed without a plan for its batch.
No server, no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import CAPTURE, EAGER, QUERIES, BackendBed
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.planner import Planner
from sglang_pat.srt.layers import Survey

PRE, IN, POST, UNKNOWN = SharedReadEnds


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)


def test_slots_that_the_gpu_has_no_memory_for_are_on_the_host(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.capture(2)
    bed.executor.room = 0
    assert bed.step(padding=2) == []
    assert bed.executor.on_host == 1
    assert bed.executor.plans[-1].num_shared_items > 0
    assert bed.fallbacks == {"no memory for the slots": 1}
    assert bed.backend._stats.packed_steps == 1
    assert f"a plan for {QUERIES} requests lists " in caplog.text
    assert "in the host's" in caplog.text and "1 MB is free" in caplog.text
    del bed.executor.room
    bed.step(padding=2)
    assert bed.executor.on_host == 1


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize("announced", [True, False])
def test_a_batch_that_cannot_be_planned_runs_the_plan_of_its_capture(
    bed: BackendBed, announced: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("cannot be planned")

    bed.capture(2)
    with monkeypatch.context() as patch:
        for name in ("plan", "plan_handles", "plan_again"):
            patch.setattr(Planner, name, fail)
        for _ in range(2):
            assert bed.step(padding=2, announced=announced) == []
            plan = bed.executor.plans[-1]
            lens = torch.cat([bed.lens, torch.ones(2, dtype=torch.int64)])
            assert plan.fits(lens.data_ptr(), len(lens)) and plan.num_shared_items == 0
            bed.lens += 100
        assert bed.step(graph=False) == EAGER
    assert bed.fallbacks["batch not plannable"] == 3
    assert bed.backend._stats.decode_steps == 0
    bed.step(padding=2)
    assert bed.executor.plans[-1].num_shared_items > 0


def test_a_graph_for_sequences_too_long_to_plan_is_the_bases(bed: BackendBed) -> None:
    table = torch.empty((QUERIES, 1 << 29), dtype=torch.int32, device="meta")
    bed.backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    assert bed.step(capture=True) == CAPTURE
    assert bed.layer(0) == ["layer"]
    assert bed.step() == ["out graph"]
    assert bed.fallbacks == {"batch not plannable": 2}  # in the capture and in the replay
    assert all(plan.num_shared_items == 0 for plan in bed.executor.plans)


def test_layers_that_are_lost_later_do_not_change_what_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = BackendBed(monkeypatch, Survey({0: ""}))
    bed.capture()
    bed.step(graph=False)
    assert bed.layer(0, sinks=1)[-1] == "layer"
    plans = len(bed.executor.plans)
    assert bed.step(graph=False) == EAGER and len(bed.executor.plans) == plans
    assert bed.step() == ["out graph"]
    assert len(bed.executor.plans) == plans + 1
    assert bed.executor.plans[-1].num_queries == QUERIES


@pytest.mark.parametrize(
    ("mode", "of_base", "expected"),
    [
        (ForwardMode.DECODE, PRE, IN),
        (ForwardMode.TARGET_VERIFY, PRE, IN),
        (ForwardMode.DECODE, POST, POST),
        (ForwardMode.TARGET_VERIFY, UNKNOWN, UNKNOWN),
        (ForwardMode.EXTEND, PRE, PRE),
    ],
)
def test_rows_are_not_written_to_before_the_snapshot(
    bed: BackendBed, mode: ForwardMode, of_base: SharedReadEnds, expected: SharedReadEnds
) -> None:
    bed.backend.read_ends = of_base
    assert bed.backend.shared_read_ends(mode) is expected
