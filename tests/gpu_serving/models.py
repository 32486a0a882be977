# SPDX-License-Identifier: Apache-2.0
"""Models of the GPU serving tests, with weights on which attention matters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from serving.workloads import VOCAB

from sglang_pat.demo.model import QK_SCALE, make_model

HIDDEN, LAYERS, HEAD_DIM = 512, 4, 128
OUTWEIGHS = 10.0


def make_llama(
    path: Path, *, q_heads: int, kv_heads: int, head_dim: int = HEAD_DIM, seed: int = 0
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
        seed=seed,
    )


def as_qwen3(path: Path) -> Path:
    """The model at ``path`` as a Qwen3, for which SGLang has data parallel attention; Qwen3's norms
    on q and k undo the scales that ``make_model`` gives both, and bring their own."""
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            scale = torch.full((config["head_dim"],), QK_SCALE, dtype=torch.bfloat16)
            weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = scale
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def with_kv_scales(path: Path) -> Path:
    """The model at ``path`` with K/V in fp8 as a checkpoint of ModelOpt has them: scales of each
    layer, the weights as they were."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "ignore": ["*"],  # of the weights
    }
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        # Apart by layer, and K's from V's: one that is taken for another would be seen.
        weights[f"{at}.k_proj.k_scale"] = torch.tensor(0.02 * (layer + 1))
        weights[f"{at}.v_proj.v_scale"] = torch.tensor(0.05 / (layer + 1))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_eagle(path: Path, *, q_heads: int, kv_heads: int) -> Path:
    """A draft model of EAGLE for ``make_llama`` of the same heads: one layer of random weights,
    which guesses nearly nothing right."""
    make_llama(path, q_heads=q_heads, kv_heads=kv_heads, seed=2)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    # The embedding and the output matrix are the target's; the layer has no norm before it.
    layer = {
        name.removeprefix("model."): value
        for name, value in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    fc = torch.randn(hidden, 2 * hidden, generator=generator) / math.sqrt(2 * hidden)
    layer |= {
        "fc.weight": fc.to(torch.bfloat16),
        "fc.bias": torch.zeros(hidden, dtype=torch.bfloat16),
    }
    save_file(layer, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_eagle3(path: Path, *, q_heads: int, kv_heads: int) -> Path:
    """A draft model of EAGLE3 for ``make_llama`` of the same heads, as ``make_eagle``. It reads the
    hidden states behind three of the target's layers."""
    make_eagle(path, q_heads=q_heads, kv_heads=kv_heads)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (path / "config.json").write_text(json.dumps(config))
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(4)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)
        return values.to(torch.bfloat16)

    layer = {
        name.replace("layers.0.", "midlayer."): value
        for name, value in load_file(path / "model.safetensors").items()
        if name.startswith("layers.0.")
    }
    # Queries, keys and values are made of a token's embedding beside the hidden state.
    for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
        scale = 1.0 if name == "v" else QK_SCALE
        layer[f"midlayer.self_attn.{name}_proj.weight"] = matrix(
            heads * HEAD_DIM, 2 * hidden, scale
        )
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        layer[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    layer |= {
        "fc.weight": matrix(hidden, 3 * hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
        # From the draft's tokens to the target's: the same.
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    save_file(layer, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_gemma2(path: Path, *, window: int, q_heads: int = 8, kv_heads: int = 2) -> Path:
    """A Gemma 2: every other layer has a sliding window of ``window``, all cap their logits."""
    config: dict[str, Any] = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": window,
        "attn_logit_softcapping": 10.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",  # SGLang reads this one
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, std: float) -> None:
        values = torch.randn(rows, columns, generator=generator) * std
        weights[f"model.{name}.weight"] = values.to(torch.bfloat16)

    def norm(name: str, scale: float = 1.0) -> None:  # Gemma's norms multiply by 1 + weight
        weights[f"model.{name}.weight"] = torch.full((HIDDEN,), scale - 1, dtype=torch.bfloat16)

    # The embedding is scaled by sqrt(hidden) where it is looked up, and is the output matrix too.
    matrix("embed_tokens", VOCAB, HIDDEN, 2.0 / math.sqrt(HIDDEN))
    fan_in = 1 / math.sqrt(HIDDEN)
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        matrix(f"{at}.self_attn.q_proj", q_heads * HEAD_DIM, HIDDEN, QK_SCALE * fan_in)
        matrix(f"{at}.self_attn.k_proj", kv_heads * HEAD_DIM, HIDDEN, QK_SCALE * fan_in)
        matrix(f"{at}.self_attn.v_proj", kv_heads * HEAD_DIM, HIDDEN, fan_in)
        matrix(f"{at}.self_attn.o_proj", HIDDEN, q_heads * HEAD_DIM, fan_in)
        matrix(f"{at}.mlp.gate_proj", 2 * HIDDEN, HIDDEN, fan_in)
        matrix(f"{at}.mlp.up_proj", 2 * HIDDEN, HIDDEN, fan_in)
        matrix(f"{at}.mlp.down_proj", HIDDEN, 2 * HIDDEN, fan_in)
        for name in ("input", "pre_feedforward"):
            norm(f"{at}.{name}_layernorm")
        # The output matrix is that of the embedding: unless what the layers add outweighs it, every
        # token follows itself.
        norm(f"{at}.post_attention_layernorm", OUTWEIGHS)
        norm(f"{at}.post_feedforward_layernorm", OUTWEIGHS)
    norm("norm")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
