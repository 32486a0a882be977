# SPDX-License-Identifier: Apache-2.0
"""What is said of a server from its arguments and its model's configuration. No server, no GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache import kv_cache_dtype
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from sglang_pat.srt import checkpoint, stock, support

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
QSA = {  # as parse_qsa_profile asks of a model's configuration
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses some dtypes on a CPU by itself, by the platform that it found first."""
    monkeypatch.setattr(kv_cache_dtype, "current_platform", SRTPlatform())


def _args(declared: dict[str, Any] | None = None, **values: Any) -> ServerArgs:
    """Arguments for ``pat`` on a GPU; ``declared``: what SGLang's resolution adds to them."""
    args = ServerArgs(
        model_path="dummy", **({"device": "cuda", "attention_backend": "pat"} | values)
    )
    if declared:
        declare_resolution(args, "test", **declared)
    return args


def _model(architecture: str = "LlamaForCausalLM", **changes: Any) -> SimpleNamespace:
    """A model's configuration that is served, but for ``changes``."""
    config = PretrainedConfig(architectures=[architecture], **changes.pop("hf_config", {}))
    values = {
        "hf_config": config,
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "is_generation": True,
        "has_asymmetric_kv": False,
        "has_attention_sinks": False,
        "dtype": BF16,
        "quantization": None,
        "model_path": "dummy",
        "revision": None,
    }
    return SimpleNamespace(**(values | changes))


# Refusals.

AUTO = "set --kv-cache-dtype auto"
CHOOSE = "choose another --attention-backend$"


@pytest.mark.parametrize(
    ("args", "model", "pattern"),
    [
        ({"device": "xpu"}, {}, f"not on 'xpu': .* {CHOOSE}"),
        ({}, {"attention_arch": AttentionArch.MLA}, f"uses MLA.*: {CHOOSE}"),
        ({}, {"is_encoder_decoder": True}, f"encoder-decoder.*: {CHOOSE}"),
        ({}, {"architecture": "UnlimitedOCRForCausalLM"}, f"window of its last tokens.*: {CHOOSE}"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, f"is torch.float8_e5m2, on cuda pat reads .*{AUTO}"),
        ({"kv_cache_dtype": "bf16"}, {"dtype": FP16}, f"bfloat16 but the model .*16: {AUTO}$"),
        ({"kv_cache_dtype": "mxfp8"}, {}, f"quantized by mxfp8: {AUTO}$"),
        ({"enable_unified_memory": True}, {}, "drop --enable-unified-memory and"),
        ({"enable_page_major_kv_layout": True}, {}, "and --enable-page-major-kv-layout$"),
        ({"enable_two_batch_overlap": True}, {}, f"^--enable-two-batch-overlap: .*{CHOOSE}"),
        ({"enable_pdmux": True}, {}, f"^--enable-pdmux: .*{CHOOSE}"),
        ({"enable_deterministic_inference": True}, {}, "^--enable-deterministic-inference: "),
        ({"enable_torch_compile": True}, {}, f"^--enable-torch-compile: .*{CHOOSE}"),
        ({"dcp_size": 2}, {}, f"^--dcp-size > 1: .*{CHOOSE}"),
        ({"attn_cp_size": 2, "tp_size": 2}, {}, f"^--attn-cp-size > 1: .*{CHOOSE}"),
        ({"enable_kv_cache_sharding": True}, {}, f"^--enable-kv-cache-sharding: .*{CHOOSE}"),
        ({"enable_hisparse": True}, {}, f"^--enable-hisparse: .*{CHOOSE}"),
        ({"prefill_only_disable_kv_cache": True}, {}, "^--prefill-only-disable-kv-cache: "),
    ],
)
def test_each_refusal(args: dict[str, Any], model: dict[str, Any], pattern: str) -> None:
    assert support.config_refusals(_args(), _model()) == []
    (reason,) = support.config_refusals(_args(**args), _model(**model))
    assert re.search(pattern, reason), reason


