# SPDX-License-Identifier: Apache-2.0
"""Small models of linear attention or state spaces beside attention, with weights on which
attention matters, in the layout in which SGLang loads them from a folder.

Names and shapes of the weights are those of the model's class in transformers, on the meta device;
the numbers are ours. Norms are 1, matrices N(0, 1/fan_in), and queries and keys are scaled as in
``sglang_pat.demo.model``. The states forget slowly enough that one which is lost or taken for
another's changes the tokens (``DECAY``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_pat.demo.model import QK_SCALE

HIDDEN = 512
# Of a token, a state keeps exp(-rate * softplus(input)): rates of the heads, first and last.
DECAY = (0.02, 0.5)
# Beside linear attention, state spaces and MLPs that would speak louder.
LOUDER = {"qwen3_next": 8.0, "qwen3_5": 8.0, "falcon_h1": 16.0, "nemotron_h": 4.0}
OUTWEIGHS = 10.0  # Gemma's output matrix is its embedding: what the layers add must outweigh that

_PLAIN: dict[str, Any] = {
    "vocab_size": 2048,  # as serving/workloads.py
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_DELTA_NET = {
    "num_hidden_layers": 4,  # the last attends
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_expand": 2,
}
# config.json by family; ``class``: its configuration in transformers.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": _PLAIN
    | _DELTA_NET
    | {
        "class": "Qwen3NextConfig",
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": HIDDEN // 2,
        "shared_expert_intermediate_size": HIDDEN // 2,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5": _PLAIN
    | _DELTA_NET
    | {
        "class": "Qwen3_5TextConfig",
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "falcon_h1": _PLAIN
    | _MAMBA
    | {
        "class": "FalconH1Config",
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,  # each with attention and a state space side by side
        "hidden_act": "silu",
        "mamba_d_ssm": 2 * HIDDEN,
        "mamba_n_heads": 2 * HIDDEN // 64,
        "mamba_rms_norm": False,
        "mlp_bias": False,
        "projectors_bias": False,
    },
    "nemotron_h": _PLAIN
    | {
        "class": "NemotronHConfig",
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*M-M*M-M*",  # state space, MLP, attention
        "num_hidden_layers": 12,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "use_bias": False,
        "layer_norm_epsilon": 1e-6,
        "mamba_num_heads": 2 * HIDDEN // 64,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "ssm_state_size": 128,
        "n_groups": 8,  # SGLang reads no other
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
        "use_conv_bias": True,
        "residual_in_fp32": False,
    },
    "granite_hybrid": _PLAIN
    | _MAMBA
    | {
        "class": "GraniteMoeHybridConfig",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "attention"] * 3,
        "head_dim": HIDDEN // 8,
        "hidden_act": "silu",
        "shared_intermediate_size": 2 * HIDDEN,
        "num_local_experts": 0,  # a dense MLP
        "num_experts_per_tok": 0,
        "mamba_n_heads": 2 * HIDDEN // 64,
        "attention_multiplier": 1 / math.sqrt(HIDDEN // 8),
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "position_embedding_type": "nope",
    },
    "gemma3": _PLAIN
    | {  # no state: sliding windows beside full attention, large heads
        "class": "Gemma3TextConfig",
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",  # SGLang reads this one
        "tie_word_embeddings": True,
    },
}
# Families whose norms multiply by 1 + weight, but for the gated norm of linear attention. The
# others, Falcon-H1, Nemotron-H and Granite, have none of queries and keys.
_NORMS_FROM_ONE = ("qwen3_next", "qwen3_5", "gemma3")


def published(family: str) -> dict[str, Any]:
    """The fields of a family's config.json."""
    return {name: value for name, value in FAMILIES[family].items() if name != "class"}


def make_hybrid(
    path: Path, family: str, *, dtype: str = "bfloat16", mtp: bool = False, **changes: Any
) -> Path:
    """Write a model of a family of ``FAMILIES`` to the folder ``path``; ``changes``: to fields of
    its config.json. ``mtp``: with the layer that drafts tokens (multi-token prediction), whose
    random weights guess nearly nothing right."""
    config = FAMILIES[family] | {"torch_dtype": dtype} | changes
    shapes = published_shapes(config)
    if mtp:
        shapes |= _mtp_shapes(shapes, config["num_hidden_layers"])
    del config["class"]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    to_dtype: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: _values(family, name, shape, generator).to(to_dtype)
        for name, shape in sorted(shapes.items())
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a published checkpoint of this configuration, by name."""
    import transformers

    values = {name: value for name, value in config.items() if name != "class"}
    parsed = getattr(transformers, config["class"])(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(parsed)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if config["model_type"] == "nemotron_h":
            name = name.replace("model.", "backbone.", 1)
        shapes |= _by_expert(name, tuple(value.shape))
    return shapes


def _mtp_shapes(shapes: dict[str, tuple[int, ...]], num_layers: int) -> dict[str, tuple[int, ...]]:
    """The weights of a Qwen's MTP layer, by name: one like the model's last, which attends, behind
    what joins a token's embedding and the model's hidden state before it."""
    last = f"model.layers.{num_layers - 1}."
    layer = {
        name.replace(last, "mtp.layers.0."): shape
        for name, shape in shapes.items()
        if name.startswith(last)
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return layer | {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        **{f"mtp.{name}.weight": (HIDDEN,) for name in norms},
    }


def _by_expert(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A weight as checkpoints have it: transformers joins those of all experts in memory."""
    at, found, kind = name.partition(".experts.")
    if not found:
        return {name: shape}
    experts, rows, columns = shape
    if kind == "gate_up_proj":
        parts = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
    else:
        parts = {kind: (rows, columns)}
    return {
        f"{at}.experts.{expert}.{part}.weight": size
        for expert in range(experts)
        for part, size in parts.items()
    }


def _values(
    family: str, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """The numbers of a weight."""
    *_, module, leaf = name.split(".")
    if leaf == "A_log":
        return torch.logspace(*map(math.log10, DECAY), shape[0]).log()
    if leaf in ("dt_bias", "bias"):
        return torch.zeros(shape)
    if leaf == "D":
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.full(shape, _norm(family, name, module))
    scale = 1 / math.sqrt(shape[-1])
    if module in ("embed_tokens", "embeddings"):
        # Gemma scales what is looked up by the root of the width, and has it as output matrix too.
        scale = 2.0 / math.sqrt(HIDDEN) if family == "gemma3" else 0.5
    elif module in ("q_proj", "k_proj") and family not in _NORMS_FROM_ONE:
        scale *= QK_SCALE
    elif module == "o_proj":
        scale *= LOUDER.get(family, 1.0)
    return torch.randn(shape, generator=generator) * scale


def _norm(family: str, name: str, module: str) -> float:
    value = 1.0
    if module in ("q_norm", "k_norm"):
        value = QK_SCALE
    elif family == "gemma3" and module.startswith("post_"):
        value = OUTWEIGHS
    from_one = family in _NORMS_FROM_ONE and not name.endswith("linear_attn.norm.weight")
    return value - 1 if from_one else value
