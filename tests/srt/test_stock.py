# SPDX-License-Identifier: Apache-2.0
"""What SGLang would choose without the plugin: the attention backend, which the plugin extends or
cannot, and the K/V cache's dtype that a checkpoint asks for. No server, no GPU."""

from __future__ import annotations

import json
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
from kit.semantics import HOME, definitions
from sglang.srt.layers.attention import attention_registry
from sglang.srt.runtime_context import override_platform

from sglang_pat.srt import stock

LLAMA_4 = "Llama4ForConditionalGeneration"


@pytest.mark.parametrize(
    ("facts", "architecture", "expected"),
    [
        (HOPPER, "LlamaForCausalLM", "fa3"),
        (HOPPER, LLAMA_4, "fa3"),
        (OLDER | {"has_flashinfer": True}, "LlamaForCausalLM", "flashinfer"),
        (OLDER | {"has_flashinfer": False}, "LlamaForCausalLM", "triton"),
        (OLDER | {"has_flashinfer": True}, LLAMA_4, "triton"),  # SGLang's override for Llama 4
    ],
)
def test_without_options_gpu_and_model_decide(
    facts: dict[str, bool], architecture: str, expected: str
) -> None:
    args, model = server_args(), model_config(architecture)
    before = list(getattr(args, "_resolved_overrides", None) or ())
    with override_platform(**facts):
        assert stock.stock_backend(args, model) == expected
    assert args.attention_backend == "pat"
    assert list(getattr(args, "_resolved_overrides", None) or ()) == before


def test_a_model_with_attention_sinks_does_not_run_on_flashinfer() -> None:
    with override_platform(has_flashinfer=True, **OLDER):
        found = stock.stock_backend(server_args(), model_config(has_attention_sinks=True))
    assert found == "triton"


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "expected"),
    [
        ("triton", "pat", None, "triton"),
        (None, "pat", "flashinfer", "flashinfer"),
        ("fa4", "pat", "pat", "fa4"),
        ("pat", "triton", None, "triton"),
        ("pat", "pat", "pat", "fa3"),
    ],
)
def test_options_for_prefill_and_decode_name_it(
    prefill: str | None, decode: str, both: str | None, expected: str
) -> None:
    args = server_args(
        prefill_attention_backend=prefill, decode_attention_backend=decode, attention_backend=both
    )
    with override_platform(**HOPPER):
        assert stock.stock_backend(args, model_config()) == expected


def test_on_a_cpu_it_is_torch_native() -> None:
    assert stock.stock_backend(server_args(device="cpu"), model_config()) == "torch_native"


# The base.

GPU = {"device": "cuda"}
B200 = {"is_hopper_with_cuda_12_3": False, "is_sm90": False, "is_sm100": True}