@pytest.mark.parametrize(
    ("variable", "device", "pattern"),
    [
        ("SGLANG_USE_HND_KVCACHE", "cuda", "layout 'hnd', not 'nhd': unset SGLANG_USE_HND_KVCACHE"),
        ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "cuda", f"^SGLANG_.*_GLUE_GRAPH: .*{CHOOSE}"),
        ("SGLANG_USE_CPU_ENGINE", "cpu", "^SGLANG_USE_CPU_ENGINE=1 .*SGLANG_PLATFORM=pat_cpu$"),
    ],
)
def test_variables_of_sglang(
    variable: str, device: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    (reason,) = support.config_refusals(_args(device=device), _model())
    assert re.search(pattern, reason), reason


def test_all_refusals_are_given_at_once() -> None:
    model = _model(attention_arch=AttentionArch.MLA, is_encoder_decoder=True)
    reasons = support.config_refusals(_args(enable_pdmux=True), model)
    assert ["MLA" in reasons[0], "decoder" in reasons[1], "pdmux" in reasons[2]] == [True] * 3


def test_what_resolution_decides_counts() -> None:
    (reason,) = support.config_refusals(_args({"enable_hisparse": True}), _model())
    assert reason.startswith("--enable-hisparse")


# Reasons for which there is nothing to gain.


def _quantized(**section: Any) -> dict[str, Any]:
    config = {"quant_method": "modelopt", "quant_algo": "FP8"} | section
    return {"quantization": "modelopt_fp8", "hf_config": {"quantization_config": config}}


PD = {"disaggregation_mode": "decode"}
OFF = {"disable_radix_cache": True}  # as SGLang declares it
SPLIT = {"prefill_attention_backend": "pat", "decode_attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("args", "declared", "model", "reason", "way_out", "serves"),
    [
        (
            {"speculative_algorithm": "EAGLE"},
            {},
            {},
            "--speculative-algorithm EAGLE the model verifies drafts",
            "drop that option",
            False,
        ),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            {},
            {},
            "fp8_e4m3 (--kv-cache-dtype fp8_e4m3)",
            "set --kv-cache-dtype auto",
            False,
        ),
        (
            {},
            {},
            _quantized(kv_cache_quant_algo="FP8"),
            "fp8_e4m3, as the checkpoint asks for",
            "set --kv-cache-dtype bfloat16",
            False,
        ),
        (PD, OFF, {}, "decode server", "--disaggregation-decode-enable-radix-cache", True),
        ({"disaggregation_mode": "prefill"}, {}, {}, "never decodes", "decode server", False),
        (OFF, {}, {}, "is off", "drop --disable-radix-cache", True),
        ({}, OFF, {}, "is off", "SGLang turned the cache off for this model", True),
        (
            {"max_running_requests": 1},
            {},
            {},
            "--max-running-requests 1 lets at most 1 decode at a time, and pat serves batches of 2",
            "raise it to 2 or more",
            False,
        ),
        ({}, {}, {"is_generation": False}, "embedding or reward", "nothing is lost", False),
        ({}, {}, {"attention_arch": AttentionArch.SSM}, "no attention", "drop", False),
        ({}, {}, {"hf_config": QSA}, "(QSA)", "another --attention-backend", False),
        (
            SPLIT,
            {},
            {},
            "--decode-attention-backend fa3",
            "drop that option, or set it to pat",
            False,
        ),
        ({}, {"attention_backend": "triton"}, {}, "decode runs on triton", "replaces", False),
    ],
)
def test_each_idle_reason(
    args: dict[str, Any],
    declared: dict[str, Any],
    model: dict[str, Any],
    reason: str,
    way_out: str,
    serves: bool,
) -> None:
    assert support.idle_reasons(_args(), _model()) == []
    (found,) = support.idle_reasons(_args(declared, **args), _model(**model))
    assert reason in found.reason and way_out in found.way_out, found
    assert found.serves is serves
    message = support.idle_message([found])
    assert message.startswith(f"pat {'packs' if serves else 'serves'} nothing on this server: ")
    assert found.reason in message and found.way_out in message


def test_a_prefill_server_that_may_switch_its_role_serves() -> None:
    args = _args(disaggregation_mode="prefill", enable_pd_role_switch=True)
    assert support.idle_reasons(args, _model()) == []


def test_a_decode_server_with_its_radix_cache_packs() -> None:
    args = _args(
        {"disable_radix_cache": False}, disaggregation_decode_enable_radix_cache=True, **PD
    )
    assert support.idle_reasons(args, _model()) == []


def test_the_known_dtype_of_the_cache_counts_for_more_than_the_options() -> None:
    (found,) = support.idle_reasons(_args(), _model(), E4M3)
    assert "fp8_e4m3" in found.reason
    assert support.idle_reasons(_args(kv_cache_dtype="fp8_e4m3"), _model(), BF16) == []


