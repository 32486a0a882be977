# SPDX-License-Identifier: Apache-2.0
"""Each row of the tables: what it names and the way out, asked by a server's arguments, as the
launcher and ``doctor`` do, and by a model runner, as the backend does. No server, no GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import E4M3, FP16, QSA, make_pool, make_runner, model_config, server_args
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache import kv_cache_dtype
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_pat import _C
from sglang_pat.srt import stock, support

FP32, E5M2 = torch.float32, torch.float8_e5m2
HERE = ("H200", (9, 0))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 that runs our kernels, and a platform on which SGLang itself refuses no dtype, as it
    does on a CPU."""
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    monkeypatch.setattr(_C, "cuda_probe", lambda _: {"ok": True}, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kv_cache_dtype, "current_platform", SRTPlatform())
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def defaults() -> Any:
    """SGLang's configuration as a scheduler publishes it, without any option."""
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        return runtime_context.create_context(
            ServerArgs(model_path="dummy", device="cpu"), role="scheduler"
        )


@pytest.fixture
def published(defaults: Any) -> Iterator[None]:
    with runtime_context.use_context(defaults):
        yield


def by_arguments(model: dict[str, Any], declared: Any = None, **args: Any) -> support.Server:
    return support.by_arguments(server_args(declared, **args), model_config(**model), HERE)


def refused(server: support.Server) -> list[str]:
    return [str(reason) for reason in support.refusals(server)]


def publish(path: str, **values: Any) -> AbstractContextManager[Any]:
    """Override leaves of a namespace of the published configuration."""
    bag: Any = runtime_context
    first, *rest = path.split(".")
    bag = getattr(bag, f"get_{first}")()
    for name in rest:
        bag = getattr(bag, name)
    context: AbstractContextManager[Any] = bag.override(**values)
    return context


def test_what_is_served_is_not_refused(published: None) -> None:
    assert refused(by_arguments({})) == refused(by_arguments({}, device="cpu")) == []
    for device in ("cpu", "cuda"):
        runner = make_runner([], args={"device": device}, token_to_kv_pool=make_pool(1))
        assert refused(support.by_runner(runner)) == []


# Refusals. Of each: arguments, the model's configuration, what a model runner has then, and what is
# found in the only reason.

AUTO = "set --kv-cache-dtype auto$"
CHOOSE = "choose another --attention-backend$"
READ = "on cuda pat reads bfloat16, float16 and float8_e4m3fn: set .* auto or fp8_e4m3$"
UNIFIED = "slot ids .* drop --enable-unified-memory and --enable-page-major-kv-layout$"


def _pool(quant: str | None = None, **changes: Any) -> dict[str, Any]:
    pool = make_pool(1)
    if quant:
        pool.get_kv_cache_quant_method = lambda: SimpleNamespace(name=quant)
    for name, value in changes.items():
        setattr(pool, name, value)
    return {"token_to_kv_pool": pool}


MLA, SHIFTED = {"attention_arch": AttentionArch.MLA}, {"is_encoder_decoder": True}
OCR = {"architecture": "UnlimitedOCRForCausalLM"}
VIRTUAL = {"kv_index_translator": SimpleNamespace(is_translating=True)}
PHYSICAL = _pool(requires_physical_write_loc=True)


