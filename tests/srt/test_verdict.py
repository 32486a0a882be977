# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: verdicts on tiny models and server flags. No weights, no GPU.

What each reason says is in tests/srt/test_support.py and test_layers.py; here, that SGLang's own
resolution of flags and its reading of config.json lead to them.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit import models as kit_models
from kit.hybrid_models import FAMILIES

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.arg_groups import memory_hook
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from sglang_pat import _C
from sglang_pat.capacity import MB, fit_workspace
from sglang_pat.gpus import GPUS
from sglang_pat.srt import layers
from sglang_pat.srt.verdict import QuestionError, Verdict, judge, known_gpu

needs_cuda = pytest.mark.skipif(not _C.CUDA_CODE, reason="built with PAT_CUDA=OFF")


@pytest.fixture(scope="module", autouse=True)
def sglang_knows_pat() -> Iterator[None]:
    """As after ``load_plugins``, without its hooks, which would stay for other tests."""
    known = "pat" in ATTENTION_BACKEND_CHOICES
    if not known:
        ATTENTION_BACKEND_CHOICES.append("pat")
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        os.environ["SGLANG_PLATFORM"] = "pat_cpu"
        level = logging.getLogger().level
        yield
        logging.getLogger().setLevel(level)  # --log-level is SGLang's, of the whole process
    if not known:
        ATTENTION_BACKEND_CHOICES.remove("pat")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    count = itertools.count()
    if _C.CUDA_CODE:  # as in a wheel
        code = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100")
        monkeypatch.setattr(_C, "CUDA_CODE", code)

    def verdict(config: dict[str, Any], *flags: str, gpu: str = "H100", **changes: Any) -> Verdict:
        # SGLang keeps what it has read from a folder.
        folder = kit_models.write_config(tmp_path / f"model{next(count)}", config, **changes)
        return judge(["--model-path", str(folder), *flags], gpu=gpu)

    return verdict


# Configurations of models that do not attend alike in all layers.