@pytest.mark.parametrize(
    ("requests", "ranks", "min_batch", "serves"),
    [(2, 1, 2, True), (1, 1, 1, True), (3, 2, 2, False), (4, 2, 2, True), (3, 1, 4, False)],
)
def test_a_server_whose_batches_stay_too_small(
    requests: int, ranks: int, min_batch: int, serves: bool
) -> None:
    """Data parallel attention gives each rank its part of the requests."""
    args = _args({"attn_dp_size": ranks}, max_running_requests=requests)
    found = support.idle_reasons(args, _model(), min_batch=min_batch)
    assert (found == []) is serves
    for reason in found:
        assert reason.way_out == f"raise it to {min_batch * ranks} or more"


def test_minimax_on_its_native_stack() -> None:
    model = _model("MiniMaxM3SparseForCausalLM", quantization="minimax_m3_nvfp4")
    with override_platform(is_blackwell=True):
        (found,) = support.idle_reasons(_args(), model)
    assert "NVFP4" in found.reason
    with override_platform(is_blackwell=False):
        assert support.idle_reasons(_args(), model) == []


# The checkpoint's K/V dtype.


@pytest.mark.parametrize(
    ("quantization", "section", "expected"),
    [
        (None, {"kv_cache_quant_algo": "FP8"}, BF16),  # SGLang does not read it there
        ("modelopt_fp8", {"kv_cache_quant_algo": "FP8"}, E4M3),
        ("modelopt_fp8", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, E4M3),
        ("modelopt_fp4", {"kv_cache_scheme": "float8"}, E4M3),
        ("modelopt_fp4", {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, BF16),
        ("fp8", {"kv_cache_quant_algo": "FP8"}, E4M3),
        ("fp8", {}, BF16),
    ],
)
def test_the_cache_that_a_checkpoint_declares(
    quantization: str | None, section: dict[str, Any], expected: torch.dtype
) -> None:
    model = _model(quantization=quantization, hf_config={"quantization_config": section})
    assert checkpoint.kv_cache_dtype("auto", model) == expected
    assert checkpoint.kv_cache_dtype("bf16", model) == BF16


def test_what_modelopt_writes_beside_the_configuration(tmp_path: Path) -> None:
    model = _model(quantization="modelopt_fp8", model_path=str(tmp_path))
    assert checkpoint.kv_cache_dtype("auto", model) == BF16
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert checkpoint.kv_cache_dtype("auto", model) == E4M3


# The backend of stock SGLang.

HOPPER = {"is_hopper_with_cuda_12_3": True, "is_sm90": True, "is_sm100": False}
OLDER = {"is_hopper_with_cuda_12_3": False, "is_sm90": False, "is_sm100": False}
LLAMA_4 = "Llama4ForConditionalGeneration"


@pytest.mark.parametrize(
    ("capability", "facts", "architecture", "expected"),
    [
        ("9.0", HOPPER, "LlamaForCausalLM", "fa3"),
        ("9.0", HOPPER, LLAMA_4, "fa3"),
        ("8.0", OLDER | {"has_flashinfer": True}, "LlamaForCausalLM", "flashinfer"),
        ("8.9", OLDER | {"has_flashinfer": True}, "LlamaForCausalLM", "flashinfer"),
        ("8.9", OLDER | {"has_flashinfer": False}, "LlamaForCausalLM", "triton"),
        ("8.0", OLDER | {"has_flashinfer": True}, LLAMA_4, "triton"),  # its own override
    ],
)
def test_the_default_by_gpu_and_model(
    capability: str, facts: dict[str, bool], architecture: str, expected: str
) -> None:
    args, model = _args(), _model(architecture)
    before = list(getattr(args, "_resolved_overrides", None) or ())
    with override_platform(**facts):
        assert stock.stock_backend(args, model) == expected
    assert args.attention_backend == "pat"
    assert list(getattr(args, "_resolved_overrides", None) or ()) == before


def test_attention_sinks_have_no_flashinfer() -> None:
    with override_platform(has_flashinfer=True, **OLDER):
        assert stock.stock_backend(_args(), _model(has_attention_sinks=True)) == "triton"


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
def test_split_options_name_it(
    prefill: str | None, decode: str, both: str | None, expected: str
) -> None:
    args = _args(
        prefill_attention_backend=prefill, decode_attention_backend=decode, attention_backend=both
    )
    with override_platform(**HOPPER):
        assert support.stock_backend(args, _model()) == expected


def test_a_cpu_has_one() -> None:
    assert stock.stock_backend(_args(device="cpu"), _model()) == "torch_native"
