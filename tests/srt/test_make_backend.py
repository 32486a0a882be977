# SPDX-License-Identifier: Apache-2.0
"""Which backend a model runner gets: ``pat`` over the right base, or SGLang's own. No server, no
GPU."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import E4M3, NGRAM, make_layer, make_pool, make_runner, set_ranks, set_scales
from sglang.srt.layers.attention import attention_registry
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_pat.srt import factory, plugin
from sglang_pat.srt.backend import PatDecodeMixin, PatVerifyMixin

STOCK = "stock torch_native"
WINDOW = {"sliding_window_size": 128}
IN_E4M3 = {"kv_cache_dtype": E4M3, "token_to_kv_pool": make_pool(2, dtype=E4M3)}


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> SimpleNamespace:
    """Makes backends without kernels, as SGLang does with the plugin registered: ``make(runner)``
    returns their name, or the class, the mixin, the survey and the arguments. ``checked``: the
    runners that were asked for refusals; ``reported``: what reporters were told."""
    caplog.set_level(logging.INFO, logger="sglang_pat")
    set_ranks(monkeypatch, 1)

    def make(runner: Any, name: str = "") -> Any:
        return registry[name or runner.decode_attention_backend_str](runner)

    bed = SimpleNamespace(checked=[], reported=[], make=make)
    names = ("torch_native", "fa3", "triton", "dsv4")
    registry = {name: lambda _, name=name: f"stock {name}" for name in names}
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", registry)
    monkeypatch.setattr(HookRegistry, "register", lambda *_: None)
    monkeypatch.setattr("sglang.srt.server_args.add_attention_backend_choices", lambda _: None)
    plugin.register()
    monkeypatch.setattr(factory.launch, "refuse_unsafe", bed.checked.append)
    monkeypatch.setattr(factory, "make_executor", lambda *_: None)

    def extend(cls: type, mixin: type) -> Any:
        return lambda *given, **arguments: (cls.__name__, mixin, given[3], arguments)

    def start_reporter(_stats: Any, *, serving: bool) -> None:
        bed.reported.append(serving)

    monkeypatch.setattr(factory, "extend", extend)
    monkeypatch.setattr(factory, "start_reporter", start_reporter)
    return bed


@pytest.mark.parametrize(
    ("layers", "changes", "mixin", "said", "warned"),
    [
        ([{}, WINDOW], {}, PatDecodeMixin,
         "serves 1 of 2 attention layers (1 with a sliding window), K/V in bfloat16", ""),
        ([{}, {}], IN_E4M3, PatDecodeMixin,
         "serves all 2 attention layers, K/V in float8_e4m3fn", ""),
        ([{}, {}], {"args": NGRAM}, PatVerifyMixin, "serves all 2", ""),
        ([{}], {"args": {"disable_radix_cache": True}}, PatDecodeMixin, "serves all 1",
         "packs nothing on this server: .*drop --disable-radix-cache"),
        *(([layer], changes, None, "attention is SGLang's own, torch_native",
           f"serves nothing on this server: .*{warned}") for layer, changes, warned in (
            ({}, {"args": {"speculative_algorithm": "DFLASH"}}, "--speculative-algorithm DFLASH"),
            ({}, {"args": {"max_running_requests": 2}}, "serves batches of 3 or more"),
            ({}, {"config": {"architecture": "SDARForCausalLM"}}, "1 with attention type encoder"),
            ({"use_irope": True}, {}, "none of 1 attention layers .1 with chunked attention"),
        )),
    ],
)  # fmt: skip
def test_a_model_with_a_served_layer_extends_the_base_and_others_are_sglangs(
    layers: list[dict[str, Any]],
    changes: dict[str, Any],
    mixin: type | None,
    said: str,
    warned: str,
    bed: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "3")
    made = [make_layer(index, **each) for index, each in enumerate(layers)]
    set_scales(made[0], 1.0, 1.0)
    runner = make_runner(made, **changes)
    reasons = {index: "a sliding window" if each else "" for index, each in enumerate(layers)}
    ours = ("TorchNativeAttnBackend", mixin, reasons, {"packs": not warned})
    assert bed.make(runner) == (STOCK if mixin is None else ours)
    assert bed.checked == [runner] and bed.reported == [False] * (mixin is None)
    assert said in caplog.messages[-1]
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [bool(re.search(warned, each)) for each in warnings] == [True] * bool(warned)


def test_what_pat_does_not_decode_is_sglangs_without_a_word(
    bed: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft model, whose backends go by the same name; a server that did not ask; and prefill, of
    a server that runs it on another backend."""
    draft = make_runner([make_layer(0)], args=NGRAM, is_draft_worker=True)
    assert bed.make(draft) == STOCK
    assert bed.make(make_runner([], args={"attention_backend": "torch_native"})) == STOCK
    split = {
        "attention_backend": "torch_native",
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "pat",
    }
    runner = make_runner([make_layer(0)], args=split)
    assert bed.make(runner, runner.prefill_attention_backend_str) == "stock triton"
    assert not caplog.messages and not bed.checked and not bed.reported
    assert bed.make(runner)[0] == "TorchNativeAttnBackend"


def test_a_name_that_the_hooks_did_not_resolve_is_refused(bed: SimpleNamespace) -> None:
    before = dict(attention_registry.ATTENTION_BACKENDS)
    plugin.register()  # once more
    assert before == attention_registry.ATTENTION_BACKENDS
    with pytest.raises(RuntimeError, match=r"hook before .*resolve_once is not installed: look "):
        bed.make(make_runner([make_layer(0)]), "pat")
