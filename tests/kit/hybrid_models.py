# SPDX-License-Identifier: Apache-2.0
"""Small models of linear attention, state spaces or windows beside attention, and of latents, with
weights on which attention matters, in the layout in which SGLang loads them from a folder.

transformers makes and saves them; the numbers are ours. Norms are 1, matrices N(0, 1/fan_in), and
queries and keys are scaled as in ``sglang_pat.demo.model``. The states forget slowly enough that
one which is lost or taken for another's changes the tokens (``DECAY``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_pat.demo.model import QK_SCALE

HIDDEN = 512
# Of a token, a state keeps exp(-rate * softplus(input)): rates of the heads, first and last.
DECAY = (0.02, 0.5)
# Beside linear attention, state spaces and MLPs that would speak louder.
LOUDER = {"qwen3_next": 8.0, "qwen3_5": 8.0, "falcon_h1": 16.0, "nemotron_h": 4.0}
OUTWEIGHS = 10.0  # Gemma's output matrix is its embedding: what the layers add must outweigh that

_PLAIN: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 2048,  # as serving/workloads.py
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_DELTA_NET = _PLAIN | {
    "num_hidden_layers": 4,  # the last attends
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = _PLAIN | {"mamba_d_state": 128, "mamba_n_heads": 2 * HIDDEN // 64}
# config.json by family; ``class``: its configuration in transformers, whose defaults are the rest.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_NET
    | {
        "class": "Qwen3NextConfig",
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "moe_intermediate_size": HIDDEN // 2,
        "shared_expert_intermediate_size": HIDDEN // 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5": _DELTA_NET
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
    "falcon_h1": _MAMBA
    | {
        "class": "FalconH1Config",
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,  # each with attention and a state space side by side
    },
    "nemotron_h": _PLAIN
    | {
        "class": "NemotronHConfig",
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*M-M*M-M*",  # state space, MLP, attention
        "num_hidden_layers": 12,
        "layer_norm_epsilon": 1e-6,
        "mamba_num_heads": 2 * HIDDEN // 64,
        "n_groups": 8,  # SGLang reads no other
        "chunk_size": 128,
    },
    "granite_hybrid": _MAMBA
    | {
        "class": "GraniteMoeHybridConfig",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "attention"] * 3,
        "head_dim": HIDDEN // 8,
        "shared_intermediate_size": 2 * HIDDEN,
        "num_local_experts": 0,  # a dense MLP
        "num_experts_per_tok": 0,
        "attention_multiplier": 1 / math.sqrt(HIDDEN // 8),
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "position_embedding_type": "nope",
        "tie_word_embeddings": False,
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
        "hidden_act": "gelu_pytorch_tanh",  # SGLang reads this one
    },
    "gpt_oss": _PLAIN
    | {  # no state either: a sink in each layer, sliding windows beside full attention, experts
        "class": "GptOssConfig",
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    "deepseek_v2": _PLAIN
    | {  # latents (MLA) of the published sizes, without experts
        "class": "DeepseekV2Config",
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "head_dim": 64,  # of the rope part, for transformers
        "v_head_dim": 128,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN // 2,
        "moe_layer_freq": 1,
        "rope_scaling": {  # the only kind that SGLang's DeepSeek has on a CPU
            "type": "yarn",
            "factor": 2,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
}
# Sinks of the first and the last query head: as great as the greatest of a few hundred logits.
SINKS = (6.0, 14.0)
# Families whose norms multiply by 1 + weight, but for the gated norm of linear attention. The
# others, Falcon-H1, Nemotron-H and Granite, have none of queries and keys.
_NORMS_FROM_ONE = ("qwen3_next", "qwen3_5", "gemma3")


def make_hybrid(
    path: Path, family: str, *, dtype: str = "bfloat16", mtp: bool = False, **changes: Any
) -> Path:
    """Write a model of a family of ``FAMILIES`` to the folder ``path``; ``changes``: to fields of
    its config.json. ``mtp``: with the layer that drafts tokens (multi-token prediction), whose
    random weights guess nearly nothing right."""
    import transformers

    config = FAMILIES[family] | {"torch_dtype": dtype} | changes
    made_by = getattr(transformers, config.pop("class"))
    parsed = made_by(**config)
    model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.state_dict().items()):
        if name != "lm_head.weight" or not parsed.tie_word_embeddings:
            weight.copy_(_values(family, name, tuple(weight.shape), generator))
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    # Not transformers' form of it: SGLang reads the fields that published models have.
    (path / "config.json").write_text(json.dumps(config))
    if mtp:
        weights = load_file(path / "model.safetensors")
        weights |= _mtp_layer(family, weights, config["num_hidden_layers"], generator)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _mtp_layer(
    family: str, weights: dict[str, torch.Tensor], num_layers: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The weights of a Qwen's MTP layer, by name: one like the model's last, which attends, behind
    what joins a token's embedding and the model's hidden state before it."""
    last = f"model.layers.{num_layers - 1}."
    shapes = {
        name.replace(last, "mtp.layers.0."): tuple(weight.shape)
        for name, weight in weights.items()
        if name.startswith(last)
    }
    shapes["mtp.fc.weight"] = (HIDDEN, 2 * HIDDEN)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{norm}.weight"] = (HIDDEN,)
    dtype = weights["lm_head.weight"].dtype
    return {
        name: _values(family, name, shape, generator).to(dtype) for name, shape in shapes.items()
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
    if leaf == "sinks":
        return torch.linspace(*SINKS, *shape)
    if len(shape) == 1:
        return torch.full(shape, _norm(family, name, module))
    scale = 1 / math.sqrt(shape[-1])
    if module in ("embed_tokens", "embeddings"):
        # Gemma scales what is looked up by the root of the width, and has it as output matrix too.
        scale = 2.0 / math.sqrt(HIDDEN) if family == "gemma3" else 0.5
    elif module == "q_proj" and family == "deepseek_v2":
        scale *= QK_SCALE**2  # its K is made by the same matrix as V
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
