# SPDX-License-Identifier: Apache-2.0
"""Which backend a model runner gets: ``pat`` over the right base, or SGLang's own. No server, no
GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import (
    E4M3,
    QSA,
    make_layer,
    make_pool,
    make_runner,
    set_ranks,
    set_scales,
    warnings_of,
)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from sglang_pat.srt import factory


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 1)


class FakeBackend:
    """In place of the class that ``extend`` makes: keeps what it is given."""

    def __init__(self, *given: Any, **arguments: Any) -> None:
        self.survey, self.arguments = given[3], arguments


class FactoryBed:
    """A test bed: makes backends without kernels, and notes the runners that were checked, the base
    that was extended and what reporters were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked: list[Any] = []
        self.extended: type | None = None
        self.mixin: type | None = None
        self.reported: list[bool] = []
        monkeypatch.setattr(factory.launch, "refuse_unsafe", self.checked.append)
        monkeypatch.setattr(factory, "extend", self._extend)
        monkeypatch.setattr(factory, "make_executor", lambda *_: None)
        monkeypatch.setattr(
            factory, "start_reporter", lambda _, *, serving: self.reported.append(serving)
        )
        for name in ("torch_native", "fa3", "triton"):
            monkeypatch.setitem(ATTENTION_BACKENDS, name, lambda _, name=name: f"stock {name}")

    def _extend(self, cls: type, mixin: type) -> Callable[..., FakeBackend]:
        self.extended, self.mixin = cls, mixin
        return FakeBackend

    def make(self, runner: Any) -> Any:
        return factory.make_pat_backend(runner)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> FactoryBed:
    return FactoryBed(monkeypatch)


def test_a_model_with_a_served_layer_extends_the_base(
    bed: FactoryBed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    runner = make_runner([make_layer(0), make_layer(1, sliding_window_size=128)])
    made = bed.make(runner)
    assert bed.checked == [runner]
    assert bed.extended is not None and bed.extended.__name__ == "TorchNativeAttnBackend"
    assert made.survey.reasons == {0: "", 1: "a sliding window"}
    assert made.arguments == {"packs": True}
    assert caplog.messages == [
        "sglang_pat: serves 1 of 2 attention layers (1 with a sliding window), K/V in bfloat16"
    ]
    assert not warnings_of(caplog) and not bed.reported


def test_a_server_that_cannot_pack_is_served_and_warned(
    bed: FactoryBed, caplog: pytest.LogCaptureFixture
) -> None:
    made = bed.make(make_runner([make_layer(0)], args={"disable_radix_cache": True}))
    assert made.arguments == {"packs": False}
    (warning,) = warnings_of(caplog)
    assert "packs nothing" in warning and "drop --disable-radix-cache" in warning


@pytest.mark.parametrize(
    ("layer", "changes", "warned"),
    [
        ({}, {"args": {"speculative_algorithm": "DFLASH"}}, "under --speculative-algorithm DFLASH"),
        ({}, {"args": {"disaggregation_mode": "prefill"}}, "never decodes"),
        ({}, {"config": {"is_generation": False}}, "embedding or reward"),
        ({}, {"args": {"max_running_requests": 1}}, "lets at most 1 decode at a time"),
        ({}, {"config": {"hf_config": QSA}}, "(QSA)"),
        ({"use_irope": True}, {}, "none of 1 attention layers (1 with chunked attention"),
    ],
)
def test_where_pat_serves_nothing_the_backend_is_sglangs(
    layer: dict[str, Any],
    changes: dict[str, Any],
    warned: str,
    bed: FactoryBed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    runner = make_runner([make_layer(0, **layer)], **changes)
    assert bed.make(runner) == "stock torch_native"
    assert bed.checked == [runner]
    assert caplog.messages[-1] == "sglang_pat: attention is SGLang's own, torch_native"
    (warning,) = warnings_of(caplog)
    assert warned in warning and "serves nothing" in warning
    assert bed.reported == [False] and bed.extended is None


@pytest.mark.parametrize("known", [None, 1.0])
def test_layers_of_an_fp8_pool_are_served(
    known: float | None, bed: FactoryBed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    layer = make_layer(0)
    if known is not None:
        set_scales(layer, known, known)
    runner = make_runner([layer], kv_cache_dtype=E4M3, token_to_kv_pool=make_pool(1, dtype=E4M3))
    bed.make(runner)
    assert bed.extended is not None and not warnings_of(caplog)
    assert caplog.messages[-1] == "sglang_pat: serves all 1 attention layers, K/V in float8_e4m3fn"


def test_a_draft_model_gets_sglangs_backend_without_a_warning(
    bed: FactoryBed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    args = {"speculative_algorithm": "NGRAM"}
    runner = make_runner([make_layer(0)], args=args, is_draft_worker=True)
    assert bed.make(runner) == "stock torch_native"
    (message,) = caplog.messages
    assert message.endswith("the draft worker's attention is SGLang's own, torch_native")
    assert not warnings_of(caplog) and not bed.reported
    # SGLang makes the draft's further backends by this name.
    assert runner.draft_attention_backend == "torch_native"


def test_a_draft_model_keeps_the_backend_that_was_named_for_it(bed: FactoryBed) -> None:
    runner = make_runner([make_layer(0)], is_draft_worker=True, draft_attention_backend="triton")
    bed.make(runner)
    assert runner.draft_attention_backend == "triton"


def test_where_the_options_leave_nothing_to_serve_layers_are_not_surveyed(
    bed: FactoryBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "survey_layers", lambda _: pytest.fail("surveyed"))
    runner = make_runner([make_layer(0)], config={"is_generation": False})
    assert bed.make(runner) == "stock torch_native"


def test_the_option_says_how_many_requests_are_enough(
    bed: FactoryBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "3")
    for requests, stock in ((2, True), (3, False)):
        runner = make_runner([make_layer(0)], args={"max_running_requests": requests})
        assert (bed.make(runner) == "stock torch_native") == stock
