# SPDX-License-Identifier: Apache-2.0
"""Each reason against serving, on its own: what it names and the way out. No server, no GPU."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sglang_pat.srt import hook, refusals

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _pool(quant: str | None = None, **changes: Any) -> SimpleNamespace:
    """A pool that is served, but for ``changes``; ``quant``: the name of its method."""
    method = quant and SimpleNamespace(name=quant)
    values = {"requires_physical_write_loc": False, "kv_cache_layout": "nhd"} | changes
    return SimpleNamespace(get_kv_cache_quant_method=lambda: method, **values)


def _runner(**changes: Any) -> SimpleNamespace:
    """A model runner that is served, but for ``changes``."""
    values = {
        "device": "cpu",
        "use_mla_backend": False,
        "prefill_aware_swa": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "dtype": BF16,
        "kv_cache_dtype": BF16,
        "kv_cache_dtype_str": "auto",
        "token_to_kv_pool": _pool(),
        "kv_index_translator": SimpleNamespace(is_translating=False),
    }
    return SimpleNamespace(**(values | changes))


def _check(reasons: Iterator[str], pattern: str) -> None:
    """Exactly one reason, with what ``pattern`` finds; none at all if that is empty."""
    found = list(reasons)
    assert len(found) == bool(pattern), found
    assert not pattern or re.search(pattern, found[0]), found


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook in its place, put there by SGLang itself."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    # So that it is taken away again.
    monkeypatch.setattr(ForwardBatch, "init_new", ForwardBatch.__dict__["init_new"])
    HookRegistry.register(hook.TARGET, hook.after_init_new, HookType.AFTER)
    HookRegistry.apply_hooks()


@pytest.fixture(scope="module")
def defaults() -> Any:
    """SGLang's configuration as a scheduler publishes it, without any option."""
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        return runtime_context.create_context(
            ServerArgs(model_path="dummy", device="cpu"), role="scheduler"
        )


