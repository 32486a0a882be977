# SPDX-License-Identifier: Apache-2.0
"""What SGLang would choose without the plugin: the attention backend, which the plugin extends or
cannot, and the K/V cache's dtype that a checkpoint asks for. No server, no GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import (
    BF16,
    E4M3,
    HOPPER,
    OLDER,
    make_runner,
    model_config,
    server_args,
    warnings_of,
)
from sglang.srt.layers.attention import attention_registry
from sglang.srt.runtime_context import override_platform

from sglang_pat.srt import stock

LLAMA_4 = {"architecture": "Llama4ForConditionalGeneration"}
SINKS = {"has_attention_sinks": True}
FLASHINFER, NONE = OLDER | {"has_flashinfer": True}, OLDER | {"has_flashinfer": False}
B200 = {"is_hopper_with_cuda_12_3": False, "is_sm90": False, "is_sm100": True}
PAGED = "takes pages of 16, 32, 64, 128 tokens, not of 1; --page-size 64 lets it run them"


def _backends(prefill: str | None, decode: str | None, both: str | None = "pat") -> dict[str, Any]:
    return {
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
        "attention_backend": both,
    }


@pytest.fixture(autouse=True)
def gpu_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that tell their module: importing SGLang's would load kernels. The registry makes a
    backend's name."""

    class Module:
        def __init__(self, path: str) -> None:
            self.path = path

        def __getattr__(self, name: str) -> type:
            return type(name, (), {"__module__": self.path})

    monkeypatch.setattr(stock, "import_module", Module)
    registry = {name: lambda _, name=name: f"made {name}" for name in stock._CUDA}
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", registry)


@pytest.mark.parametrize(
    ("facts", "args", "model", "base", "warning"),
    [
        # Without options the GPU and the model decide.
        (HOPPER, {}, {}, "fa3", ""),
        (HOPPER, {}, LLAMA_4, "fa3", ""),
        (FLASHINFER, {}, {}, "flashinfer", ""),
        (NONE, {}, {}, "triton", ""),
        (FLASHINFER, {}, LLAMA_4, "triton", ""),  # SGLang's override for Llama 4
        (FLASHINFER, {}, SINKS, "triton", ""),
        (HOPPER, {"kv_cache_dtype": "fp8_e5m2"}, {}, "triton", ""),
        (HOPPER, {"device": "cpu"}, {}, "torch_native", ""),
        (HOPPER, _backends("triton", "pat", None), {}, "triton", ""),
        (HOPPER, _backends(None, "pat", "flashinfer"), {}, "flashinfer", ""),
        (HOPPER, _backends("fa4", "pat"), {}, "fa4", ""),
        (HOPPER, _backends("pat", "triton", None), {}, "triton", ""),
        (HOPPER, _backends("pat", "pat"), {}, "fa3", ""),
        # A named one that cannot be extended gives way to the default.
        (HOPPER, _backends(None, "pat", "torch_native"), {}, "fa3", "extend 'torch_native':.*fa3$"),
        (HOPPER, _backends(None, "pat", "flex_attention"), {}, "fa3", "extend 'flex_att.*fa3$"),
        *((B200, {"page_size": pages}, {}, "trtllm_mha", "") for pages in (16, 32, 64, 128)),
        (B200 | {"has_flashinfer": True}, {}, {}, "flashinfer", f"on flashinfer: .*{PAGED}"),
        (B200 | {"has_flashinfer": False}, {}, {}, "triton", f"run on triton: .*{PAGED}"),
        (B200 | {"has_flashinfer": True}, {}, SINKS, "triton", f"run on triton: .*{PAGED}"),
    ],
)  # fmt: skip
def test_gpu_model_and_options_decide_the_base(
    facts: dict[str, bool],
    args: dict[str, Any],
    model: dict[str, Any],
    base: str,
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = make_runner([], args={"device": "cuda"} | args, config=model)
    before = runner.server_args.attention_backend
    with override_platform(**facts):
        found = stock.base_of(runner)
        warned = warnings_of(caplog)
        if base != "torch_native" and "extend" not in warning:
            assert stock.build_stock(runner) == (base, f"made {base}")
    module, cls, arguments = (stock._CUDA | stock._CPU)[base]
    assert (found.name, found.cls.__name__) == (base, cls)
    assert found.cls.__module__ == f"sglang.srt.layers.attention.{module}"
    workspace = {"init_new_workspace": False} if base == "flashinfer" else {}
    assert found.arguments == arguments | workspace
    assert [bool(re.search(warning, each)) for each in warned] == [True] * bool(warning), warned
    assert runner.server_args.attention_backend == before
    assert not getattr(runner.server_args, "_resolved_overrides", None)


def test_a_default_that_cannot_be_extended_is_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(stock._CUDA, "fa3")
    args, model = server_args(), model_config()
    with override_platform(**HOPPER):
        assert stock.extended(args, model) == ("fa3", "")
        named = server_args(**_backends("triton", "pat", None))
        assert stock.extended(named, model) == ("triton", "triton")


def test_a_flashinfer_older_than_sglang_asks_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"device": "cuda", "prefill_attention_backend": "flashinfer"}
    runner = make_runner([], args=args)
    installed = "sglang.srt.utils.common.version"
    for newer in ("99.0", "99.0+cu130"):
        monkeypatch.setattr(installed, lambda _, found=newer: found)
        assert stock.base_of(runner).name == "flashinfer"
    monkeypatch.setattr(installed, lambda _: "0.0.1")
    with pytest.raises(Exception, match=r"version 0\.0\.1, .* pip install flashinfer_python==\d"):
        stock.base_of(runner)
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    assert stock.base_of(runner).name == "flashinfer"


