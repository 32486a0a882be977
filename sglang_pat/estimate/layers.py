# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model attend to all tokens, and which models pat does not serve, from
config.json alone.

Fields that a config.json leaves out have the defaults of the model's class in transformers, which
SGLang takes over, where they are listed here. ``tests/test_estimate_layers.py`` compares both
answers with doctor's for the models that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_pat.srt.layers import BY_KIND

# Sizes that published config.json files leave out.
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
}
# By model type: of how many layers the last attends to all tokens. The others have windows.
_WINDOW_PATTERN = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "cohere2": 4,
    "olmo3": 4,
}
# SGLang takes only backends that it lists for these, and pat is not among them.
_OF_SGLANG: tuple[str, ...] = (
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
_OF_SGLANG_WITH_WINDOWS = ("Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
_CHUNKED = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")


def reason_against(config: Mapping[str, Any]) -> str:
    """Why pat does not serve a model, with the way out, or ""."""
    names = config.get("architectures") or ()
    if config.get("kv_lora_rank"):
        return (
            "it has kv_lora_rank, so MLA, which pat does not serve: SGLang's own attention runs it"
        )
    if config.get("is_encoder_decoder"):
        return "it has an encoder, which pat does not serve: SGLang's own attention runs it"
    if any(name in _CHUNKED for name in names):
        return (
            "SGLang does not take --attention-backend pat for Llama 4: it takes "
            "--attention-backend fa3 --decode-attention-backend pat, with which one layer in four "
            "gains; estimate these with --layers, --heads and --head-dim in place of --model"
        )
    refused = _OF_SGLANG
    if config.get("sliding_window_pattern"):
        refused += _OF_SGLANG_WITH_WINDOWS
    for name in names:
        if name in refused:
            return (
                f"SGLang does not take pat for {name}: leave --attention-backend out, SGLang's own "
                "attention runs it"
            )
    return ""


def full_attention_layers(config: Mapping[str, Any]) -> int:
    """Of the layers of a model, those that attend to all tokens of a request."""
    layers: int = config["num_hidden_layers"]
    if interval := config.get("full_attention_interval"):  # of Qwen3-Next and Qwen3.5
        return layers // int(interval)
    for name, full in (("hybrid_layer_pattern", 0), ("hybrid_override_pattern", "*")):
        if pattern := config.get(name):  # of MiMo, of Nemotron-H
            return sum(each == full for each in pattern[:layers])
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        others = (*BY_KIND, "jet", "moe", "mlp")
        return sum(each not in others for each in kinds[:layers])
    if indices := config.get("full_attn_idxs"):  # of LFM2
        return len(indices)
    if pattern := _WINDOW_PATTERN.get(str(config.get("model_type"))):
        return layers // int(config.get("sliding_window_pattern") or pattern)
    return layers
