# SPDX-License-Identifier: Apache-2.0
"""Which forwards the backend has its base prepare: those with a layer that the base serves, and
all forwards until the layers are known. No server, no GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import CAPTURE, EAGER, BackendBed
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.srt.layers import Survey


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)


def test_replays_of_our_layers_need_no_metadata_of_the_base(bed: BackendBed) -> None:
    assert bed.step(capture=True) == CAPTURE
    assert bed.layer(0) == bed.layer(1) == []
    bed.capture(2)
    assert bed.step() == bed.step(padding=2) == []
    assert bed.step(capture=True) == CAPTURE  # a capture always, in case the base serves a layer
    assert bed.step(mode=ForwardMode.EXTEND) == ["out graph"]
    assert bed.step(mode=ForwardMode.EXTEND, graph=False) == EAGER
    assert bed.base_forwards == {"extend": 2} and not bed.fallbacks


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"window": 8}, "a sliding window"), ({"sinks": 1}, "arguments sinks")],
)
def test_the_base_is_prepared_for_a_layer_that_it_serves(
    bed: BackendBed, arguments: dict[str, Any], reason: str
) -> None:
    bed.step(capture=True)
    assert bed.layer(0) == []
    assert bed.layer(1, **arguments) == ["layer"]
    assert bed.step() == ["out graph"]
    assert bed.step() == ["out graph"]
    assert bed.base_layers == {reason: 3}  # in the capture and in both replays
    assert not bed.fallbacks  # what the layer is like is no failure of the step


def test_an_argument_that_is_none_is_none(bed: BackendBed) -> None:
    bed.capture()
    assert bed.layer(1, sinks=None) == []
    assert bed.step() == [] and not bed.base_layers


@pytest.mark.parametrize(
    ("reasons", "prepares"),
    [({0: "", 1: ""}, False), ({0: "", 1: "chunked attention (use_irope)"}, True)],
)
def test_a_survey_says_before_the_first_step_whether_the_base_is_needed(
    reasons: dict[int, str], prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = BackendBed(monkeypatch, Survey(reasons))
    bed.capture()
    assert bed.step(graph=False) == (EAGER if prepares else [])
    assert bed.step() == (["out graph"] if prepares else [])
    assert bed.layer(0) == []
    assert bed.layer(1) == (["layer"] if prepares else [])


def test_a_server_whose_last_layer_is_lost_to_the_base_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = BackendBed(monkeypatch, Survey({0: "", 1: ""}))
    bed.step(capture=True)
    bed.layer(0, sinks=1)
    assert not bed.serving
    bed.layer(1, sinks=1)
    assert bed.serving == [False]
    assert "serves nothing on this server: the last layer has arguments sinks" in caplog.text


def test_eager_steps_prepare_the_base_until_the_layers_are_known(bed: BackendBed) -> None:
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == []
    assert bed.step(graph=False) == []
    assert bed.layer(0) == []
    # A layer that was not known: the base is prepared at once, and beforehand from then on.
    assert bed.layer(1, window=8) == [*EAGER, "layer"]
    assert bed.layer(2, window=8) == ["layer"]
    assert bed.step(graph=False) == EAGER
    assert bed.layer(1, window=8) == ["layer"]


def test_without_a_layer_of_ours_nothing_is_planned_or_claimed(bed: BackendBed) -> None:
    bed.step(capture=True)
    assert bed.layer(0, window=8) == bed.layer(1, window=8) == ["layer"]
    plans = len(bed.executor.plans)
    assert bed.step() == ["out graph"]
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0, window=8) == ["layer"]
    assert len(bed.executor.plans) == plans and bed.backend._stats.decode_steps == 0
    assert bed.base_layers == {"a sliding window": 6}
    assert not bed.fallbacks