@pytest.fixture
def gpu_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty classes under the names of SGLang's: importing its modules would load kernels."""

    def module(name: str) -> SimpleNamespace:
        defined = definitions(name.removeprefix(f"{HOME}."))
        return SimpleNamespace(**{cls: type(cls, (), {}) for cls in defined})

    monkeypatch.setattr(stock, "import_module", module)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize(
    ("facts", "args", "name", "cls", "arguments"),
    [
        (HOPPER, {}, "fa3", "FlashAttentionBackend", {}),
        (
            OLDER | {"has_flashinfer": True},
            {},
            "flashinfer",
            "FlashInferAttnBackend",
            {"init_new_workspace": False},
        ),
        (OLDER | {"has_flashinfer": False}, {}, "triton", "TritonAttnBackend", {}),
        (
            HOPPER,
            {"attention_backend": "triton", "decode_attention_backend": "pat"},
            "triton",
            "TritonAttnBackend",
            {},
        ),
        (
            HOPPER,
            {"prefill_attention_backend": "fa4", "decode_attention_backend": "pat"},
            "fa4",
            "FlashAttentionBackend",
            {"fa_impl_ver": 4},
        ),
    ],
)
def test_gpu_and_options_decide_the_base(
    facts: dict[str, bool],
    args: dict[str, Any],
    name: str,
    cls: str,
    arguments: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with override_platform(**facts):
        found = stock.base_of(make_runner([], args=GPU | args))
    assert (found.name, found.cls.__name__, found.arguments) == (name, cls, arguments)
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize("named", ["torch_native", "flex_attention"])
def test_a_named_backend_that_cannot_be_extended_gives_way_to_the_default(
    named: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = GPU | {"attention_backend": named, "decode_attention_backend": "pat"}
    with override_platform(**HOPPER):
        assert stock.base_of(make_runner([], args=args)).name == "fa3"
    (warning,) = warnings_of(caplog)
    assert f"cannot extend '{named}'" in warning and warning.endswith("run on fa3")


def test_a_default_that_cannot_be_extended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(stock._CUDA, "fa3")
    with override_platform(**HOPPER), pytest.raises(RuntimeError) as refused:
        stock.base_of(make_runner([], args=GPU))
    assert "cannot extend 'fa3'" in str(refused.value)
    assert "--decode-attention-backend pat" in str(refused.value)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize("pages", [16, 32, 64, 128])
def test_the_base_on_a_b200_is_trtllm_mha_with_its_page_sizes(
    pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    with override_platform(**B200):
        found = stock.base_of(make_runner([], args=GPU | {"page_size": pages}))
    assert (found.name, found.cls.__name__) == ("trtllm_mha", "TRTLLMHAAttnBackend")
    assert not found.arguments and not warnings_of(caplog)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize(
    ("facts", "config", "name"),
    [
        ({"has_flashinfer": True}, {}, "flashinfer"),
        ({"has_flashinfer": False}, {}, "triton"),
        ({"has_flashinfer": True}, {"has_attention_sinks": True}, "triton"),
    ],
)
def test_the_base_on_a_b200_with_pages_of_one_token(
    facts: dict[str, bool], config: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner([], args=GPU, config=config)
    with override_platform(**B200 | facts):
        assert stock.base_of(runner).name == name
        made = {name: lambda runner: "made"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_registry, "ATTENTION_BACKENDS", made)
            assert stock.build_stock(runner) == (name, "made")
    warning, again = warnings_of(caplog)
    assert warning == again
    assert f"run on {name}" in warning and "--page-size 64 lets it run them" in warning


@pytest.mark.usefixtures("gpu_modules")
def test_a_flashinfer_older_than_sglang_asks_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner([], args=GPU | {"prefill_attention_backend": "flashinfer"})
    assert stock.base_of(runner).name == "flashinfer"
    for newer in ("99.0", "99.0+cu130"):
        monkeypatch.setattr(stock.metadata, "version", lambda _, found=newer: found)
        assert stock.base_of(runner).name == "flashinfer"
    monkeypatch.setattr(stock.metadata, "version", lambda _: "0.0.1")
    with pytest.raises(RuntimeError, match=r"flashinfer_python is 0\.0\.1, SGLang needs \d"):
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


@pytest.mark.parametrize(
    ("quantization", "section", "expected"),
    [
        (None, {"kv_cache_quant_algo": "FP8"}, BF16),  # SGLang does not read it there
        ("modelopt_fp8", {"kv_cache_quant_algo": "FP8"}, E4M3),
        ("modelopt_fp8", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, E4M3),
        ("modelopt_fp4", {"kv_cache_scheme": "float8"}, E4M3),
        ("modelopt_fp4", {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, BF16),
        ("modelopt_fp8", {}, BF16),
        ("fp8", {"kv_cache_quant_algo": "FP8"}, E4M3),
        # SGLang reads schemes of this form with ModelOpt's methods only.
        ("fp8", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, BF16),
        ("fp8", {}, BF16),
    ],
)
def test_the_dtype_that_a_checkpoint_declares_counts_unless_an_option_does(
    quantization: str | None, section: dict[str, Any], expected: torch.dtype
) -> None:
    model = model_config(quantization=quantization, hf_config={"quantization_config": section})
    assert stock.kv_cache_dtype("auto", model) == expected
    assert stock.kv_cache_dtype("bf16", model) == BF16


def test_what_modelopt_writes_beside_the_configuration_counts(tmp_path: Path) -> None:
    model = model_config(quantization="modelopt_fp8", model_path=str(tmp_path))
    assert stock.kv_cache_dtype("auto", model) == BF16
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert stock.kv_cache_dtype("auto", model) == E4M3


def test_of_a_model_by_name_the_file_in_the_local_cache_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not fetched: a name that is not in the cache has no such file."""
    model = model_config(quantization="modelopt_fp8", model_path="some/model", revision="abc")
    cached = tmp_path / "hf_quant_config.json"
    cached.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    known = {("some/model", cached.name, "abc"): str(cached)}

    def look_up(name: str, file: str, revision: str) -> str | None:
        return known.get((name, file, revision))

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look_up)
    assert stock.kv_cache_dtype("auto", model) == E4M3
    known.clear()
    assert stock.kv_cache_dtype("auto", model) == BF16
