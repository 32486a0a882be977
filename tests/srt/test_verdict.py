# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: verdicts on tiny models and server flags. No weights, no GPU.

What each reason says is in tests/srt/test_support.py and test_layers.py; here, that SGLang's own
resolution of flags and its reading of config.json lead to them.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.hybrid_models import FAMILIES
from kit.models import (
    DEEPSEEK,
    GEMMA2,
    LLAMA,
    LLAMA4,
    PLAIN,
    QWEN3_MOE,
    STEP3P5,
    VISION,
    write_config,
)

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.arg_groups import memory_hook
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from sglang_pat import _C
from sglang_pat.capacity import MB, fit_workspace
from sglang_pat.srt.layers import CAPPED, CHUNKED, SLIDING
from sglang_pat.srt.layers import NO_ATTENTION as OFF
from sglang_pat.srt.verdict import QuestionError, Verdict, judge

needs_cuda = pytest.mark.skipif(not _C.CUDA_CODE, reason="built with PAT_CUDA=OFF")


@pytest.fixture(scope="module", autouse=True)
def sglang_knows_pat() -> Iterator[None]:
    """As after ``load_plugins``, without its hooks, which would stay for other tests."""
    level = logging.getLogger().level
    choices = [*ATTENTION_BACKEND_CHOICES]
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        os.environ["SGLANG_PLATFORM"] = "pat_cpu"
        if "pat" not in choices:
            ATTENTION_BACKEND_CHOICES.append("pat")
        yield
    ATTENTION_BACKEND_CHOICES[:] = choices
    logging.getLogger().setLevel(level)  # --log-level is SGLang's, of the whole process


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    count = itertools.count()
    if _C.CUDA_CODE:  # as in a wheel
        code = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100")
        monkeypatch.setattr(_C, "CUDA_CODE", code)

    def verdict(config: dict[str, Any], *flags: str, gpu: str = "H100", **changes: Any) -> Verdict:
        # SGLang keeps what it has read from a folder.
        folder = write_config(tmp_path / f"model{next(count)}", config, **changes)
        return judge(["--model-path", str(folder), *flags], gpu=gpu)

    return verdict


# Configurations of models that do not attend alike in all layers.


def published(family: str) -> dict[str, Any]:
    return {name: value for name, value in FAMILIES[family].items() if name != "class"}


def with_vision(name: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """As it is published: text and pictures."""
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": name.lower(),
        "torch_dtype": "bfloat16",
        "text_config": {key: text[key] for key in text if key != "architectures"},
        "vision_config": vision,
    }


