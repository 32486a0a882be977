# SPDX-License-Identifier: Apache-2.0
"""Why a server is refused or has nothing to gain, by its arguments and its model's configuration.
No server, no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import E4M3, FP16, QSA, model_config, server_args
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache import kv_cache_dtype
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.runtime_context import override_platform

from sglang_pat.srt import checkpoint, support

FP32 = torch.float32


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform on which SGLang itself refuses no dtype, as it does on a CPU."""
    monkeypatch.setattr(kv_cache_dtype, "current_platform", SRTPlatform())


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
def test_each_reason_to_refuse_names_the_way_out(
    args: dict[str, Any], model: dict[str, Any], pattern: str
) -> None:
    assert support.config_refusals(server_args(), model_config()) == []
    (reason,) = support.config_refusals(server_args(**args), model_config(**model))
    assert re.search(pattern, reason), reason


@pytest.mark.parametrize(
    ("variable", "device", "pattern"),
    [
        ("SGLANG_USE_HND_KVCACHE", "cuda", "layout 'hnd', not 'nhd': unset SGLANG_USE_HND_KVCACHE"),
        ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "cuda", f"^SGLANG_.*_GLUE_GRAPH: .*{CHOOSE}"),
        ("SGLANG_USE_CPU_ENGINE", "cpu", "^SGLANG_USE_CPU_ENGINE=1 .*SGLANG_PLATFORM=pat_cpu$"),
    ],
)
def test_environment_variables_of_sglang_that_are_refused(
    variable: str, device: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    (reason,) = support.config_refusals(server_args(device=device), model_config())
    assert re.search(pattern, reason), reason


def test_all_refusals_are_given_at_once() -> None:
    model = model_config(attention_arch=AttentionArch.MLA, is_encoder_decoder=True)
    reasons = support.config_refusals(server_args(enable_pdmux=True), model)
    assert ["MLA" in reasons[0], "decoder" in reasons[1], "pdmux" in reasons[2]] == [True] * 3


def test_an_option_that_sglang_sets_itself_is_refused_too() -> None:
    (reason,) = support.config_refusals(server_args({"enable_hisparse": True}), model_config())
    assert reason.startswith("--enable-hisparse")


# Reasons for which there is nothing to gain.


def _quantized(**section: Any) -> dict[str, Any]:
    config = {"quant_method": "modelopt", "quant_algo": "FP8"} | section
    return {"quantization": "modelopt_fp8", "hf_config": {"quantization_config": config}}


PD = {"disaggregation_mode": "decode"}
OFF = {"disable_radix_cache": True}  # under SGLang's own name
SPLIT = {"prefill_attention_backend": "pat", "decode_attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("args", "declared", "model", "reason", "way_out", "serves"),
    [
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_eagle_topk": 4,
                "speculative_num_draft_tokens": 70,
            },
            {},
            {},
            "--speculative-algorithm EAGLE drafts trees of 70 tokens",
            "set --speculative-num-draft-tokens to at most 64",
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
def test_each_reason_for_nothing_to_gain_names_the_way_out(
    args: dict[str, Any],
    declared: dict[str, Any],
    model: dict[str, Any],
    reason: str,
    way_out: str,
    serves: bool,
) -> None:
    assert support.idle_reasons(server_args(), model_config()) == []
    (found,) = support.idle_reasons(server_args(declared, **args), model_config(**model))
    assert reason in found.reason and way_out in found.way_out, found
    assert found.serves is serves
    message = support.idle_message([found])
    assert message.startswith(f"pat {'packs' if serves else 'serves'} nothing on this server: ")
    assert found.reason in message and found.way_out in message


def test_a_prefill_server_that_may_switch_its_role_serves() -> None:
    args = server_args(disaggregation_mode="prefill", enable_pd_role_switch=True)
    assert support.idle_reasons(args, model_config()) == []


def test_a_decode_server_with_its_radix_cache_packs() -> None:
    args = server_args(
        {"disable_radix_cache": False}, disaggregation_decode_enable_radix_cache=True, **PD
    )
    assert support.idle_reasons(args, model_config()) == []


@pytest.mark.parametrize(
    ("choice", "model"),
    [("fp8_e4m3", {}), ("auto", _quantized(kv_cache_quant_algo="FP8"))],
    ids=["the option", "the checkpoint"],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kv_in_fp8_e4m3_are_served(choice: str, model: dict[str, Any], device: str) -> None:
    args, config = server_args(kv_cache_dtype=choice, device=device), model_config(**model)
    assert checkpoint.kv_cache_dtype(choice, config) == E4M3
    assert support.config_refusals(args, config) == support.idle_reasons(args, config) == []
    (reason,) = support.config_refusals(
        server_args(kv_cache_dtype=choice), model_config(dtype=FP32, **model)
    )
    assert reason.startswith("the model is torch.float32, on cuda pat takes bfloat16, float16:")


@pytest.mark.parametrize(
    ("requests", "ranks", "min_batch", "serves"),
    [(2, 1, 2, True), (1, 1, 1, True), (3, 2, 2, False), (4, 2, 2, True), (3, 1, 4, False)],
)
def test_a_server_whose_batches_stay_too_small(
    requests: int, ranks: int, min_batch: int, serves: bool
) -> None:
    """Data parallel attention gives each rank its part of the requests."""
    args = server_args({"attn_dp_size": ranks}, max_running_requests=requests)
    found = support.idle_reasons(args, model_config(), min_batch=min_batch)
    assert (found == []) is serves
    for reason in found:
        assert reason.way_out == f"raise it to {min_batch * ranks} or more"


def test_minimax_gains_nothing_on_blackwell_where_it_runs_in_nvfp4() -> None:
    model = model_config("MiniMaxM3SparseForCausalLM", quantization="minimax_m3_nvfp4")
    with override_platform(is_blackwell=True):
        (found,) = support.idle_reasons(server_args(), model)
    assert "NVFP4" in found.reason
    with override_platform(is_blackwell=False):
        assert support.idle_reasons(server_args(), model) == []
