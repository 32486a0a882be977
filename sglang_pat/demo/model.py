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
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QK_SCALE = 2.0  # on q and on k: attention logits ~ N(0, 4^2) instead of N(0, 1)
_RECIPE = 1  # of the fingerprint: raise it when other numbers are written for equal parameters
FINGERPRINT = "sglang_pat_model.json"  # file that says how a model was made
_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


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
    architecture: str = "LlamaForCausalLM",
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` to the folder ``path`` and return it.

    Deterministic: equal parameters give equal bytes. A folder already made with the same parameters
    is left as it is (other files in it, such as a tokenizer, are never touched).

    ``hidden``: width of the residual stream; the MLP is twice as wide. ``vocab``: token ids, and
    rows of the (untied) output matrix. ``max_positions``: longest context, in tokens. ``dtype``:
    ``float32``, ``bfloat16`` or ``float16``, of the weights, so of the K/V cache too.
    ``architecture``: ``LlamaForCausalLM``, or ``Qwen3ForCausalLM`` (with norms on q and k).

    Raises ValueError for head counts that do not divide, an odd ``head_dim`` (RoPE rotates pairs),
    and an architecture that is not known.
    """
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "max_positions": max_positions,
    }
    if q_heads % kv_heads or head_dim % 2 or architecture not in _MODEL_TYPES:
        raise ValueError(
            f"q_heads {q_heads}, kv_heads {kv_heads}, head_dim {head_dim}, {architecture}: "
            "kv_heads must divide q_heads, head_dim be even, and the architecture one of "
            f"{', '.join(_MODEL_TYPES)}"
        )
    parameters = {**sizes, "dtype": dtype, "seed": seed, "architecture": architecture}
    recipe = json.dumps({"recipe": _RECIPE, **parameters}, sort_keys=True)
    folder = Path(path)
    fingerprint = folder / FINGERPRINT
    if fingerprint.exists() and fingerprint.read_text() == recipe:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint.unlink(missing_ok=True)  # a broken-off write must not pass for a finished one
    config = _config(sizes, dtype, architecture)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_weights(folder / "model.safetensors", sizes, dtype, seed, architecture)
    fingerprint.write_text(recipe)
    return folder


def _config(sizes: dict[str, int], dtype: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": sizes["hidden"],
        "intermediate_size": 2 * sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["q_heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab"],
        "max_position_embeddings": sizes["max_positions"],
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


# Of a tensor: name, shape, mean and standard deviation.
_Spec = tuple[str, tuple[int, ...], float, float]


def _specs(sizes: dict[str, int], architecture: str) -> Iterator[_Spec]:
    hidden, vocab, head_dim = sizes["hidden"], sizes["vocab"], sizes["head_dim"]
    q_width, kv_width = sizes["q_heads"] * head_dim, sizes["kv_heads"] * head_dim
    has_qk_norm = architecture == "Qwen3ForCausalLM"
    qk_scale = 1.0 if has_qk_norm else QK_SCALE  # a norm would undo a scale before it

    def matrix(name: str, fan_out: int, fan_in: int, scale: float = 1.0) -> _Spec:
        return f"{name}.weight", (fan_out, fan_in), 0.0, scale / math.sqrt(fan_in)

    def norm(name: str, width: int, value: float = 1.0) -> _Spec:
        return f"{name}.weight", (width,), value, 0.0

    # A lookup has a fan-in of 1, but an embedding of unit variance outweighs the attention of a few
    # layers (13 % of the tokens survive zeroed attention with std 1, 0.1 % with 0.25), and a small
    # one lets fp32 rounding flip more near-ties (5 in a million tokens with std 1, 12 with 0.25).
    yield "model.embed_tokens.weight", (vocab, hidden), 0.0, 0.5
    for layer in range(sizes["layers"]):
        at = f"model.layers.{layer}."
        yield norm(at + "input_layernorm", hidden)
        yield matrix(at + "self_attn.q_proj", q_width, hidden, qk_scale)
        yield matrix(at + "self_attn.k_proj", kv_width, hidden, qk_scale)
        yield matrix(at + "self_attn.v_proj", kv_width, hidden)
        yield matrix(at + "self_attn.o_proj", hidden, q_width)
        if has_qk_norm:
            yield norm(at + "self_attn.q_norm", head_dim, QK_SCALE)
            yield norm(at + "self_attn.k_norm", head_dim, QK_SCALE)
        yield norm(at + "post_attention_layernorm", hidden)
        yield matrix(at + "mlp.gate_proj", 2 * hidden, hidden)
        yield matrix(at + "mlp.up_proj", 2 * hidden, hidden)
        yield matrix(at + "mlp.down_proj", hidden, 2 * hidden)
    yield norm("model.norm", hidden)
    yield matrix("lm_head", vocab, hidden)


def _write_weights(
    path: Path, sizes: dict[str, int], dtype: str, seed: int, architecture: str
) -> None:
    import torch
    from safetensors.torch import save_file

    to_dtype: torch.dtype = getattr(torch, dtype)
    weights: dict[str, torch.Tensor] = {}
    for name, shape, mean, std in _specs(sizes, architecture):
        # One generator per tensor, seeded by its name: a tensor's numbers do not depend on which
        # others exist, so more layers extend a model instead of changing it.
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(shape, generator=generator) * std + mean
        weights[name] = values.to(to_dtype)
    partial = path.with_suffix(".partial")
    save_file(weights, partial, metadata={"format": "pt"})
    shutil.move(partial, path)