QWEN3_5_VISION = with_vision(
    "Qwen3_5",
    published("qwen3_5") | {"model_type": "qwen3_5_text"},
    {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 512,
    },
)
GEMMA3_VISION = with_vision("Gemma3", published("gemma3"), VISION)
LFM2 = PLAIN | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
}
JET = PLAIN | {
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
MIMO = PLAIN | {  # K of 192, V of 128; windows in two of four layers
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
    PLAIN
    | _LATENTS
    | {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "layer_group_size": 4,
    }
)
KIMI = (PLAIN | _LATENTS) | {
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


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
CHAINS = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
ON_FA3 = ("--attention-backend", "fa3", "--decode-attention-backend", "pat")


@pytest.mark.parametrize(
    ("config", "flags", "ours", "others"),
    [
        (LLAMA, FP8, [0, 1, 2, 3], {}),
        (QWEN3_MOE, ("--tp", "2"), [0, 1, 2, 3], {}),
        (GEMMA2, (), [1, 3], {SLIDING: [0, 2]}),
        (STEP3P5, (), [0, 2], {SLIDING: [1, 3]}),
        (published("qwen3_next"), (), [3], {OFF: [0, 1, 2]}),
        (LLAMA4, ON_FA3, [3], {CHUNKED: [0, 1, 2]}),
        (published("qwen3_5"), (), [3], {OFF: [0, 1, 2]}),
        (QWEN3_5_VISION, (), [3], {OFF: [0, 1, 2]}),
        (published("falcon_h1"), (), [0, 1, 2], {}),
        (published("nemotron_h"), (), [3, 7, 11], {OFF: [0, 1, 2, 4, 5, 6, 8, 9, 10]}),
        (published("granite_hybrid"), (), [1, 3, 5], {OFF: [0, 2, 4]}),
        (LFM2, (), [2], {OFF: [0, 1, 3]}),
        (JET, (), [1], {SLIDING: [3], OFF: [0, 2]}),
        (published("gemma3"), (), [1, 3], {SLIDING: [0, 2]}),
        (GEMMA3_VISION, (), [1, 3], {SLIDING: [0, 2]}),
        # MiMo: the windows are named as such, though config.json has a chunk size.
        (MIMO, (), [], {"head dims 192 and 128, not both one of (64, 128, 256)": [0, 3],
                        SLIDING: [1, 2]}),
        (GEMMA2, CHAINS, [], {SLIDING: [0, 2], CAPPED: [1, 3]}),
        (GEMMA2 | {"attn_logit_softcapping": None}, CHAINS, [1, 3], {SLIDING: [0, 2]}),
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
    assert verdict.layers == ({"": ours} if ours else {}) | others
    whole = "served" if set(others) <= {OFF} else "served in part"
    assert verdict.status == (whole if ours else "nothing to gain")
    assert verdict.reasons == [] and verdict.ok == bool(ours) == (verdict.workspace is not None)
    assert verdict.as_json()["layers"] == verdict.layers


CHOOSE, GAIN = "choose another --attention-backend", "nothing to gain"
HYBRIDS = ("qwen3_5", "falcon_h1", "nemotron_h", "granite_hybrid")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}


@pytest.mark.parametrize(
    ("config", "flags", "gpu", "status", "reason", "way_out"),
    [
        (DEEPSEEK, ("--dtype", "bfloat16"), "", "refused", "uses MLA", CHOOSE),
        (KIMI, (), "H100", "refused", "the model uses MLA", CHOOSE),
        (BAILING, (), "H100", "refused", "the model uses MLA", CHOOSE),
        (LLAMA, ("--dtype", "float32"), "H100", "refused",
         "the model is torch.float32, on cuda pat takes bfloat16, float16", "set one as --dtype"),
        (LLAMA, ("--enable-pdmux", "--chunked-prefill-size", "-1"), "H100", "refused",
         "--enable-pdmux: two", f"drop it or {CHOOSE}"),
        # In SGLang's own words, which are not cut.
        (LLAMA4, (), "H100", "refused", "is required for Llama4 model but got pat", CHOOSE),
        (GPT_OSS, (), "H100", "refused", "- Prefill: pat - Decode: pat", CHOOSE),
        (LLAMA, (*NGRAM, "--page-size", "64"), "H100", "refused", "page_size(64) > 1",
         "set --page-size 1"),
        *((published(family), (), "", "refused", "extra_buffer requires platform", "")
          for family in HYBRIDS),
        # The flags that it then asks for would only start a server that dies.
        *((published(family), NO_BUFFER, "", "refused", "SGLang's kernels of linear attention and "
           "state spaces need a GPU", "start the server") for family in HYBRIDS),
        *(pytest.param(published(family), (), gpu, "refused", "gated delta nets (Qwen3-Next, Qw",
                       CHOOSE, marks=needs_cuda)
          for family in ("qwen3_5", "qwen3_next") for gpu in ("B200", "RTX5090")),
        (LLAMA, (*NGRAM, "--speculative-num-draft-tokens", "65"), "H100", GAIN, "trees of 65 tok",
         "set --speculative-num-draft-tokens to at most 64"),
        (LLAMA, (*CHAINS, "--prefill-attention-backend", "fa3"), "H100", GAIN,
         "drafts are verified on", "set --speculative-attention-mode decode"),
        (LLAMA, ("--is-embedding",), "H100", GAIN, "model never decodes", CHOOSE),
        (LLAMA, ("--max-running-requests", "1"), "", GAIN, "at most 1 decode", "raise it"),
        (LLAMA, ("--disaggregation-mode", "prefill"), "H100", GAIN, "prefill server", "give --att"),
        # The next two are served all the same, each request by itself.
        (LLAMA, ("--disaggregation-mode", "decode"), "H100", GAIN, "keeps no radix cache",
         "set --disaggregation-decode-enable-radix-cache"),
        (LLAMA, ("--disable-radix-cache",), "H100", GAIN, "radix cache", "drop --disable-radix"),
    ],
)  # fmt: skip
def test_what_is_refused_or_gains_nothing_is_said_with_the_way_out(
    config: dict[str, Any],
    flags: tuple[str, ...],
    gpu: str,
    status: str,
    reason: str,
    way_out: str,
    ask: Any,
) -> None:
    verdict = ask(config, *flags, gpu=gpu)
    assert (verdict.status, verdict.ok) == (status, False)
    (found,) = verdict.reasons
    assert reason in found.words and found.way_out.startswith(way_out)
    assert bool(found.way_out) == bool(way_out) and not verdict.notes
    assert (status, found.words, found.way_out) in verdict.lines()
    assert (verdict.workspace is not None) == found.serves == (verdict.layers != {})
    assert verdict.as_json()["reasons"][0]["words"] == found.words


def test_a_model_that_sglang_cannot_read_is_refused(tmp_path: Path) -> None:
    """A folder without a config.json."""
    verdict = judge(["--model-path", str(tmp_path)], gpu="H100")
    assert verdict.status == "refused"
    assert verdict.reasons[0].words.startswith("SGLang itself refuses: ")


def test_what_lets_it_gain(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = ("--speculative-attention-mode", "decode")
    assert ask(LLAMA, *CHAINS, "--prefill-attention-backend", "fa3", *mode).ok
    monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "1")
    assert ask(LLAMA, "--max-running-requests", "1").ok


@pytest.mark.parametrize(
    ("gpu", "changes", "served", "notes"),
    [
        ("", {}, True, []),
        ("", {"head_dim": 256}, True, []),
        ("H100", {"head_dim": 256}, True, []),
        ("A100", {"head_dim": 256}, True, ["compute capability 8.0 (sm_80) are built, but"]),
        ("L40S", {"head_dim": 256}, False, ["8.9 (sm_80)"]),  # too little shared memory
        ("B300", {}, True, ["10.3 (sm_100)", "on flashinfer: .*of 1; --page-size 64"]),
        ("5090", {}, True, ["12.0 (sm_120)"]),
    ],
)
@needs_cuda
def test_machines(
    gpu: str, changes: dict[str, Any], served: bool, notes: list[str], ask: Any
) -> None:
    verdict = ask(LLAMA, gpu=gpu, **changes)
    assert verdict.ok is served and (verdict.workspace is not None) == (served and gpu != "")
    assert verdict.device == "cpu" if not gpu else gpu in verdict.device.replace(" ", "")
    assert served or "101376" in next(iter(verdict.layers))
    for note, wanted in itertools.zip_longest(verdict.notes, notes):
        assert re.search(re.escape(wanted) if ".*" not in wanted else wanted, note)
        assert ("note", note, "") in verdict.lines()


@needs_cuda
def test_notes_name_the_option_that_makes_them_go(ask: Any) -> None:
    assert len(ask(LLAMA, "--page-size", "64", gpu="B200").notes) == 1
    (note,) = ask(published("falcon_h1"), gpu="H200").notes
    assert "dies at its first prompts" in note and "--disable-prefill-cuda-graph" in note
    assert not ask(published("falcon_h1"), "--disable-prefill-cuda-graph", gpu="H200").notes
    for family in ("nemotron_h", "granite_hybrid"):
        assert ask(published(family), gpu="B200").ok and not ask(published(family)).notes


def test_a_gpu_without_kernels_is_refused(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    (reason,) = ask(LLAMA, gpu="B200").reasons
    assert "compute capability 8.x, 9.0 (with PAT_ARCHS=all" in reason.words
    assert "B200 of 10.0" in reason.words


def test_the_workspace_is_what_the_backend_would_size(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-running-requests", "300", "--tp", "2")
    sized = fit_workspace(
        num_q_heads=2,
        head_dim=64,
        pool_requests=300,
        pool_tokens=300 * 8192,  # at most: the pool's size is not known before the start
        largest_graph=256,  # SGLang's default on a GPU of 80 GB
        partial_dtype=torch.float32,
        budget=256 * MB,
    )
    assert ask(LLAMA, *flags).workspace == sized
    monkeypatch.setenv("SGLANG_PAT_WORKSPACE_MB", "1")
    small = ask(LLAMA, *flags)
    assert small.workspace.over_budget and small.workspace.max_queries == 300
    assert ("workspace", small.workspace.warning(), "") in small.lines()


def test_a_gpu_that_is_not_here_is_forgotten_afterwards(ask: Any) -> None:
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_platform

    before = memory_hook.get_device_memory_capacity, current_platform.is_out_of_tree()
    ask(LLAMA)
    assert (memory_hook.get_device_memory_capacity, current_platform.is_out_of_tree()) == before
    assert "is_out_of_tree" not in vars(current_platform)
    assert get_platform().is_sm90 == torch.cuda.is_available()


def test_questions_that_make_no_sense(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QuestionError, match=r"'H900' is not known; the GPUs are h200, h100"):
        ask(LLAMA, gpu="H900")
    with pytest.raises(QuestionError, match="--model /no/such/model: there is no such folder"):
        judge(["--model-path", "/no/such/model"], gpu="H100")
    with pytest.raises(QuestionError, match="--gpu and --device"):
        ask(LLAMA, "--device", "cpu")
    with pytest.raises(QuestionError, match="unrecognized arguments: --no-such-flag; python -m"):
        ask(LLAMA, "--no-such-flag")
    with pytest.raises(QuestionError, match=r"--tp-size.*invalid int value: 'two'"):
        ask(LLAMA, "--tp", "two")
    assert capsys.readouterr().err == ""


def test_what_people_read(ask: Any) -> None:
    found = {topic: text for topic, text, _way_out in ask(GEMMA2).lines()}
    assert found["server"].startswith("Gemma2ForCausalLM, 4 layers, 4 query and 2 KV heads")
    assert found["server"].endswith("H100 80GB HBM3, K/V in bfloat16")
    assert found["layers of pat"] == "2 (1, 3)"
    assert found["layers of SGLang"] == "2 (0, 2): a sliding window"
    assert "MB on the GPU" in found["workspace"]
    assert ask(LLAMA, *FP8).as_json()["kv_dtype"] == "float8_e4m3fn"
    assert ask(LLAMA, "--dtype", "float32", gpu="").kv_dtype == "float32"
