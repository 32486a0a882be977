# SPDX-License-Identifier: Apache-2.0
"""Each row of the tables: what it names and the way out, asked by a server's arguments, as the
launcher and ``doctor`` do, and by a model runner, as the backend does. No server, no GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import (
    E4M3,
    FP16,
    LATENTS,
    NGRAM,
    QSA,
    make_pool,
    make_runner,
    model_config,
    server_args,
)
from sglang.srt.configs import model_config as sglang_models
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache import kv_cache_dtype
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_pat import _C
from sglang_pat.gpus import GPUS, Machine
from sglang_pat.srt import support

FP32, E5M2 = torch.float32, torch.float8_e5m2


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 that runs our kernels, and a platform on which SGLang itself refuses no dtype, as it
    does on a CPU."""
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    monkeypatch.setattr(_C, "cuda_probe", lambda _: "", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(kv_cache_dtype, "current_platform", SRTPlatform())
    for row in (*support.MACHINE, *support.REFUSED):
        if row.variable:
            monkeypatch.delenv(row.variable, raising=False)


def by_arguments(
    model: dict[str, Any], declared: Any = None, gpu: Machine = GPUS["h200"], **args: Any
) -> support.Server:
    return support.by_arguments(server_args(declared, **args), model_config(**model), gpu)


def refused(server: support.Server) -> list[str]:
    return [str(reason) for reason in support.refusals(server)]


def _pool(quant: str | None = None, **changes: Any) -> dict[str, Any]:
    pool = make_pool(1)
    if quant:
        pool.get_kv_cache_quant_method = lambda: SimpleNamespace(name=quant)
    for name, value in changes.items():
        setattr(pool, name, value)
    return {"token_to_kv_pool": pool}


def _refused_runner(
    args: dict[str, Any], model: dict[str, Any], runner: dict[str, Any]
) -> list[str]:
    made = make_runner([], args={"device": "cuda"} | args, config=model, **_pool() | runner)
    return refused(support.by_runner(made))


# Refusals. Of each: arguments, the model's configuration, what a model runner has then, and what is
# found in the only reason, "" for none.

AUTO = "set --kv-cache-dtype auto$"
CHOOSE = "choose another --attention-backend$"
READ = "on cuda pat reads bfloat16, float16 and float8_e4m3fn: set .* auto or fp8_e4m3$"
UNIFIED = "slot ids .* drop --enable-unified-memory and --enable-page-major-kv-layout$"
OCR = {"architecture": "UnlimitedOCRForCausalLM"}
TRANSLATING = {"kv_index_translator": SimpleNamespace(is_translating=True)}
PHYSICAL = _pool(requires_physical_write_loc=True)
E4M3_OPTION, IN_E4M3 = {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": E4M3}
IN_FP32 = {"dtype": FP32, "kv_cache_dtype": FP32}
HND = "SGLANG_USE_HND_KVCACHE"


@pytest.mark.parametrize(
    ("args", "model", "runner", "pattern"),
    [
        ({}, {}, {}, ""),
        ({"device": "cpu"}, {}, {}, ""),
        (E4M3_OPTION, {}, IN_E4M3 | {"kv_cache_dtype_str": "fp8_e4m3"}, ""),
        (E4M3_OPTION | {"device": "cpu"}, {}, IN_E4M3, ""),
        ({"device": "cpu"}, {"dtype": FP32}, IN_FP32, ""),
        ({}, {}, _pool("unquantized"), ""),
        ({}, {}, _pool(full_kv_pool=object()), ""),
        ({"device": "xpu"}, {}, {}, f"on cpu, cuda, not on 'xpu': .*--device cpu .*, or {CHOOSE}"),
        ({}, LATENTS, {}, ""),
        ({}, LATENTS | {"dtype": FP16}, {"dtype": FP16, "kv_cache_dtype": FP16},
         "the model is torch.float16, on cuda pat takes bfloat16: set one as --dtype$"),
        ({"device": "cpu"}, LATENTS, {}, "uses MLA, .*torch_native .*: start the server on a GPU$"),
        (E4M3_OPTION, LATENTS, IN_E4M3, f"read latents in float8_e4m3fn: {AUTO[:-1]} or {CHOOSE}"),
        ({}, {"is_encoder_decoder": True}, {}, f"encoder-decoder .*: {CHOOSE}"),
        ({}, OCR, {"prefill_aware_swa": True}, f"its last tokens .Unlimited.*: {CHOOSE}"),
        ({}, {"dtype": FP32}, IN_FP32,
         "the model is torch.float32, on cuda pat takes bfloat16, float16: set one as --dtype$"),
        (E4M3_OPTION, {"dtype": FP32}, IN_E4M3, "the model is torch.float32, .*one as --dtype$"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, {"kv_cache_dtype": E5M2}, f"float8_e5m2, {READ}"),
        ({"kv_cache_dtype": "bf16"}, {"dtype": FP16}, {},
         f"torch.bfloat16 but the model torch.float16: {AUTO}"),
        ({"kv_cache_dtype": "mxfp8"}, {}, {"kv_cache_dtype_str": "mxfp8"}, f"by mxfp8: {AUTO}"),
        ({"enable_unified_memory": True}, {}, TRANSLATING, UNIFIED),
        ({"enable_page_major_kv_layout": True}, {}, PHYSICAL, UNIFIED),
        *((args, {}, {}, f"^--{option}: .*; drop it or {CHOOSE}") for option, args in {
            "enable-two-batch-overlap": {"enable_two_batch_overlap": True},
            "enable-pdmux": {"enable_pdmux": True},
            "enable-deterministic-inference": {"enable_deterministic_inference": True},
            "enable-torch-compile": {"enable_torch_compile": True},
            "dcp-size": {"dcp_size": 2},
            "attn-cp-size": {"attn_cp_size": 2, "tp_size": 2},
            "enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
            "enable-hisparse": {"enable_hisparse": True},
            "prefill-only-disable-kv-cache": {"prefill_only_disable_kv_cache": True},
            "enable-nvidia-megakernel": {"enable_nvidia_megakernel": True},
        }.items() if all(hasattr(ServerArgs, name) for name in args)),  # SGLang 0.5.22 lacks one
    ],
)  # fmt: skip
def test_arguments_and_a_runner_are_refused_alike(
    args: dict[str, Any], model: dict[str, Any], runner: dict[str, Any], pattern: str
) -> None:
    found = refused(by_arguments(model, **args))
    assert [bool(re.search(pattern, reason)) for reason in found] == [True] * bool(pattern), found
    assert _refused_runner(args, model, runner) == found


@pytest.mark.parametrize(
    ("variable", "device", "pattern"),
    [
        (HND, "cuda", f"layout 'hnd', not 'nhd': unset {HND}"),
        ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "cuda", f"^SGLANG_.*_GLUE_GRAPH: .*; .*{CHOOSE}"),
        ("SGLANG_USE_CPU_ENGINE", "cpu", "^SGLANG_USE_CPU_ENGINE=1 .*SGLANG_PLATFORM=pat_cpu$"),
    ],
)
def test_environment_variables_of_sglang_that_are_refused(
    variable: str, device: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    (reason,) = refused(by_arguments({}, device=device))
    assert re.search(pattern, reason), reason
    pools: list[dict[str, Any]] = [{}]
    if variable == HND:
        hybrid = SimpleNamespace(kv_cache_layout="hnd")
        pools = [_pool(kv_cache_layout="hnd"), _pool(full_kv_pool=hybrid)]
    for pool in pools:
        assert _refused_runner({"device": device}, {}, pool) == [reason]
    assert variable in {row.variable for row in (*support.MACHINE, *support.REFUSED)}


def test_what_sglang_declares_or_a_pool_shows_counts_like_an_option() -> None:
    (reason,) = refused(by_arguments({}, {"enable_hisparse": True}))
    assert reason.startswith("--enable-hisparse")
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    config = {"quantization": "modelopt_fp8", "hf_config": {"quantization_config": section}}
    assert by_arguments(config).kv_dtype == E4M3
    (reason,) = _refused_runner({}, {}, _pool("fp4"))
    assert re.search(f"quantized by fp4: {AUTO}", reason), reason


def test_gpus_by_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100"))

    def against(major: int, minor: int) -> list[str]:
        return refused(by_arguments({}, gpu=Machine("it", 1, major, minor, 0)))

    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (13, 0)):
        assert against(*capability) == []
    for capability in ((7, 5), (9, 1)):
        (reason,) = against(*capability)
        assert f"do not run on it of {capability[0]}.{capability[1]}: choose another" in reason
        assert "8.x, 9.0, 10.x, 12.x, 10.0 and later as PTX" in reason
    monkeypatch.delattr(_C, "cuda_probe")
    (reason,) = against(9, 0)
    assert "PAT_CUDA=OFF" in reason and re.search(CHOOSE, reason)
    assert _refused_runner({}, {}, {}) == [reason]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (reason,) = refused(support.by_arguments(server_args(), model_config()))
    assert reason.startswith("no GPU was found for --device cuda: start the server with SGLANG_P")


# Nothing to gain. Of each: arguments, what SGLang declares, the model's configuration, what is
# found in the only reason, "" for none, and in its way out. Where ``serves`` is among the words,
# pat runs decode all the same.

PD, PREFILLS = {"disaggregation_mode": "decode"}, {"disaggregation_mode": "prefill"}
OFF = {"disable_radix_cache": True}  # under SGLang's own name
SPLIT = {"prefill_attention_backend": "pat", "decode_attention_backend": "fa3"}
MINIMAX = {"architecture": "MiniMaxM3SparseForCausalLM", "quantization": "minimax_m3_nvfp4"}
EAGLE = NGRAM | {"speculative_algorithm": "EAGLE"}


def _latents_of(heads: int) -> dict[str, Any]:
    return LATENTS | {"get_num_attention_heads": lambda ranks: heads // ranks}


# Of two backends, pat is over triton.
SPLIT_DRAFTS = NGRAM | {
    "attention_backend": "triton",
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "pat",
}


@pytest.mark.parametrize(
    ("args", "declared", "model", "reason", "way_out"),
    [
        (PREFILLS, {}, {}, "never decodes", "decode server"),
        (PREFILLS | {"enable_pd_role_switch": True}, {}, {}, "", ""),
        (PD, OFF, {}, "decode server", "set --disaggregation-decode-enable-radix-cache"),
        (PD | {"disaggregation_decode_enable_radix_cache": True}, {"disable_radix_cache": False},
         {}, "", ""),
        (OFF, {}, {}, "radix cache, which tells shared prefixes, is off", "drop --disable-radix-"),
        ({}, OFF, {}, "is off", "SGLang turned the cache off for this model"),
        ({"max_running_requests": 1}, {}, {}, "--max-running-requests 1 lets at most 1 decode at a "
         "time, and pat serves batches of 2 or more", "raise it to 2 or more"),
        # Data parallel attention gives each rank its part of the requests.
        ({"max_running_requests": 3}, {"attn_dp_size": 2}, {}, "at most 1 decode", "raise it to 4"),
        ({"max_running_requests": 4}, {"attn_dp_size": 2}, {}, "", ""),
        ({}, {}, {"is_generation": False}, "embedding or reward", "nothing is lost"),
        ({}, {}, {"attention_arch": AttentionArch.SSM}, "no attention", "drop"),
        ({}, {}, {"hf_config": QSA}, "(QSA)", "another --attention-backend"),
        *[({}, {}, MINIMAX, "NVFP4 sparse", "another --attention-backend")]
        * hasattr(sglang_models, "uses_minimax_m3_nvfp4_native_stack"),
        (SPLIT, {}, {}, "decode runs on fa3", "set --decode-attention-backend pat"),
        ({"attention_backend": "triton", "prefill_attention_backend": "pat"}, {}, {},
         "decode runs on triton", "set --decode-attention-backend pat"),
        ({}, {"attention_backend": "dsv4"}, {}, "on dsv4, which pat cannot extend", "drop pat"),
        ({}, {"attention_backend": "flashmla"}, LATENTS, "on flashmla, which pat", "drop pat"),
        (EAGLE, {}, LATENTS, "", ""),
        (EAGLE | {"speculative_num_draft_tokens": 5}, {}, LATENTS, "5 draft tokens of a request "
         "fill more than 32 packed rows (query", "set --speculative-num-steps to at most 3"),
        (NGRAM | {"speculative_num_draft_tokens": 8}, {"tp_size": 2}, LATENTS, "", ""),
        (NGRAM | {"speculative_num_draft_tokens": 9}, {"tp_size": 2}, LATENTS, "9 draft tokens",
         "set --speculative-num-draft-tokens to at most 8"),
        (EAGLE, {}, _latents_of(20), "4 draft tokens of a request", "drop that option, or pat"),
        (EAGLE, {}, _latents_of(64), "", ""),  # without drafts neither: its layers are not served
        ({"dllm_algorithm": "LowConfidence"}, {}, {}, "never decodes", "nothing is lost"),
        ({"speculative_algorithm": "DFLASH"}, {}, {}, "that is SGLang's attention: pat verifies "
         "those of EAGLE, EAGLE3, STANDALONE, NGRAM", "drop that option"),
        (NGRAM | {"speculative_num_draft_tokens": 65}, {}, {}, "NGRAM drafts trees of 65 tokens",
         "to at most 16"),  # of four query heads a KV head, for 64 rows
        (EAGLE | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 65}, {}, {},
         "EAGLE drafts trees of 65 tokens", "to at most 16"),
        (NGRAM | {"speculative_num_draft_tokens": 65, "device": "cpu"}, {}, {},
         "NGRAM drafts trees of 65 tokens", "to at most 64"),
        (EAGLE | {"speculative_adaptive": True}, {}, {}, "draft tokens changes", "drop that"),
        (SPLIT_DRAFTS, {}, {}, "on --prefill-attention-backend fa3, as",
         "--speculative-attention-mode"),
        (NGRAM, {"page_size": 64}, {}, "NGRAM may draft trees, and pat verifies them on pages of 1 "
         "token, not of 64", "--page-size 1"),
    ],
)  # fmt: skip
def test_each_reason_for_nothing_to_gain_names_the_way_out(
    args: dict[str, Any], declared: dict[str, Any], model: dict[str, Any], reason: str, way_out: str
) -> None:
    with override_platform(is_blackwell=True):
        found = support.idle_reasons(by_arguments(model, declared, **args), 2)
    assert [reason in each.words and way_out in each.way_out for each in found] == (
        [True] * bool(reason)
    ), found
    for each in found:
        assert each.serves is ("radix" in each.way_out or "turned the cache off" in each.way_out)
        message = support.idle_message([each])
        assert each.words in message and each.way_out in message
        assert ("packs nothing" in message) is each.serves


@pytest.mark.parametrize(
    ("args", "trees"),
    [
        ({}, True),  # NGRAM's, whatever its breadth
        ({"speculative_algorithm": "EAGLE3"}, False),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 65}, False),
        ({"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 4}, True),
        ({"speculative_eagle_topk": 2, "device": "cpu"}, True),
        ({"prefill_attention_backend": "pat"}, True),
        ({"prefill_attention_backend": "fa3"}, True),  # which is the base of decode, too
        (SPLIT_DRAFTS | {"speculative_attention_mode": "decode"}, True),
    ],
)
def test_speculation_that_is_served(args: dict[str, Any], trees: bool) -> None:
    from sglang.srt.environ import envs

    server = by_arguments({}, **NGRAM | args)
    assert support.idle_reasons(server, 2) == []
    assert support.draft_tokens_of(server.args) == server.args.speculative_num_draft_tokens
    assert support.may_be_trees(server.args) is trees
    with envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.override(True):
        (reason,) = support.idle_reasons(server, 2)
        assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM" in reason.words
        assert support.draft_tokens_of(server.args) == 1
    assert support.draft_tokens_of(by_arguments({}).args) == 1


def test_latents_are_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "compute_100"))
    for name, served in (("h200", True), ("h100", True), ("a100", False), ("b200", False)):
        found = support.idle_reasons(by_arguments(LATENTS, gpu=GPUS[name]), 2)
        words = [reason.words for reason in found]
        assert served == (words == []) and all("compute capability 9.0" in each for each in words)
        assert support.idle_reasons(by_arguments({}, gpu=GPUS[name]), 2) == []
    with override_platform(is_blackwell=False):
        assert support.idle_reasons(by_arguments(MINIMAX), 2) == []
    assert support.idle_reasons(by_arguments({}, max_running_requests=1), 1) == []