@pytest.fixture
def published(defaults: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", raising=False)
    with runtime_context.use_context(defaults):
        yield


AUTO = "set --kv-cache-dtype auto"
READ = "bfloat16, float16 and float8_e4m3fn: set --kv-cache-dtype auto or fp8_e4m3$"
CHOOSE = "choose another --attention-backend$"
UNIFIED = "slot ids .* drop --enable-unified-memory and --enable-page-major-kv-layout$"
HND = "layout 'hnd', not 'nhd': unset SGLANG_USE_HND_KVCACHE or the option that chose it$"
SHIFTED = SimpleNamespace(is_encoder_decoder=True)
VIRTUAL = SimpleNamespace(is_translating=True)


def _cache(cache: torch.dtype, model: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    return {"device": device, "kv_cache_dtype": cache, "dtype": model}


def _with(pool: Any) -> dict[str, Any]:
    return {"token_to_kv_pool": pool}


@pytest.mark.parametrize(
    ("check", "changes", "pattern"),
    [
        ("_device", {}, ""),
        ("_device", {"device": "xpu"}, f"on cpu, cuda, not on 'xpu': .*cpu and .*, or {CHOOSE}"),
        ("_model", {"use_mla_backend": True}, f"uses MLA, .*: {CHOOSE}"),
        ("_model", {"model_config": SHIFTED}, f"encoder-decoder .*: {CHOOSE}"),
        (
            "_model",
            {"prefill_aware_swa": True},
            f"a window of its last tokens .UnlimitedOCRForCausalLM.*: {CHOOSE}",
        ),
        ("_model", _cache(FP32, FP32), ""),
        ("_model", _cache(BF16, BF16), ""),
        ("_model", _cache(FP16, FP16, "cuda"), ""),
        ("_model", _cache(E4M3, BF16, "cuda"), ""),
        ("_model", _cache(E4M3, FP32), ""),
        (
            "_model",
            _cache(E4M3, FP32, "cuda"),
            "the model is torch.float32, on cuda pat takes bfloat16, float16: set one as --dtype$",
        ),
        ("_model", _cache(E5M2, BF16, "cuda"), f"is torch.float8_e5m2, on cuda pat reads {READ}"),
        ("_model", _cache(FP32, FP32, "cuda"), "the model is torch.float32, .*one as --dtype$"),
        ("_model", _cache(FP16, BF16), f"torch.float16 but the model torch.bfloat16: {AUTO}$"),
        (
            "_model",
            _cache(BF16, FP16, "cuda"),
            f"torch.bfloat16 but the model torch.float16: {AUTO}$",
        ),
        ("_pool", {}, ""),
        ("_pool", _with(_pool("unquantized")), ""),
        ("_pool", _with(_pool(full_kv_pool=_pool())), ""),
        ("_pool", _with(_pool(full_kv_pool=object())), ""),
        ("_pool", {"kv_index_translator": VIRTUAL}, UNIFIED),
        ("_pool", _with(_pool(requires_physical_write_loc=True)), UNIFIED),
        ("_pool", _with(_pool(kv_cache_layout="hnd")), HND),
        ("_pool", _with(_pool(full_kv_pool=_pool(kv_cache_layout="hnd"))), HND),
        ("_pool", _with(_pool("fp4")), f"is quantized by fp4: {AUTO}$"),
        ("_pool", {"kv_cache_dtype_str": "fp8_e4m3"}, ""),
        ("_pool", {"kv_cache_dtype_str": "mxfp8"}, f"is quantized by mxfp8: {AUTO}$"),
    ],
)
def test_what_a_runner_has(
    check: str, changes: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    _check(getattr(refusals, check)(_runner(**changes)), pattern)


def test_sglangs_own_cpu_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    _check(refusals._device(_runner()), "^SGLANG_USE_CPU_ENGINE=1 .*: unset it and .*=pat_cpu$")


# The options, under the names that SGLang's own configuration has for them.


def _set(path: str, **values: Any) -> AbstractContextManager[Any]:
    """Override leaves of a namespace of the published configuration."""
    first, *rest = path.split(".")
    bag = getattr(runtime_context, f"get_{first}")()
    for name in rest:
        bag = getattr(bag, name)
    return bag.override(**values)


@pytest.mark.parametrize(
    ("option", "path", "values"),
    [
        ("--enable-two-batch-overlap", "exec.overlap", {"enable_two_batch_overlap": True}),
        ("--enable-pdmux", "disagg", {"enable_pdmux": True}),
        (
            "--enable-deterministic-inference",
            "exec.deterministic",
            {"enable_deterministic_inference": True},
        ),
        ("--enable-torch-compile", "exec.graph", {"enable_torch_compile": True}),
        ("--dcp-size > 1", "parallel", {"attn_dcp_size": 2}),
        # A topology that SGLang finds consistent.
        ("--attn-cp-size > 1", "parallel", {"attn_cp_size": 2, "tp_size": 2, "moe_tp_size": 2}),
        ("--enable-kv-cache-sharding", "parallel", {"enable_kv_cache_sharding": True}),
        ("--enable-hisparse", "memory", {"enable_hisparse": True}),
        ("--prefill-only-disable-kv-cache", "schedule", {"prefill_only_disable_kv_cache": True}),
    ],
)
def test_options(published: None, option: str, path: str, values: dict[str, Any]) -> None:
    _check(refusals._modes(), "")
    with _set(path, **values):
        _check(refusals._modes(), f"^{option}: .*; drop it or {CHOOSE}")


def test_the_metadata_glue_graph(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    _check(refusals._modes(), f"^SGLANG_ENABLE_METADATA_GLUE_GRAPH: .*; drop it or {CHOOSE}")


# All of it.


def test_a_sound_runner_is_served(hooked: None, published: None) -> None:
    refusals.refuse_unsafe(_runner())


def test_all_reasons_are_given_at_once(hooked: None, published: None) -> None:
    runner = _runner(use_mla_backend=True, dtype=FP32, token_to_kv_pool=_pool("fp4"))
    with _set("memory", enable_hisparse=True), pytest.raises(RuntimeError) as refusal:
        refusals.refuse_unsafe(runner)
    first, *reasons = str(refusal.value).split("\n  - ")
    assert first == "sglang_pat refuses to serve with --attention-backend pat:"
    expected = ["uses MLA", "but the model torch.float32", "quantized by fp4", "--enable-hisparse"]
    assert len(reasons) == len(expected)
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True)), reasons


def test_of_a_foreign_interface_nothing_else_is_read() -> None:
    with pytest.raises(RuntimeError) as refusal:  # not AttributeError: this runner has no model
        refusals.refuse_unsafe(SimpleNamespace(device="xpu"))
    _, *reasons = str(refusal.value).split("\n  - ")
    assert len(reasons) == 2
    assert "is not installed" in reasons[0] and "not on 'xpu'" in reasons[1]
