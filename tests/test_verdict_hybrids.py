# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model`` on models that do not attend alike in all layers: which gain, and
why the others do not. No weights, no GPU."""

# ruff: noqa: F401, F811 (fixtures of another module)
from __future__ import annotations

from typing import Any

import pytest
from kit import models as kit_models
from kit.hybrid_models import FAMILIES

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from test_verdict import ask, needs_cuda, sglang_knows_pat

from sglang_pat.srt import layers

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


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        pytest.param(published("qwen3_next"), [3], id="qwen3_next"),
        pytest.param(published("qwen3_5"), [3], id="qwen3_5"),
        pytest.param(
            with_vision("Qwen3_5ForConditionalGeneration", "qwen3_5"), [3], id="qwen3_5-vision"
        ),
        pytest.param(
            with_vision("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", **_EXPERTS),
            [3],
            id="qwen3_5-experts",
        ),
        pytest.param(published("falcon_h1"), [0, 1, 2], id="falcon_h1"),
        pytest.param(published("nemotron_h"), [3, 7, 11], id="nemotron_h"),
        pytest.param(published("granite_hybrid"), [1, 3, 5], id="granite_hybrid"),
        pytest.param(LFM2, [2], id="lfm2"),
    ],
)
def test_all_layers_with_attention_gain(config: dict[str, Any], ours: list[int], ask: Any) -> None:
    verdict = ask(config)
    assert (verdict.status, verdict.refusals, verdict.idle) == ("served", [], [])
    assert verdict.layers.pop("") == ours
    assert set(verdict.layers) <= {layers.NO_ATTENTION}
    assert verdict.workspace is not None


def test_windows_among_linear_attention(ask: Any) -> None:
    verdict = ask(JET)
    assert verdict.status == "served in part"
    assert verdict.layers == {"": [1], layers.SLIDING: [3], layers.NO_ATTENTION: [0, 2]}


@pytest.mark.parametrize(("gpu", "served"), [("H100", True), ("A100", True), ("L40S", False)])
def test_gemma_3_gains_where_its_heads_fit(gpu: str, served: bool, ask: Any) -> None:
    verdict = ask(published("gemma3"), gpu=gpu)
    assert verdict.layers[layers.SLIDING] == [0, 2]
    ((reason, full),) = (each for each in verdict.layers.items() if each[0] != layers.SLIDING)
    assert full == [1, 3]
    if served:
        assert (verdict.status, reason) == ("served in part", "")
    else:
        assert verdict.status == "nothing to gain" and reason.startswith("head dim 256")


def test_gemma_3_with_pictures(ask: Any) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": published("gemma3"),
        "vision_config": kit_models.VISION,
    }
    assert ask(config).layers == {"": [1, 3], layers.SLIDING: [0, 2]}


def test_unequal_dims_of_k_and_v_are_sglangs(ask: Any) -> None:
    """MiMo: the windows are named as such, though config.json has a chunk size."""
    verdict = ask(MIMO)
    assert (verdict.status, verdict.workspace) == ("nothing to gain", None)
    assert verdict.layers == {
        "head dims 192 and 128, not both one of (64, 128, 256)": [0, 3],
        layers.SLIDING: [1, 2],
    }


@pytest.mark.parametrize("config", [KIMI, BAILING], ids=["kimi_linear", "bailing"])
def test_latents_beside_linear_attention_are_refused(config: dict[str, Any], ask: Any) -> None:
    (reason,) = ask(config).refusals
    assert reason.startswith("the model uses MLA")


@needs_cuda
@pytest.mark.parametrize("gpu", ["B200", "RTX5090"])
def test_on_blackwell_only_gated_delta_nets_are_refused(gpu: str, ask: Any) -> None:
    assert "gated delta nets" in ask(published("qwen3_5"), gpu=gpu).refusals[0]
    for family in ("falcon_h1", "nemotron_h", "granite_hybrid"):
        assert ask(published(family), gpu=gpu).status == "served"


@needs_cuda
def test_the_option_that_a_falcon_h1_needs_is_named(ask: Any) -> None:
    (note,) = ask(published("falcon_h1"), gpu="H200").notes
    assert "dies at its first prompts" in note and "--disable-prefill-cuda-graph" in note
    assert not ask(published("falcon_h1"), "--disable-prefill-cuda-graph", gpu="H200").notes
    assert not ask(published("granite_hybrid"), gpu="H200").notes


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "nemotron_h", "granite_hybrid"])
def test_on_a_cpu_states_are_refused(family: str, ask: Any) -> None:
    """By SGLang with its defaults; the flags that it then asks for would only start a server that
    dies in its first prefill."""
    (reason,) = ask(published(family), gpu="").refusals
    assert reason.startswith("SGLang itself refuses: extra_buffer requires platform support")
    flags = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
    (reason,) = ask(published(family), *flags, gpu="").refusals
    assert reason.startswith("SGLang's kernels of linear attention and state spaces need a GPU")