@pytest.mark.parametrize(
    ("args", "model", "runner", "pattern"),
    [
        ({"device": "xpu"}, {}, {}, f"on cpu, cuda, not on 'xpu': .*--device cpu .*, or {CHOOSE}"),
        ({}, MLA, {"use_mla_backend": True}, f"uses MLA, .*: {CHOOSE}"),
        ({}, SHIFTED, {}, f"encoder-decoder .*: {CHOOSE}"),
        ({}, OCR, {"prefill_aware_swa": True}, f"its last tokens .Unlimited.*: {CHOOSE}"),
        ({}, {"dtype": FP32}, {"dtype": FP32, "kv_cache_dtype": FP32},
         "the model is torch.float32, on cuda pat takes bfloat16, float16: set one as --dtype$"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"dtype": FP32},
         {"dtype": FP32, "kv_cache_dtype": E4M3}, "the model is torch.float32, .*one as --dtype$"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, {"kv_cache_dtype": E5M2}, f"float8_e5m2, {READ}"),
        ({"kv_cache_dtype": "bf16"}, {"dtype": FP16}, {"dtype": FP16},
         f"torch.bfloat16 but the model torch.float16: {AUTO}"),
        ({"kv_cache_dtype": "mxfp8"}, {}, {"kv_cache_dtype_str": "mxfp8"}, f"by mxfp8: {AUTO}"),
        ({"enable_unified_memory": True}, {}, VIRTUAL, UNIFIED),
        ({"enable_page_major_kv_layout": True}, {}, PHYSICAL, UNIFIED),
    ],
)  # fmt: skip
def test_arguments_and_a_runner_are_refused_alike(
    args: dict[str, Any],
    model: dict[str, Any],
    runner: dict[str, Any],
    pattern: str,
    published: None,
) -> None:
    (reason,) = refused(by_arguments(model, **args))
    assert re.search(pattern, reason), reason
    made = make_runner([], args={"device": "cuda"} | args, config=model, **_pool() | runner)
    assert refused(support.by_runner(made)) == [reason]


@pytest.mark.parametrize(
    ("option", "path", "values", "args"),
    [
        ("--enable-two-batch-overlap", "exec.overlap", {"enable_two_batch_overlap": True}, {}),
        ("--enable-pdmux", "disagg", {"enable_pdmux": True}, {}),
        ("--enable-deterministic-inference", "exec.deterministic",
         {"enable_deterministic_inference": True}, {}),
        ("--enable-torch-compile", "exec.graph", {"enable_torch_compile": True}, {}),
        ("--dcp-size", "parallel", {"attn_dcp_size": 2}, {"dcp_size": 2}),
        # A topology that SGLang finds consistent.
        ("--attn-cp-size", "parallel", {"attn_cp_size": 2, "tp_size": 2, "moe_tp_size": 2},
         {"attn_cp_size": 2, "tp_size": 2}),
        ("--enable-kv-cache-sharding", "parallel", {"enable_kv_cache_sharding": True}, {}),
        ("--enable-hisparse", "memory", {"enable_hisparse": True}, {}),
        ("--prefill-only-disable-kv-cache", "schedule", {"prefill_only_disable_kv_cache": True},
         {}),
    ],
)  # fmt: skip
def test_a_mode_is_refused_by_the_arguments_and_as_it_is_published(
    option: str, path: str, values: dict[str, Any], args: dict[str, Any], published: None
) -> None:
    (reason,) = refused(by_arguments({}, **(args or values)))
    assert re.search(f"^{option}: .*; drop it or {CHOOSE}", reason), reason
    runner = make_runner([], token_to_kv_pool=make_pool(1))
    assert refused(support.by_runner(runner)) == []
    with publish(path, **values):
        assert refused(support.by_runner(runner)) == [reason]


def test_an_option_that_sglang_sets_itself_is_refused_too() -> None:
    (reason,) = refused(by_arguments({}, {"enable_hisparse": True}))
    assert reason.startswith("--enable-hisparse")


@pytest.mark.parametrize(
    ("variable", "device", "pattern"),
    [
        ("SGLANG_USE_HND_KVCACHE", "cuda", "layout 'hnd', not 'nhd': unset SGLANG_USE_HND_KVCACHE"),
        ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "cuda", f"^SGLANG_.*_GLUE_GRAPH: .*; .*{CHOOSE}"),
        ("SGLANG_USE_CPU_ENGINE", "cpu", "^SGLANG_USE_CPU_ENGINE=1 .*SGLANG_PLATFORM=pat_cpu$"),
    ],
)
def test_environment_variables_of_sglang_that_are_refused(
    variable: str, device: str, pattern: str, monkeypatch: pytest.MonkeyPatch, published: None
) -> None:
    monkeypatch.setenv(variable, "1")
    (reason,) = refused(by_arguments({}, device=device))
    assert re.search(pattern, reason), reason
    layout = {"kv_cache_layout": "hnd"} if "HND" in variable else {}
    runner = make_runner([], args={"device": device}, **_pool(**layout))
    assert refused(support.by_runner(runner)) == [reason]
    assert variable in {row.variable for row in (*support.MACHINE, *support.REFUSED)}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (_pool("unquantized"), ("", "nhd")),
        (_pool("fp4"), ("fp4", "nhd")),
        ({"kv_cache_dtype_str": "fp8_e4m3"}, ("", "nhd")),
        ({"kv_cache_dtype_str": "mxfp8"}, ("mxfp8", "nhd")),
        (_pool(kv_cache_layout="hnd"), ("", "hnd")),
        (_pool(full_kv_pool=SimpleNamespace(kv_cache_layout="hnd")), ("", "hnd")),
        (_pool(full_kv_pool=object()), ("", "nhd")),
    ],
)
def test_what_a_runners_pool_is_like(changes: dict[str, Any], found: tuple[str, str]) -> None:
    server = support.by_runner(make_runner([], **_pool() | changes))
    assert (server.quantized, server.layout) == found


