# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model ``pat`` serves, as far as config.json tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

SLIDING = "a sliding window"
CHUNKED = "chunked attention (use_irope)"
SPARSE = "sparse attention, which SGLang runs on a backend of its own"
CAPPED = "logit capping, under speculative decoding"
NO_ATTENTION = "no attention: linear attention, a state space or an MLP alone"
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


class Heads(NamedTuple):
    """What plans are made for: this rank's query and KV heads, the head dim, and the draft tokens
    of a request (``Target``)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    draft_tokens: int = 1


def reasons_by_layer(model_config: Any) -> list[str]:
    """For each layer of SGLang's ``ModelConfig`` why it is not ours by its kind, or "".

    From SGLang's own lists where it has them, else from ``layer_types`` of config.json. What
    stands in neither, but in the model's code, is found out only when the server runs.
    """
    text = model_config.hf_text_config
    reasons = [""] * model_config.num_hidden_layers
    listed = model_config.swa_attention_layer_ids
    if listed is None:
        for layer, kind in enumerate((getattr(text, "layer_types", None) or ())[: len(reasons)]):
            reasons[layer] = BY_KIND.get(kind, "")
    for layer in listed or ():
        reasons[layer] = CHUNKED if _attends_in_chunks(model_config) else SLIDING
    for layer in sparse_layers(model_config):
        reasons[layer] = SPARSE
    attends = _with_attention(model_config)
    if attends is not None:
        for layer in set(range(len(reasons))) - attends:
            reasons[layer] = NO_ATTENTION
    return reasons


def caps_logits(model_config: Any) -> bool:
    """Whether the attention logits are capped, in all layers: by the code of the two models that
    do (S models/gemma2.py:161, grok.py:425, ``S`` being SGLang 0.5.23's ``srt/``)."""
    names = model_config.hf_config.architectures or ()
    if not any(name.startswith(("Gemma2", "Grok1")) for name in names):
        return False
    cap = getattr(model_config.hf_text_config, "attn_logit_softcapping", 30.0)
    return cap is not None and cap > 0


def sparse_layers(model_config: Any) -> list[int]:
    """Layers that SGLang's wrapper keeps from us, of models with attention of two kinds (MiniMax
    M3): to look at, they are attention like any other."""
    from sglang.srt.configs import model_config as configs

    config = model_config.hf_config
    if not configs.is_minimax_sparse(config):
        return []
    sparse = configs.get_minimax_sparse_attention_config(config)
    return list(configs.get_minimax_sparse_layer_ids(sparse)[1])


def _attends_in_chunks(model_config: Any) -> bool:
    """Whether the layers that SGLang counts as windowed are Llama 4's: MiMo has a chunk size in its
    config.json, too, and windows in its layers."""
    return any("Llama4" in name for name in model_config.hf_config.architectures or ())


def _with_attention(model_config: Any) -> set[int] | None:
    """Layers with attention of a hybrid of SGLang's configurations; None for any other model."""
    for config in (model_config.hf_config, model_config.hf_text_config):
        layers: Iterable[int] | None = getattr(config, "full_attention_layer_ids", None)
        if layers is not None:
            return set(layers)
    return None


def grouped(reasons: list[str]) -> dict[str, list[int]]:
    """Layer ids by reason; those that are ours under ""."""
    groups: dict[str, list[int]] = {}
    for layer, reason in enumerate(reasons):
        groups.setdefault(reason, []).append(layer)
    return groups


def ranges(layers: list[int]) -> str:
    """Ascending layer ids in words: "0-3, 7", or "0, 2, ... 24 (13 layers)" for many ranges."""
    parts: list[tuple[int, int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], layer)
        else:
            parts.append((layer, layer))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    if len(words) > 6:
        return f"{', '.join(words[:3])}, ... {words[-1]} ({len(layers)} layers)"
    return ", ".join(words)
