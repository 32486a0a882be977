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
QWEN3_MOE = PLAIN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
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


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Make ``folder`` a model of which there is only config.json; ``changes`` to its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