def _quantized(**section: Any) -> dict[str, Any]:
    config = {"quant_method": "modelopt", "quant_algo": "FP8"} | section
    return {"quantization": "modelopt_fp8", "hf_config": {"quantization_config": config}}


@pytest.mark.parametrize(
    ("choice", "model"),
    [("fp8_e4m3", {}), ("auto", _quantized(kv_cache_quant_algo="FP8"))],
    ids=["the option", "the checkpoint"],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kv_in_fp8_e4m3_are_served(choice: str, model: dict[str, Any], device: str) -> None:
    server = by_arguments(model, kv_cache_dtype=choice, device=device)
    assert server.kv_dtype == E4M3
    assert support.refusals(server) == support.idle_reasons(server, 2) == []
    assert stock.kv_cache_dtype(choice, model_config(**model)) == E4M3


# GPUs, by their compute capability.


def test_gpus_by_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100"))

    def against(*gpu: Any) -> list[str]:
        args = server_args()
        return refused(support.by_arguments(args, model_config(), ("it", gpu)))

    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (13, 0)):
        assert against(*capability) == []
    for capability in ((7, 5), (9, 1)):
        (reason,) = against(*capability)
        assert f"do not run on it of {capability[0]}.{capability[1]}: choose another" in reason
        assert "8.x, 9.0, 10.x, 12.x, 10.0 and later as PTX" in reason
    monkeypatch.delattr(_C, "cuda_probe")
    (reason,) = against(9, 0)
    assert "PAT_CUDA=OFF" in reason and reason.endswith("choose another --attention-backend")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (reason,) = refused(support.by_arguments(server_args(), model_config()))
    assert reason.startswith("no GPU was found for --device cuda: start the server with SGLANG_P")


# Nothing to gain.

PD = {"disaggregation_mode": "decode"}
OFF = {"disable_radix_cache": True}  # under SGLang's own name
SPLIT = {"prefill_attention_backend": "pat", "decode_attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("args", "declared", "model", "reason", "way_out", "serves"),
    [
        (PD, OFF, {}, "decode server", "--disaggregation-decode-enable-radix-cache", True),
        ({"disaggregation_mode": "prefill"}, {}, {}, "never decodes", "decode server", False),
        ({"disaggregation_mode": "prefill"}, OFF, {}, "never decodes", "decode server", False),
        (OFF, {}, {}, "is off", "drop --disable-radix-cache", True),
        ({}, OFF, {}, "is off", "SGLang turned the cache off for this model", True),
        ({"max_running_requests": 1}, {}, {},
         "--max-running-requests 1 lets at most 1 decode at a time, and pat serves batches of 2",
         "raise it to 2 or more", False),
        ({}, {}, {"is_generation": False}, "embedding or reward", "nothing is lost", False),
        ({}, {}, {"attention_arch": AttentionArch.SSM}, "no attention", "drop", False),
        ({}, {}, {"hf_config": QSA}, "(QSA)", "another --attention-backend", False),
        (SPLIT, {}, {}, "--decode-attention-backend fa3", "or set it to pat", False),
        ({}, {"attention_backend": "triton"}, {}, "decode runs on triton", "replaces", False),
    ],
)  # fmt: skip
def test_each_reason_for_nothing_to_gain_names_the_way_out(
    args: dict[str, Any],
    declared: dict[str, Any],
    model: dict[str, Any],
    reason: str,
    way_out: str,
    serves: bool,
) -> None:
    assert support.idle_reasons(by_arguments({}), 2) == []
    (found,) = support.idle_reasons(by_arguments(model, declared, **args), 2)
    assert reason in found.words and way_out in found.way_out, found
    assert found.serves is serves
    message = support.idle_message([found])
    assert message.startswith(f"pat {'packs' if serves else 'serves'} nothing on this server: ")
    assert found.words in message and found.way_out in message