@pytest.mark.parametrize(
    ("named", "runs"), [(None, "FlashBackend"), ("pat", "FlashBackend"), ("triton", "triton")]
)
def test_prefill_runs_on_the_base_unless_another_backend_is_named(
    named: str | None, runs: str
) -> None:
    flash = type("FlashBackend", (), {})
    runner = SimpleNamespace(prefill_attention_backend_str=named)
    assert stock.prefill_attention(runner, flash) == runs


# The K/V cache's dtype.

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ALGORITHM = {"kv_cache_quant_algo": "FP8"}
FLOAT_8 = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}


@pytest.mark.parametrize(
    ("quantization", "section", "expected"),
    [
        (None, FP8 | ALGORITHM, BF16),  # SGLang does not read it there
        ("modelopt_fp8", FP8 | ALGORITHM, E4M3),
        ("modelopt_fp8", FP8 | FLOAT_8, E4M3),
        ("modelopt_fp8", FP8, BF16),
        ("modelopt_fp8", {}, BF16),  # SGLang itself refuses it
        ("modelopt_fp4", FP4 | {"kv_cache_scheme": "float8"}, E4M3),
        ("modelopt_fp4", FP4 | {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, BF16),
        ("fp8", BLOCKS | ALGORITHM, E4M3),
        ("fp8", BLOCKS | FLOAT_8, BF16),  # such schemes are read with ModelOpt's methods only
    ],
)
def test_the_dtype_that_a_checkpoint_declares_counts_unless_an_option_does(
    quantization: str | None, section: dict[str, Any], expected: torch.dtype
) -> None:
    model = model_config(quantization=quantization, hf_config={"quantization_config": section})
    assert stock.kv_cache_dtype("auto", model) == expected
    assert stock.kv_cache_dtype("bf16", model) == BF16
    assert model.hf_config.quantization_config == section


def test_what_modelopt_writes_beside_the_configuration_counts(tmp_path: Path) -> None:
    model = model_config(quantization="modelopt_fp8", model_path=str(tmp_path))
    assert stock.kv_cache_dtype("auto", model) == BF16
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": FP8 | ALGORITHM}))
    assert stock.kv_cache_dtype("auto", model) == E4M3
