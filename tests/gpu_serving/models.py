# SPDX-License-Identifier: Apache-2.0
"""Models of the GPU serving tests, with weights on which attention matters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from kit.hybrid_models import make_hybrid
from safetensors.torch import load_file, save_file
from serving.workloads import VOCAB

from sglang_pat.demo.model import QK_SCALE, make_model

HIDDEN, LAYERS, HEAD_DIM = 512, 4, 128
Q_HEADS, KV_HEADS = 8, 2  # of drafts, and of what they are for
Weights = dict[str, torch.Tensor]


def make_llama(
    path: Path, *, q_heads: int, kv_heads: int, head_dim: int = HEAD_DIM, **options: Any
) -> Path:
    return make_model(
        path,
        hidden=HIDDEN // 8 * q_heads,  # transformers wants a multiple of the heads
        layers=LAYERS,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=VOCAB,
        dtype="bfloat16",
        **options,
    )


def make_qwen3(path: Path) -> Path:
    """A Qwen3, for which SGLang has data parallel attention. Its norms on q and k undo the scales
    that ``make_model`` gives both, and bring their own."""
    make_llama(path, q_heads=Q_HEADS, kv_heads=KV_HEADS)
    weights = _weights(path)
    scale = torch.full((HEAD_DIM,), QK_SCALE, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        for norm in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = scale.clone()
    return _rewrite(path, weights, architectures=["Qwen3ForCausalLM"], model_type="qwen3")


def _weights(path: Path) -> Weights:
    return load_file(path / "model.safetensors")


def _rewrite(path: Path, weights: Weights, **changes: Any) -> Path:
    """Give a model other weights, and ``changes`` to its configuration."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 1) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)
    return values.to(torch.bfloat16)


def with_kv_scales(path: Path) -> Path:
    """The model at ``path`` with K/V in fp8 as a checkpoint of ModelOpt has them: scales of each
    layer, the weights as they were."""
    weights = _weights(path)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.self_attn"
        # Apart by layer, and K's from V's: one that is taken for another would be seen.
        weights[f"{at}.k_proj.k_scale"] = torch.tensor(0.02 * (layer + 1))
        weights[f"{at}.v_proj.v_scale"] = torch.tensor(0.05 / (layer + 1))
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "ignore": ["*"],  # of the weights
    }
    return _rewrite(path, weights, quantization_config=quantization)


def make_eagle(path: Path) -> Path:
    """A draft model of EAGLE for a ``make_llama`` of Q_HEADS: one layer of random weights, which
    guesses nearly nothing right. The embedding and the output matrix are the target's, and the
    layer has no norm before it."""
    make_llama(path, q_heads=Q_HEADS, kv_heads=KV_HEADS, seed=2)
    layer = {
        name.removeprefix("model."): value
        for name, value in _weights(path).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    layer |= {
        "fc.weight": _matrix(torch.Generator().manual_seed(3), HIDDEN, 2 * HIDDEN),
        "fc.bias": torch.zeros(HIDDEN, dtype=torch.bfloat16),
    }
    return _rewrite(path, layer, architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1)


def make_eagle3(path: Path) -> Path:
    """A draft model of EAGLE3, as ``make_eagle``. It reads the hidden states behind three of the
    target's layers."""
    make_eagle(path)
    generator = torch.Generator().manual_seed(4)
    layer = {
        name.replace("layers.0.", "midlayer."): value
        for name, value in _weights(path).items()
        if name.startswith("layers.0.")
    }
    # Queries, keys and values are made of a token's embedding beside the hidden state.
    for name, heads in (("q", Q_HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        matrix = _matrix(generator, heads * HEAD_DIM, 2 * HIDDEN, 1 if name == "v" else QK_SCALE)
        layer[f"midlayer.self_attn.{name}_proj.weight"] = matrix
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        layer[f"{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    layer |= {
        "fc.weight": _matrix(generator, HIDDEN, 3 * HIDDEN),
        "lm_head.weight": _matrix(generator, VOCAB, HIDDEN),
        # From the draft's tokens to the target's: the same.
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    return _rewrite(
        path,
        layer,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCAB,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    )


def make_gemma2(path: Path) -> Path:
    """A Gemma 2: every other layer has a sliding window, all cap their logits. Its norms are those
    of a Gemma 3, but for those of queries and keys, which it lacks."""
    changes = {
        "class": "Gemma2Config",
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "attn_logit_softcapping": 10.0,
        "final_logit_softcapping": 30.0,
    }
    make_hybrid(path, "gemma3", **changes)
    weights = _weights(path)
    for name in weights:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] *= QK_SCALE
    return _rewrite(path, weights)
