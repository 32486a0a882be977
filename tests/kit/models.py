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
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}

LLAMA = PLAIN | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GEMMA2 = PLAIN | {  # every other layer has a sliding window
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
QWEN3_MOE = PLAIN | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN3_NEXT = (
    PLAIN
    | _EXPERTS
    | {  # every fourth layer attends
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 256,
        "shared_expert_intermediate_size": 64,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 128,
        "partial_rotary_factor": 0.25,
    }
)
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
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "attention_chunk_size": 512,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 256,
        "no_rope_layers": [1, 1, 1, 0],
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
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {  # the only kind that SGLang's DeepSeek has on a CPU
        "type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def of_its_own(architecture: str, model_type: str = "of_its_own", **fields: Any) -> dict[str, Any]:
    """A model whose configuration neither transformers nor SGLang has: it brings its own code, in
    place of which its fields are taken as they are, and its parts by their own types."""
    from transformers import AutoConfig, LlamaConfig

    def __post_init__(self: Any, **kwargs: Any) -> None:
        for name, part in kwargs.items():
            if name.endswith("_config") and isinstance(part, dict) and "model_type" in part:
                kwargs[name] = AutoConfig.for_model(**part)
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
