# SPDX-License-Identifier: Apache-2.0
"""The attention backend that SGLang would run without the plugin. No server, no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import HOPPER, OLDER, model_config, server_args
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
