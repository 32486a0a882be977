# SPDX-License-Identifier: Apache-2.0
"""What models do in their layers, by config.json and by what SGLang's code of them is known to do.

``FACTS`` lists what no list of layers in config.json shows, and often no layer of a loaded model
either, as it goes with the call. ``sglang-pat doctor`` (``kinds``) and a server's survey of its
model (``facts``) both ask it. ``S``: SGLang 0.5.23's ``srt/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

SLIDING = "a sliding window"
CHUNKED = "chunked attention (use_irope)"
SPARSE = "sparse attention, which SGLang runs on a backend of its own"
CAPPED = "logit capping, under speculative decoding"
NO_ATTENTION = "no attention: linear attention, a state space or an MLP alone"
TEMPERATURE = "a temperature by position"
# Kinds of layers in config.json that are not ours.
BY_KIND = {
    "sliding_attention": SLIDING,
    "sliding_window": SLIDING,
    "swa": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": NO_ATTENTION,
    "mamba": NO_ATTENTION,
    "conv": NO_ATTENTION,
}


# Models that give their attention sinks, by architecture or by the type of the text model, which
# wrappers have without a name (InternVL of GPT-OSS).
WITH_SINKS = (
    *("gpt_oss", "granite_swa", "granitemoe_swa"),
    *("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
)


class Fact(NamedTuple):
    """Why layers of some models are the base's."""

    names: tuple[str, ...]  # of architectures
    reason: str
    holds: Callable[[Any, int], object] = lambda config, layer: True  # by the text model's config


def _on(name: str) -> Callable[[Any, int], object]:
    """Whether this field of the configuration is set, for all layers."""
    return lambda config, layer: getattr(config, name, None)


FACTS = (
    Fact(  # S models/iquest_q1.py:421
        ("IQuestQ1ForCausalLM",),
        "an attention sink that the model applies by its softmax sums",
        _on("enable_sink_attention"),
    ),
    Fact(("InklingForConditionalGeneration",), "relative biases"),
    Fact(  # from the second time on that it runs its layers (S models/iquest_loopcoder.py:190)
        ("IQuestLoopCoderForCausalLM",),
        SLIDING,
        lambda config, layer: layer >= config.num_hidden_layers,
    ),
    Fact(  # S models/grok.py:440
        ("Grok1ForCausalLM", "Grok1ModelForCausalLM"),
        TEMPERATURE,
        lambda config, layer: getattr(config, "attn_temperature_len", -1) > 0,
    ),
    Fact(  # SGLang marks them so, and has no chunk size for them (S models/muse_spark.py:344)
        ("muse_spark_text",),
        CHUNKED,
        lambda config, layer: config.layer_rope_theta[layer] > 0,
    ),
    Fact(  # S models/sdar.py:168, sdar_moe.py:253, llada2.py:1021
        ("SDARForCausalLM", "SDARMoeForCausalLM", "LLaDA2MoeModelLM"),
        "attention type encoder_only",
    ),
    Fact(
        ("HrmTextForCausalLM", "DiffusionGemmaForBlockDiffusion"),
        "attention type decoder_bidirectional",
    ),
    Fact(  # S models/gemma3_causal.py:241
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "attention type decoder_bidirectional",
        _on("use_bidirectional_attention"),
    ),
)


def names_of(model_config: Any) -> set[str]:
    """Of a model and its text model: architectures, and the text model's type."""
    text = model_config.hf_text_config
    named = (model_config.hf_config.architectures, getattr(text, "architectures", None))
    return {name for names in named for name in names or ()} | {text.model_type}


def facts(model_config: Any) -> Callable[[int], str]:
    """Of SGLang's ``ModelConfig``: why a layer is the base's, by ``FACTS``, or ""."""
    text, names = model_config.hf_text_config, names_of(model_config)
    known = [fact for fact in FACTS if not names.isdisjoint(fact.names)]
    sparse = sparse_layers(model_config)

    def reason(layer: int) -> str:
        if layer in sparse:
            return SPARSE
        return next((fact.reason for fact in known if fact.holds(text, layer)), "")

    return reason


def kinds(model_config: Any) -> list[str]:
    """For each layer of SGLang's ``ModelConfig`` why it is not ours, or "", whatever its heads."""
    text, fact = model_config.hf_text_config, facts(model_config)
    reasons = [""] * model_config.num_hidden_layers
    listed = model_config.swa_attention_layer_ids
    if listed is None:
        for layer, kind in enumerate((getattr(text, "layer_types", None) or ())[: len(reasons)]):
            reasons[layer] = BY_KIND.get(kind, "")
    # Those that SGLang counts as windowed are Llama 4's chunks: MiMo has a chunk size in its
    # config.json, too, and windows in its layers.
    llama4 = any("Llama4" in name for name in model_config.hf_config.architectures or ())
    for layer in listed or ():
        reasons[layer] = CHUNKED if llama4 else SLIDING
    for config in (model_config.hf_config, text):  # of a hybrid of SGLang's configurations
        attends: Iterable[int] | None = getattr(config, "full_attention_layer_ids", None)
        if attends is not None:
            for layer in set(range(len(reasons))) - set(attends):
                reasons[layer] = NO_ATTENTION
            break
    for layer, block in enumerate(getattr(text, "block_configs", None) or ()):
        attention = getattr(block, "attention", None)  # S models/nemotron_nas.py:76
        if getattr(attention, "no_op", False):
            reasons[layer] = NO_ATTENTION
    # Some models run their layers several times, each time as attention of its own.
    reasons *= model_config.num_attention_layers // len(reasons)
    return [
        reason if reason == NO_ATTENTION else fact(layer) or reason
        for layer, reason in enumerate(reasons)
    ]


def caps_logits(model_config: Any) -> bool:
    """Whether the attention logits are capped, in all layers: by the code of the two models that
    do (S models/gemma2.py:161, grok.py:425)."""
    names = model_config.hf_config.architectures or ()
    if not any(name.startswith(("Gemma2", "Grok1")) for name in names):
        return False
    cap = getattr(model_config.hf_text_config, "attn_logit_softcapping", 30.0)
    return cap is not None and cap > 0


def sparse_layers(model_config: Any) -> list[int]:
    """Layers that SGLang's wrapper keeps from us (MiniMax M3): to look at, they are attention."""
    from sglang.srt.configs import model_config as configs

    config = model_config.hf_config
    if not configs.is_minimax_sparse(config):
        return []
    sparse = configs.get_minimax_sparse_attention_config(config)
    return list(configs.get_minimax_sparse_layer_ids(sparse)[1])