_QWEN3_5_TEXT = {
    name: value
    for name, value in FAMILIES["qwen3_5"].items()
    if name not in ("class", "architectures")
}
_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 512,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def with_vision(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    """Qwen3.5 as it is published: text and pictures."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "text_config": _QWEN3_5_TEXT | {"model_type": f"{model_type}_text"} | changes,
        "vision_config": _VISION | {"model_type": model_type},
    }


LFM2 = kit_models.PLAIN | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
}
JET = kit_models.PLAIN | {
    "architectures": ["JetNemotronForCausalLM"],
    "model_type": "jet_nemotron",
    "layer_types": ["jet", "attn", "jet", "swa"],
    "efficient_attention_config": {
        "jet": {
            "num_heads": 4,
            "head_dim": 64,
            "expand_v": 2.0,
            "conv_size": 4,
            "mode": "chunk",
            "dconv_generator_reduction": 8,
            "dconv_implementation": "triton",
            "norm_eps": 1e-5,
        },
        "swa": {"window_size": 1024},
    },
}
MIMO = kit_models.PLAIN | {  # K of 192, V of 128; windows in two of four layers
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "sliding_window": 128,
    "attention_chunk_size": 128,
    "moe_layer_freq": [0, 1, 1, 1],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_LATENTS = {
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "pad_token_id": 0,
}
BAILING = (
    kit_models.PLAIN
    | _LATENTS
    | {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "layer_group_size": 4,
    }
)
KIMI = (kit_models.PLAIN | _LATENTS) | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 64,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}


def published(family: str) -> dict[str, Any]:
    return {name: value for name, value in FAMILIES[family].items() if name != "class"}


OFF, CHUNKED, SLIDING = layers.NO_ATTENTION, layers.CHUNKED, layers.SLIDING
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
CHAINS = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
VISION_3_5 = with_vision("Qwen3_5ForConditionalGeneration", "qwen3_5")
EXPERTS_3_5 = with_vision("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", **_EXPERTS)
GEMMA3_PICTURES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": published("gemma3"),
    "vision_config": kit_models.VISION,
}


@pytest.mark.parametrize(
    ("config", "flags", "ours", "others"),
    [
        (kit_models.LLAMA, (), [0, 1, 2, 3], {}),
        (kit_models.LLAMA, FP8, [0, 1, 2, 3], {}),
        (kit_models.QWEN3_MOE, ("--tp", "2"), [0, 1, 2, 3], {}),
        (kit_models.GEMMA2, (), [1, 3], {SLIDING: [0, 2]}),
        (kit_models.STEP3P5, (), [0, 2], {SLIDING: [1, 3]}),
        (kit_models.QWEN3_NEXT, (), [3], {OFF: [0, 1, 2]}),
        (kit_models.LLAMA4, ("--attention-backend", "fa3", "--decode-attention-backend", "pat"),
         [3], {CHUNKED: [0, 1, 2]}),
        (published("qwen3_next"), (), [3], {OFF: [0, 1, 2]}),
        (published("qwen3_5"), (), [3], {OFF: [0, 1, 2]}),
        (VISION_3_5, (), [3], {OFF: [0, 1, 2]}),
        (EXPERTS_3_5, (), [3], {OFF: [0, 1, 2]}),
        (published("falcon_h1"), (), [0, 1, 2], {}),
        (published("nemotron_h"), (), [3, 7, 11], {OFF: [0, 1, 2, 4, 5, 6, 8, 9, 10]}),
        (published("granite_hybrid"), (), [1, 3, 5], {OFF: [0, 2, 4]}),
        (LFM2, (), [2], {OFF: [0, 1, 3]}),
        (JET, (), [1], {SLIDING: [3], OFF: [0, 2]}),
        (published("gemma3"), (), [1, 3], {SLIDING: [0, 2]}),
        (GEMMA3_PICTURES, (), [1, 3], {SLIDING: [0, 2]}),
        # MiMo: the windows are named as such, though config.json has a chunk size.
        (MIMO, (), [], {"head dims 192 and 128, not both one of (64, 128, 256)": [0, 3],
                        SLIDING: [1, 2]}),
        (kit_models.GEMMA2, CHAINS, [], {SLIDING: [0, 2], layers.CAPPED: [1, 3]}),
        (kit_models.GEMMA2 | {"attn_logit_softcapping": None}, CHAINS, [1, 3], {SLIDING: [0, 2]}),
    ],
)  # fmt: skip
def test_which_layers_are_served(
    config: dict[str, Any],
    flags: tuple[str, ...],
    ours: list[int],
    others: dict[str, list[int]],
    ask: Any,
) -> None:
    verdict = ask(config, *flags)
    assert verdict.layers.pop("", []) == ours and verdict.layers == others
    verdict.layers[""] = ours
    whole = "served" if set(others) <= {OFF} else "served in part"
    assert verdict.status == (whole if ours else "nothing to gain")
    assert verdict.reasons == [] and verdict.ok == bool(ours) == (verdict.workspace is not None)


@pytest.mark.parametrize("gpu", ["", "A100-40GB", "4090"])
def test_other_machines_serve_a_plain_model(gpu: str, ask: Any) -> None:
    for flags in ((), FP8):
        verdict = ask(kit_models.LLAMA, *flags, gpu=gpu)
        assert (verdict.status, verdict.layers) == ("served", {"": [0, 1, 2, 3]})
        assert verdict.device == {"": "cpu", "4090": "RTX4090"}.get(gpu, gpu)
        assert (verdict.workspace is None) == (gpu == "")


@pytest.mark.parametrize(
    ("gpu", "served"), [("H100", True), ("A100", True), ("L40S", False), ("", True)]
)
def test_head_dim_256_needs_more_shared_memory_than_some_gpus_have(
    gpu: str, served: bool, ask: Any
) -> None:
    verdict = ask(kit_models.LLAMA, gpu=gpu, head_dim=256)
    assert verdict.status == ("served" if served else "nothing to gain")
    (reason,) = verdict.layers
    assert served or (reason.startswith("head dim 256") and "101376" in reason)


# Refusals.


@pytest.mark.parametrize(
    ("config", "flags", "gpu", "reason", "way_out"),
    [
        (kit_models.DEEPSEEK, ("--dtype", "bfloat16"), "", "uses MLA", "choose another --att"),
        (kit_models.DEEPSEEK, (), "H100", "uses MLA", "choose another --attention-backend"),
        (KIMI, (), "H100", "the model uses MLA", "choose another --attention-backend"),
        (BAILING, (), "H100", "the model uses MLA", "choose another --attention-backend"),
        (kit_models.LLAMA, ("--dtype", "float32"), "H100",
         "the model is torch.float32, on cuda pat takes bfloat16, float16", "set one as --dtype"),
        (kit_models.LLAMA, ("--enable-pdmux", "--chunked-prefill-size", "-1"), "H100",
         "--enable-pdmux: two", "drop it or choose another --attention-backend"),
        # In SGLang's own words, which are not cut.
        (kit_models.LLAMA4, (), "H100", "is required for Llama4 model but got pat", "choose ano"),
        (kit_models.LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
         (), "H100", "- Prefill: pat - Decode: pat", "choose another --attention-backend"),
        (kit_models.LLAMA, ("--speculative-algorithm", "NGRAM", "--page-size", "64"), "H100",
         "page_size(64) > 1", "set --page-size 1"),
        *((published(family), (), "", "SGLang itself refuses: extra_buffer requires platform", "")
          for family in ("qwen3_5", "falcon_h1", "nemotron_h", "granite_hybrid")),
        # The flags that it then asks for would only start a server that dies.
        *((published(family),
           ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"), "",
           "SGLang's kernels of linear attention and state spaces need a GPU", "start the server")
          for family in ("qwen3_5", "falcon_h1", "nemotron_h", "granite_hybrid")),
        *(pytest.param(published(family), (), gpu, "gated delta nets (Qwen3-Next, Qwen3.5)",
                       "choose another --attention-backend", marks=needs_cuda)
          for family in ("qwen3_5", "qwen3_next") for gpu in ("B200", "RTX5090")),
    ],
)  # fmt: skip
def test_refusals(
    config: dict[str, Any], flags: tuple[str, ...], gpu: str, reason: str, way_out: str, ask: Any
) -> None:
    verdict = ask(config, *flags, gpu=gpu)
    assert (verdict.status, verdict.ok, verdict.layers) == ("refused", False, {})
    (found,) = verdict.reasons
    assert reason in found.words and found.way_out.startswith(way_out)
    assert bool(found.way_out) == bool(way_out) and not verdict.notes
    assert ("refused", found.words, found.way_out) in verdict.lines()
    assert verdict.as_json()["refused"] == [str(found)]


@needs_cuda
@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h", "granite_hybrid"])
def test_other_hybrids_are_served_on_blackwell(family: str, ask: Any) -> None:
    for gpu in ("B200", "RTX5090"):
        assert ask(published(family), gpu=gpu).status == "served"


def test_a_gpu_without_kernels_is_refused(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    (reason,) = ask(kit_models.LLAMA, gpu="B200").reasons
    assert "compute capability 8.x, 9.0 (with PAT_ARCHS=all" in reason.words
    assert "B200 of 10.0" in reason.words


def test_a_model_that_sglang_cannot_read_is_refused(tmp_path: Path) -> None:
    """A folder without a config.json."""
    verdict = judge(["--model-path", str(tmp_path)], gpu="H100")
    assert verdict.status == "refused"
    assert verdict.reasons[0].words.startswith("SGLang itself refuses: ")


# Nothing to gain.


@pytest.mark.parametrize(
    ("flags", "reason", "way_out", "allocates"),
    [
        (("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "65"),
         "--speculative-algorithm NGRAM drafts trees of 65 tokens",
         "set --speculative-num-draft-tokens to at most 64", False),
        ((*CHAINS, "--prefill-attention-backend", "fa3"), "drafts are verified on",
         "set --speculative-attention-mode decode", False),
        (("--is-embedding",), "embedding or reward model never decodes", "another", False),
        (("--max-running-requests", "1"), "lets at most 1 decode at a time", "raise it", False),
        (("--disaggregation-mode", "prefill"), "prefill server", "decode server", False),
        (("--disaggregation-mode", "decode"), "keeps no radix cache",
         "--disaggregation-decode-enable-radix-cache", True),
        (("--disable-radix-cache",), "radix cache", "drop --disable-radix-cache", True),
    ],
)  # fmt: skip
def test_nothing_to_gain(
    flags: tuple[str, ...], reason: str, way_out: str, allocates: bool, ask: Any
) -> None:
    verdict = ask(kit_models.LLAMA, *flags)
    assert (verdict.status, verdict.ok) == ("nothing to gain", False)
    (found,) = verdict.reasons
    assert reason in found.words and way_out in found.way_out
    assert ("nothing to gain", found.words, found.way_out) in verdict.lines()
    assert (verdict.workspace is not None) == allocates


def test_what_lets_it_gain(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = ("--speculative-attention-mode", "decode")
    assert ask(kit_models.LLAMA, *CHAINS, "--prefill-attention-backend", "fa3", *mode).ok
    monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "1")
    for gpu in ("", "H100"):
        assert ask(kit_models.LLAMA, "--max-running-requests", "1", gpu=gpu).status == "served"


# Notes, workspace, words.


@needs_cuda
@pytest.mark.parametrize(
    ("gpu", "code"),
    [("B200", "10.0 (sm_100)"), ("B300", "10.3 (sm_100)"), ("5090", "12.0 (sm_120)"),
     ("RTX PRO 6000", "12.0 (sm_120)"), ("A100", "8.0 (sm_80)"), ("L4", "8.9 (sm_80)")],
)  # fmt: skip
def test_a_gpu_on_which_nobody_ran_the_kernels(gpu: str, code: str, ask: Any) -> None:
    verdict = ask(kit_models.LLAMA, gpu=gpu)
    assert verdict.status == "served"
    note = verdict.notes[0]
    assert note == (
        f"our kernels for compute capability {code} are built, but were not run on such a GPU"
    )
    assert ("note", note, "") in verdict.lines()
    assert verdict.as_json()["notes"] == verdict.notes


def test_what_a_hopper_needs_not_be_told(ask: Any) -> None:
    for gpu in ("H100", "H200"):
        assert not ask(kit_models.LLAMA, gpu=gpu).notes


@needs_cuda
def test_a_b200_runs_prefill_on_trtllm_mha_if_pages_allow_it(ask: Any) -> None:
    _, note = ask(kit_models.LLAMA, gpu="B200").notes
    assert "trtllm_mha, takes pages of 16, 32, 64, 128 tokens, not of 1; --page-size 64" in note
    assert note.startswith("prefill, and decode that is not pat's, run on flashinfer: ")
    assert len(ask(kit_models.LLAMA, "--page-size", "64", gpu="B200").notes) == 1
    assert len(ask(kit_models.LLAMA, gpu="RTX5090").notes) == 1  # its default is flashinfer


@needs_cuda
def test_the_option_that_a_falcon_h1_needs_is_named(ask: Any) -> None:
    (note,) = ask(published("falcon_h1"), gpu="H200").notes
    assert "dies at its first prompts" in note and "--disable-prefill-cuda-graph" in note
    assert not ask(published("falcon_h1"), "--disable-prefill-cuda-graph", gpu="H200").notes
    assert not ask(published("granite_hybrid"), gpu="H200").notes


def test_the_workspace_is_what_the_backend_would_size(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = ask(kit_models.LLAMA, "--max-running-requests", "300", "--tp", "2")
    sized = fit_workspace(
        num_q_heads=2,
        head_dim=64,
        pool_requests=300,
        pool_tokens=300 * 8192,  # at most: the pool's size is not known before the start
        largest_graph=256,  # SGLang's default on a GPU of 80 GB
        partial_dtype=torch.float32,
        budget=256 * MB,
    )
    assert verdict.workspace == sized
    report = verdict.as_json()["workspace"]
    assert (report["bytes"], report["max_requests"]) == (sized.total, 300)
    monkeypatch.setenv("SGLANG_PAT_WORKSPACE_MB", "1")
    small = ask(kit_models.LLAMA, "--max-running-requests", "300", "--tp", "2").workspace
    assert small.over_budget and small.max_queries == 300


def test_a_gpu_that_is_not_here_is_forgotten_afterwards(ask: Any) -> None:
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_platform

    before = memory_hook.get_device_memory_capacity, current_platform.is_out_of_tree()
    ask(kit_models.LLAMA)
    assert (memory_hook.get_device_memory_capacity, current_platform.is_out_of_tree()) == before
    assert "is_out_of_tree" not in vars(current_platform)
    assert get_platform().is_sm90 == torch.cuda.is_available()


def test_questions_that_make_no_sense(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QuestionError, match=r"'H900' is not known; the GPUs are h200, h100"):
        ask(kit_models.LLAMA, gpu="H900")
    with pytest.raises(QuestionError, match="--model /no/such/model: there is no such folder"):
        judge(["--model-path", "/no/such/model"], gpu="H100")
    with pytest.raises(QuestionError, match="--gpu and --device"):
        ask(kit_models.LLAMA, "--device", "cpu")
    with pytest.raises(QuestionError, match="unrecognized arguments: --no-such-flag; python -m"):
        ask(kit_models.LLAMA, "--no-such-flag")
    with pytest.raises(QuestionError, match=r"--tp-size.*invalid int value: 'two'"):
        ask(kit_models.LLAMA, "--tp", "two")
    assert capsys.readouterr().err == ""


def test_names_of_gpus() -> None:
    assert known_gpu("rtx 4090") == known_gpu("4090")
    for name, machine in GPUS.items():
        found = known_gpu(name)
        assert found.name == name.upper() and found.capability == (machine.major, machine.minor)


def test_what_people_read(ask: Any) -> None:
    found = dict(
        (topic, (text, way_out)) for topic, text, way_out in ask(kit_models.GEMMA2).lines()
    )
    assert found["server"][0].startswith("Gemma2ForCausalLM, 4 layers, 4 query and 2 KV heads")
    assert found["layers of pat"][0] == "2 (1, 3)"
    assert found["layers of SGLang"][0] == "2 (0, 2): a sliding window"
    assert "MB on the GPU" in found["workspace"][0]
    assert found["server"][0].endswith("on H100, K/V in bfloat16")
    assert ask(kit_models.LLAMA, *FP8).as_json()["kv_dtype"] == "float8_e4m3fn"
    assert ask(kit_models.LLAMA, "--dtype", "float32", gpu="").kv_dtype == "float32"
