# SPDX-License-Identifier: Apache-2.0
"""Which batches the backend leaves to its base, and what it counts them as. No server, no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import CAPTURE, EAGER, QUERIES, TARGET, BackendBed
from sglang.srt.model_executor.forward_batch_info import ForwardMode


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)


def test_an_eager_batch_beyond_the_workspace_is_left_to_the_base(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    """The padding of data parallel attention makes it too large."""
    bed.capture()
    for _ in range(2):
        assert bed.step(graph=False, padding=TARGET.max_queries) == EAGER
        assert bed.layer(0) == ["layer"]
    assert bed.fallbacks == {"batch beyond the workspace": 2}
    (record,) = [record for record in caplog.records if "beyond the workspace" in record.message]
    assert record.levelname == "WARNING"
    room, given = TARGET.max_queries, QUERIES + TARGET.max_queries
    assert f"a batch of {given} requests, padding included, is beyond the {room}" in record.message
    # A batch that just fits is served.
    assert bed.step(graph=False, padding=room - QUERIES) == []
    assert bed.layer(0) == []


def test_an_eager_batch_without_memory_for_its_slots_is_left_to_the_base(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.capture()
    bed.executor.room = 0
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == ["layer"]
    assert bed.fallbacks == {"no memory for the slots": 1}
    (record,) = [record for record in caplog.records if "no memory" in record.message]
    assert f"a plan for {QUERIES} requests lists " in record.message
    assert "--mem-fraction-static" in record.message and "1 MB is free" in record.message
    del bed.executor.room
    assert bed.step(graph=False) == [] == bed.layer(0)


def test_an_eager_batch_that_cannot_be_planned_is_left_to_the_base(
    bed: BackendBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.capture()
    monkeypatch.setattr(bed.backend._steps, "plan", lambda *_: None)
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == ["layer"]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [({"capture": True}, CAPTURE), ({}, ["out graph"]), ({"graph": False}, EAGER)],
    ids=["capture", "replay", "eager"],
)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": ForwardMode.EXTEND}, "extend"),
        ({"mode": ForwardMode.MIXED}, "mixed"),
        ({"mode": ForwardMode.TARGET_VERIFY}, "target_verify"),
        ({"mode": ForwardMode.DRAFT_EXTEND_V2}, "draft_extend_v2"),
        ({"spec_info": object()}, "speculative decoding"),
        ({"encoder_lens": torch.ones(QUERIES)}, "encoder lengths in the batch"),
    ],
)
def test_a_batch_that_is_no_plain_decode_is_left_to_the_base(
    bed: BackendBed,
    arguments: dict[str, Any],
    asked: list[str],
    fields: dict[str, Any],
    reason: str,
) -> None:
    """It comes between steps of ``pat``, and changes neither their plan nor their layers."""
    bed.step(capture=True)
    assert bed.layer(0) == bed.step(graph=False) == []
    before = len(bed.executor.plans), bed.executor.snapshots
    assert bed.step(**arguments, **fields) == asked
    assert bed.layer(0) == ["layer"]
    assert (len(bed.executor.plans), bed.executor.snapshots) == before
    intended = reason in ("extend", "draft_extend_v2")
    assert (bed.base_forwards if intended else bed.fallbacks) == {reason: 1}
    assert not (bed.fallbacks if intended else bed.base_forwards)
    assert bed.step(graph=False) == bed.layer(0) == []
    assert (bed.base_forwards if intended else bed.fallbacks) == {reason: 1}


def test_an_eager_batch_that_nobody_announced_is_left_to_the_base(bed: BackendBed) -> None:
    """Before the scheduler's first decode step it is a warm-up; later it counts as a fallback."""
    bed.step(capture=True)
    assert bed.layer(0) == []
    assert bed.step(graph=False, announced=False) == EAGER
    assert bed.base_forwards == {"warm_up": 1} and not bed.fallbacks
    assert bed.step(graph=False) == []
    plans = len(bed.executor.plans)
    assert bed.step(graph=False, announced=False) == EAGER
    assert bed.layer(0) == ["layer"]
    assert len(bed.executor.plans) == plans
    assert bed.fallbacks == {"no batch from the scheduler": 1}
