# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate --model``: the layers that gain, and the models that are refused, are those
of ``sglang-pat doctor``."""

# ruff: noqa: F401, F811 (fixtures of another module)
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import models as kit_models

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from test_verdict import ask, sglang_knows_pat
from test_verdict_hybrids import BAILING, JET, KIMI, LFM2, MIMO, published, with_vision

from sglang_pat.estimate.layers import full_attention_layers
from sglang_pat.estimate.model import Model, open_model
from sglang_pat.estimate.requests import InputError

# As they are published, without layer_types.
GEMMA2_9B = kit_models.GEMMA2 | {"num_hidden_layers": 42, "torch_dtype": "float32"}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
    },
    "vision_config": kit_models.VISION,
}
GEMMA3_PATTERN = kit_models.PLAIN | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
}
QWEN3_NEXT = kit_models.QWEN3_NEXT | {"num_hidden_layers": 48}
COMMAND_R7B = kit_models.PLAIN | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "num_hidden_layers": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_norm_eps": 1e-5,
}
SAME = {
    "llama": kit_models.LLAMA,
    "qwen3_moe": kit_models.QWEN3_MOE,
    "step3p5": kit_models.STEP3P5,
    "gemma2_9b": GEMMA2_9B,
    "gemma3_27b": GEMMA3_27B,
    "gemma3_pattern": GEMMA3_PATTERN,
    "command_r7b": COMMAND_R7B,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_vision": with_vision("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "falcon_h1": published("falcon_h1"),
    "nemotron_h": published("nemotron_h"),
    "granite_hybrid": published("granite_hybrid"),
    "gemma3_types": published("gemma3"),
    "lfm2": LFM2,
    "jet": JET,
}
GPT_OSS = kit_models.PLAIN | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA4 = kit_models.PLAIN | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 512,
}
EXAONE4 = kit_models.PLAIN | {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def opened(folder: Path, config: dict[str, Any]) -> Model:
    return open_model(str(kit_models.write_config(folder / "estimated", config)))


@pytest.mark.parametrize("config", SAME.values(), ids=SAME)
def test_the_layers_that_gain_are_those_of_doctor(
    config: dict[str, Any], ask: Any, tmp_path: Path
) -> None:
    found = ask(config)
    assert not found.refusals
    assert opened(tmp_path, config).attention_layers == len(found.layers[""])


def test_the_published_models() -> None:
    counts = {
        "gemma2_9b": full_attention_layers(GEMMA2_9B),
        "gemma3_27b": full_attention_layers(GEMMA3_27B["text_config"]),
        "qwen3_next": full_attention_layers(QWEN3_NEXT),
        "mimo": full_attention_layers(MIMO),
    }
    assert counts == {"gemma2_9b": 21, "gemma3_27b": 10, "qwen3_next": 12, "mimo": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPT_OSS, "SGLang does not take pat for GptOssForCausalLM: leave --attention-backend out"),
        (GEMMA4, "SGLang does not take pat for Gemma4ForCausalLM"),
        (EXAONE4, "SGLang does not take pat for Exaone4ForCausalLM"),
        (kit_models.LLAMA4, "--attention-backend fa3 --decode-attention-backend pat"),
        (kit_models.DEEPSEEK, "MLA, which pat does not serve"),
        (KIMI, "MLA, which pat does not serve"),
        (BAILING, "MLA, which pat does not serve"),
    ],
)
def test_a_model_that_doctor_refuses_has_no_estimate(
    config: dict[str, Any], said: str, ask: Any, tmp_path: Path
) -> None:
    assert ask(config).status == "refused"
    with pytest.raises(InputError) as raised:
        opened(tmp_path, config)
    assert said in str(raised.value)
