# SPDX-License-Identifier: Apache-2.0
"""Random models on which attention decides the tokens, in the layout SGLang loads from a folder.

``--load-format dummy`` gives uniform +-1e-3 weights, norms included: there the tokens stay the same
even when attention returns zeros, so nothing about attention can be tested with it. Here norms are
1, matrices are N(0, 1/fan_in) and q and k are scaled by 2, so that attention logits have a standard
deviation of 4: each query attends to a few tokens, and losing or swapping one changes what follows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QK_SCALE = 2.0  # on q and on k: attention logits ~ N(0, 4^2) instead of N(0, 1)


def make_model(
    path: str | Path,
    *,
    hidden: int = 256,
    layers: int = 2,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 2048,
    max_positions: int = 8192,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a Llama's ``config.json`` and ``model.safetensors`` to the folder ``path``; return it.

    Deterministic: equal parameters give equal bytes. Other files in the folder stay.

    ``hidden``: width of the residual stream; the MLP is twice as wide. ``vocab``: token ids, and
    rows of the (untied) output matrix. ``max_positions``: longest context, in tokens. ``dtype``:
    ``float32``, ``bfloat16`` or ``float16``, of the weights, so of the K/V cache too.

    Raises ValueError for head counts that do not divide, and an odd ``head_dim`` (RoPE rotates
    pairs).
    """
    if q_heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"q_heads {q_heads}, kv_heads {kv_heads}, head_dim {head_dim}: kv_heads must divide "
            "q_heads, and head_dim be even"
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": dtype,
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    specs = _specs(hidden, layers, q_heads * head_dim, kv_heads * head_dim, vocab)
    _write_weights(folder / "model.safetensors", specs, dtype, seed)
    return folder


# Of a tensor: name, shape, mean and standard deviation.
_Spec = tuple[str, tuple[int, ...], float, float]


def _specs(hidden: int, layers: int, q_width: int, kv_width: int, vocab: int) -> Iterator[_Spec]:
    def matrix(name: str, fan_out: int, fan_in: int, scale: float = 1.0) -> _Spec:
        return f"{name}.weight", (fan_out, fan_in), 0.0, scale / math.sqrt(fan_in)

    def norm(name: str) -> _Spec:
        return f"{name}.weight", (hidden,), 1.0, 0.0

    # A lookup has a fan-in of 1, but an embedding of unit variance outweighs the attention of a few
    # layers (13 % of the tokens survive zeroed attention with std 1, 0.1 % with 0.25), and a small
    # one lets fp32 rounding flip more near-ties (5 in a million tokens with std 1, 12 with 0.25).
    yield "model.embed_tokens.weight", (vocab, hidden), 0.0, 0.5
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield norm(at + "input_layernorm")
        yield matrix(at + "self_attn.q_proj", q_width, hidden, QK_SCALE)
        yield matrix(at + "self_attn.k_proj", kv_width, hidden, QK_SCALE)
        yield matrix(at + "self_attn.v_proj", kv_width, hidden)
        yield matrix(at + "self_attn.o_proj", hidden, q_width)
        yield norm(at + "post_attention_layernorm")
        yield matrix(at + "mlp.gate_proj", 2 * hidden, hidden)
        yield matrix(at + "mlp.up_proj", 2 * hidden, hidden)
        yield matrix(at + "mlp.down_proj", hidden, 2 * hidden)
    yield norm("model.norm")
    yield matrix("lm_head", vocab, hidden)


def _write_weights(path: Path, specs: Iterator[_Spec], dtype: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for name, shape, mean, std in specs:
        # One generator per tensor, seeded by its name: a tensor's numbers do not depend on which
        # others exist, so more layers extend a model instead of changing it.
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(shape, generator=generator) * std + mean
        weights[name] = values.to(getattr(torch, dtype))
    partial = path.with_suffix(".partial")  # a server of an older model may have the file mapped
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(path)


def save_tokenizer(
    tokenizer: Any, folder: Path, *, end: str, chat_template: str, **more: str
) -> None:
    """Write a tokenizer of ``tokenizers`` to a model's folder, as transformers loads it. ``end``:
    the text of the id that ends an answer; ``more``: further fields."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more) + "\n")
