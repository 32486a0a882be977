# SPDX-License-Identifier: Apache-2.0
"""config.json of tiny models of several kinds of attention, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAIN: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

LLAMA = PLAIN | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GEMMA2 = PLAIN | {  # every other layer has a sliding window
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 256,
    "sliding_window": 4096,
}
STEP3P5 = PLAIN | {  # experts and sliding windows
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 512,
    "num_attention_groups": 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "attention_other_setting": {
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 64,
        "attention_type": "sliding_attention",
    },
}
VISION = {  # of a model with pictures; they are not looked at
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": PLAIN
    | {
        "model_type": "llama4_text",
        "num_local_experts": 2,
        "attention_chunk_size": 512,
        "intermediate_size_mlp": 256,
    },
    "vision_config": VISION
    | {
        "model_type": "llama4_vision_model",
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
}
WINDOWED = PLAIN | {  # of the next, every other layer has a sliding window
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GPT_OSS = WINDOWED | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
OLMO3 = WINDOWED | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo3"}
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "torch_dtype": "bfloat16",
    "text_config": WINDOWED
    | {
        "model_type": "gemma4_text",
        "head_dim": 256,
        "global_head_dim": 512,  # of the layers without a window
        "num_global_key_value_heads": 2,
    },
    "vision_config": VISION | {"model_type": "gemma4_vision"},
}
EXAONE4 = PLAIN | {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "sliding_window": 512,
    "sliding_window_pattern": 4,
}
IQUEST_Q1 = PLAIN | {  # as many layers as its pattern of them has by default
    "architectures": ["IQuestQ1ForCausalLM"],
    "model_type": "iquest_q1",
    "num_hidden_layers": 88,
}
MINICPM = PLAIN | {  # sparse attention in all layers
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "sparse_config": {"kernel_size": 32, "kernel_stride": 16, "block_size": 64, "topk": 64},
}
MINIMAX_M3 = PLAIN | {  # sparse attention in all layers but the first
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m2",
    "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1]},
}
DEEPSEEK = {  # MLA
    **PLAIN,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "head_dim": 16,
    "v_head_dim": 32,
    "rope_scaling": {  # the only kind that SGLang's DeepSeek has on a CPU
        "type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}


# Latents of the published sizes, which the CUDA kernels read.
LATENTS = DEEPSEEK | {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


class _Fields(dict[str, Any]):
    """A part of a configuration of a class that is not here."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def of_its_own(architecture: str, model_type: str = "of_its_own", **fields: Any) -> dict[str, Any]:
    """A model whose configuration neither transformers nor SGLang has: it brings its own code, in
    place of which its fields are taken as they are, and its parts by their own types."""
    from transformers import AutoConfig, LlamaConfig

    def __post_init__(self: Any, **kwargs: Any) -> None:
        for name, part in kwargs.items():
            if name.endswith("_config") and isinstance(part, dict) and "model_type" in part:
                kwargs[name] = AutoConfig.for_model(**part)
            elif name.endswith("_configs"):  # of the layers
                kwargs[name] = json.loads(json.dumps(part), object_hook=_Fields)
        LlamaConfig.__post_init__(self, **kwargs)

    members = {"model_type": model_type, "__post_init__": __post_init__}
    cls = type("OfItsOwn", (LlamaConfig,), members)
    AutoConfig.register(model_type, cls, exist_ok=True)
    return PLAIN | {"architectures": [architecture], "model_type": model_type} | fields


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Make ``folder`` a model of which there is only config.json; ``changes`` to its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