@pytest.mark.parametrize(
    ("args", "declared"),
    [
        ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, {}),
        (PD | {"disaggregation_decode_enable_radix_cache": True}, {"disable_radix_cache": False}),
    ],
)
def test_a_disaggregated_server_that_decodes_and_caches_packs(
    args: dict[str, Any], declared: dict[str, Any]
) -> None:
    assert support.idle_reasons(by_arguments({}, declared, **args), 2) == []


@pytest.mark.parametrize(
    ("requests", "ranks", "min_batch", "serves"),
    [(2, 1, 2, True), (1, 1, 1, True), (3, 2, 2, False), (4, 2, 2, True), (3, 1, 4, False)],
)
def test_a_server_whose_batches_stay_too_small(
    requests: int, ranks: int, min_batch: int, serves: bool
) -> None:
    """Data parallel attention gives each rank its part of the requests."""
    server = by_arguments({}, {"attn_dp_size": ranks}, max_running_requests=requests)
    found = support.idle_reasons(server, min_batch)
    assert (found == []) is serves
    for reason in found:
        assert reason.way_out == f"raise it to {min_batch * ranks} or more"


@pytest.mark.parametrize("blackwell", [True, False])
def test_minimax_gains_nothing_on_blackwell_where_it_runs_in_nvfp4(blackwell: bool) -> None:
    model = {"architecture": "MiniMaxM3SparseForCausalLM", "quantization": "minimax_m3_nvfp4"}
    with override_platform(is_blackwell=blackwell):
        found = support.idle_reasons(by_arguments(model), 2)
    assert ["NVFP4" in reason.words for reason in found] == [True] * blackwell


NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_adaptive": False,
    "speculative_attention_mode": "prefill",
    "prefill_attention_backend": None,
    "device": "cuda",
}
OTHER = {"prefill_attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("changes", "reason", "trees"),
    [
        ({}, "", True),
        ({"speculative_eagle_topk": 2, "device": "cpu"}, "", True),
        ({"speculative_num_draft_tokens": 65}, "NGRAM drafts trees of 65 tokens, and pat", True),
        ({"speculative_algorithm": "DFLASH"}, "that is SGLang's attention: pat verifies", False),
        ({"speculative_algorithm": "EAGLE3"}, "", False),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 65}, "", False),
        ({"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 4}, "", True),
        ({"speculative_adaptive": True}, "the number of draft tokens changes", True),
        (OTHER, "verified on --prefill-attention-backend fa3, as", True),
        ({"prefill_attention_backend": "pat"}, "", True),
        (OTHER | {"speculative_attention_mode": "decode"}, "", True),
    ],
)
def test_which_speculation_is_served(changes: dict[str, Any], reason: str, trees: bool) -> None:
    args = SimpleNamespace(**(NGRAM | changes))
    found = support.reasons_of(support.SPECULATION, support.Server(args, None, args.device))
    assert [reason in each.words for each in found] == [True] * bool(reason)
    assert support.draft_tokens_of(args) == (1 if reason else args.speculative_num_draft_tokens)
    assert support.may_be_trees(args) == trees
    args.speculative_algorithm = None
    assert support.draft_tokens_of(args) == 1


def test_drafts_on_sglangs_plan_stream_are_its_own() -> None:
    from sglang.srt.environ import envs

    args = SimpleNamespace(**NGRAM)
    with envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.override(True):
        assert support.draft_tokens_of(args) == 1
