# SPDX-License-Identifier: Apache-2.0
"""config.json of every decoder architecture that SGLang has, as far as it can be made up: the
defaults of the configuration's class in SGLang or transformers, with fewer layers. Widths and heads
stay, as nothing is allocated, or are a released model's."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from kit.models import of_its_own

LAYERS = 12  # enough for every pattern of layers
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")


@cache
def _classes() -> dict[str, Any]:
    """Configuration classes by the stem of their name, and by architecture where transformers says
    so."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    known: dict[str, Any] = {}
    for kind, name in CONFIG_MAPPING_NAMES.items():
        known[name.removesuffix("Config").lower()] = kind
    for table in dir(modeling_auto):
        if table.endswith("_MAPPING_NAMES"):
            for kind, names in getattr(modeling_auto, table).items():
                for name in [names] if isinstance(names, str) else names:
                    if kind in CONFIG_MAPPING_NAMES:
                        known.setdefault(name, kind)
    found = {name: (lambda kind=kind: CONFIG_MAPPING[kind]) for name, kind in known.items()}
    for cls in (*CONFIG_MAPPING._extra_content.values(), *_CONFIG_REGISTRY.values()):
        found[cls.__name__.removesuffix("Config").rstrip("_").lower()] = lambda cls=cls: cls
    return found


def shrunk(config: Any) -> Any:
    """A configuration with at most ``LAYERS`` layers, in its parts too."""
    if not isinstance(config, dict):
        return config
    counts = {config[name] for name in _COUNTS if isinstance(config.get(name), int)}
    small = {}
    for name, value in config.items():
        if name in _COUNTS and isinstance(value, int):
            small[name] = min(value, LAYERS)
        elif isinstance(value, list) and len(value) in counts:
            small[name] = value[:LAYERS]
        else:
            small[name] = shrunk(value)
    return small


def base_of(stem: str) -> dict[str, Any]:
    """What the class of that stem writes into config.json, with few layers; the fields of ``_OWN``
    without a class."""
    if stem not in _classes():
        return of_its_own(stem) | _OWN
    written: dict[str, Any] = json.loads(_classes()[stem]()().to_json_string(use_diff=False))
    written.pop("dtype", None)
    return shrunk(written)


# fmt: off
# What config.json files have and the classes have no default for.
_USUAL: dict[str, Any] = {"pad_token_id": 0, "hidden_act": "silu", "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "full_attention_interval": 4, "rope_parameters": {"rope_type": "default",
    "rope_theta": 10000.0}}
# Of models that bring their own configuration.
_OWN = {"hidden_size": 4096, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "vocab_size": 1024}
# Of kinds of models.
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 256,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_key_value_heads": 32}
_BAILING = _EXPERTS | {"embedding_dropout": 0.0, "use_bias": False, "use_qkv_bias": False,
    "rotary_dim": 128, "partial_rotary_factor": 1.0, "norm_head": False,
    "moe_shared_expert_intermediate_size": 256, "num_nextn_predict_layers": 0,
    "norm_topk_prob": True}
_GROK = {"num_local_experts": 8, "num_experts_per_tok": 2, "attn_logit_softcapping": 30.0,
    "embedding_multiplier_scale": 1.0, "output_multiplier_scale": 1.0, "context_len": 8192}
_MINICPM = {"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}
_FOURTHS = [*["sliding_attention"] * 3, "full_attention"] * (LAYERS // 4)
_SHARED = {"num_hidden_layers": 15, "num_kv_shared_layers": 5,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 3,
    "activation_sparsity_pattern": [0.0] * 15, "intermediate_size": [1024] * 15}
_KIMI = _EXPERTS | _MLA | {"num_hidden_layers": LAYERS, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "routed_scaling_factor": 1.0,
    "linear_attn_config": {"full_attn_layers": [4, 8, 12],
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11], "head_dim": 128, "num_heads": 32,
    "short_conv_kernel_size": 4}}
_MIMO = _EXPERTS | {"head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8,
    "hybrid_layer_pattern": [0, 1] * (LAYERS // 2), "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False, "sliding_window": 128, "sliding_window_size": 128,
    "attention_value_scale": 1.0, "layernorm_epsilon": 1e-06,
    "moe_layer_freq": [0] + [1] * (LAYERS - 1), "swa_rope_theta": 10000.0}
_M3 = {"qk_norm_type": "per_head", "swiglu_alpha": 1.7, "swiglu_limit": 7.0,
    "num_local_experts": 8, "use_qk_norm": True, "rotary_dim": 64,
    "moe_layer_freq": [0, 0, 0] + [1] * (LAYERS - 3), "dense_intermediate_size": 1024,
    "sparse_attention_config": {"sparse_attention_freq": [0, 0, 0] + [1] * (LAYERS - 3),
    "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128,
    "sparse_topk_blocks": 16}}
_MUSE = {"image_token_id": 1, "video_token_id": 2, "layer_types": _FOURTHS,
    "no_rope_layers": [1, 1, 1, 0] * (LAYERS // 4)}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 4096}
_JET = _OWN | {"rms_norm_eps": 1e-06, "max_position_embeddings": 8192, "rope_theta": 10000.0,
    "layer_types": ["jet", "attn", "jet", "swa"] * (LAYERS // 4),
    "efficient_attention_config": {"jet": {"mode": "chunk", "expand_v": 2.0, "num_heads": 12,
    "head_dim": 96, "norm_eps": 1e-05, "conv_size": 4, "dconv_generator_reduction": 8,
    "dconv_implementation": "triton"}, "swa": {"window_size": 1024}}}
_STEP = {"swiglu_limits": [0.0] * LAYERS, "swiglu_limits_shared": [0.0] * LAYERS,
    "partial_rotary_factors": [1.0] * LAYERS, "use_head_wise_attn_gate": True,
    "need_fp32_gate": True, "use_moe_router_bias": True, "moe_router_scaling_factor": 3.0,
    "share_expert_dim": 1280, "rope_theta": [10000.0] * LAYERS, "layer_types": _FOURTHS,
    "sliding_window": 512, "moe_layers_enum": "3,4,5",
    "attention_other_setting": {"num_attention_heads": 64, "num_attention_groups": 8,
    "head_dim": 128, "attention_type": "sliding_attention"}}
# Of released models, where the class's defaults are of none: AFM-4.5B, GLM-4-9B and 4.5, LFM2-1.2B,
# Phi-4, StableLM 2 1.6B.
_FIELDS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPE = {name: dict(zip(_FIELDS, shape, strict=True)) for name, shape in {
    "arcee": (2560, 20, 4, 128), "glm": (4096, 96, 8, 128), "lfm2": (2048, 32, 8, 64),
    "phi4": (5120, 40, 10, 128), "stablelm": (2048, 32, 32, 64),
}.items()}
# By architecture: the class's stem where it is not the architecture's ("" for none) and changes.
CHANGES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "AfmoeForCausalLM": (None, _EXPERTS),
    "ArceeForCausalLM": (None, _SHAPE["arcee"]),
    "BaichuanForCausalLM": ("", {"num_key_value_heads": 32}),
    "BailingMoEForCausalLM": ("", _BAILING),
    "BailingMoeForCausalLM": ("", _BAILING),
    "BailingMoeV2ForCausalLM": ("", _BAILING),
    "BailingMoeV2_5ForCausalLM": ("", _BAILING | _MLA),
    "BailingMoeV3ForCausalLM": ("", _BAILING | _MLA),
    "ChatGLMModel": (None, {"multi_query_attention": True, "multi_query_group_num": 2}),
    "Cohere2MoeForCausalLM": (None, {"prefix_dense_intermediate_size": 1024}),
    "DbrxForCausalLM": ("", {"model_type": "dbrx", "ffn_config": {"model_type": "",
        "moe_normalize_expert_weights": 1.0}, "attn_config": {"model_type": "", "kv_n_heads": 8}}),
    "DeciLMForCausalLM": ("", {"block_configs": [{"ffn": {"no_op": False, "ffn_mult": 2.0},
        "attention": {"no_op": n % 3 == 2, "n_heads_in_group": 4}} for n in range(LAYERS)]}),
    "DeepseekForCausalLM": ("", _EXPERTS),
    "DeepseekV2ForCausalLM": (None, _MLA | _EXPERTS),
    "DeepseekV4ForCausalLM": (None, {"compress_ratios": [0, 0, 4, 128] * (LAYERS // 4),
        "rope_scaling": _YARN} | {"rope_parameters": _YARN}),
    "Ernie4_5_ForCausalLM": ("ernie4_5", {}),
    "Exaone4ForCausalLM": (None, {"sliding_window_pattern": "LLLG"}),
    "ExaoneMoEForCausalLM": (None, {"is_moe_layer": [True] * LAYERS}),
    "ExaoneMoeForCausalLM": (None, {"is_moe_layer": [True] * LAYERS}),
    "Gemma2ForCausalLM": (None, {"hidden_act": "gelu_pytorch_tanh"}),
    "Gemma3nForCausalLM": ("gemma3ntext", _SHARED),
    "Gemma4ForCausalLM": ("gemma4text", {"per_layer_config": None}),
    "Glm4MoeForCausalLM": (None, _SHAPE["glm"]),
    "Grok1ForCausalLM": ("", _GROK),
    "Grok1ModelForCausalLM": ("", _GROK | {"attn_temperature_len": 1024}),
    "HYV3ForCausalLM": (None, {"route_norm": True}),
    "IQuestLoopCoderForCausalLM": ("", {"loop_num": 2, "loop_window_size": 64}),
    "IQuestQ1ForCausalLM": (None, {"num_hidden_layers": 88}),
    "JetNemotronForCausalLM": (None, _JET),
    "K2HorizonForCausalLM": (None, _OWN | _EXPERTS | {"rms_norm_eps": 1e-06}),
    "KimiK3LinearForCausalLM": ("kimilinear", _KIMI),
    "KimiLinearForCausalLM": (None, _KIMI),
    "LLaDA2MoeModelLM": ("", _BAILING | {"expert_capacity": 4,
        "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "block_size": 32}),
    "Lfm2ForCausalLM": (None, _SHAPE["lfm2"]),
    "Lfm2MoeForCausalLM": (None, {"layer_types": ["conv", "conv", "full_attention"] * 4}),
    "LongcatFlashForCausalLM": (None, {"num_hidden_layers": LAYERS, "rope_scaling": _YARN}),
    "Mamba2ForCausalLM": (None, {"intermediate_size": 8192, "rms_norm": True}),
    "MiMoV2FlashForCausalLM": ("", _MIMO),
    "MiMoV2ForCausalLM": ("", _MIMO),
    "MiniCPMForCausalLM": ("", _MINICPM),
    "MiniCPMSALAForCausalLM": ("minicpmhybrid", _MINICPM | {"sparse_config": {"topk": 64}}),
    "MiniMaxM3SparseForCausalLM": ("", _EXPERTS | _M3),
    "MistralLarge3ForCausalLM": ("", _MLA | _EXPERTS | {"routed_scaling_factor": 1.0}),
    "MuseGlimmerForCausalLM": (None, _MUSE),
    "NemotronHForCausalLM": (None, {"n_groups": 8}),
    "NemotronHPuzzleForCausalLM": ("nemotronh", {"model_type": "nemotron_h_puzzle", "n_groups": 8,
        "block_configs": [{}] * 52}),
    "Phi3ForCausalLM": (None, _SHAPE["phi4"]),
    "Phi3SmallForCausalLM": ("", {"hidden_act": "gegelu", "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-05, "mup_embedding_multiplier": 10.0, "mup_width_multiplier": 8.0,
        "mup_use_scaling": True, "mup_attn_multiplier": 1.0, "blocksparse_block_size": 64,
        "blocksparse_homo_head_pattern": False, "blocksparse_num_local_blocks": 16,
        "blocksparse_vert_stride": 8, "blocksparse_triton_kernel_block_size": 64,
        "dense_attention_every_n_layers": 2, "rope_embedding_base": 1000000,
        "rope_position_scale": 1.0, "dummy_token_indices": [1]}),
    "QWenLMHeadModel": ("", {"layer_norm_epsilon": 1e-06, "num_key_value_heads": 32}),
    "QuantMixtralForCausalLM": ("mixtral", {}),
    "Qwen3_5ForCausalLM": ("qwen3_5text", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5moetext", {}),
    "SDARMoeForCausalLM": ("", _EXPERTS),
    "SarvamMLAForCausalLM": ("", _BAILING | _MLA),
    "SarvamMoEForCausalLM": ("", _BAILING),
    "SolarForCausalLM": ("", {"bskcn_1": [0], "bskcn_2": [1], "bskcn_3": [2], "bskcn_4": [3],
        "bskcn_tv": [1, 1]}),
    "StableLmForCausalLM": (None, _SHAPE["stablelm"]),
    "Step3p5ForCausalLM": (None, _STEP),
    "TorchNativeLlamaForCausalLM": ("llama", {}),
    "TorchNativePhi3ForCausalLM": ("phi3", _SHAPE["phi4"]),
    "TransformersForCausalLM": ("seedoss", {"architectures": ["SeedOssForCausalLM"]}),
    "TransformersMoEForCausalLM": ("dots1", _EXPERTS | {"architectures": ["Dots1ForCausalLM"]}),
    "XllmForCausalLM": (None, _OWN | _EXPERTS | {"rms_norm_eps": 1e-06}),
    "XverseMoeForCausalLM": ("", _EXPERTS | {"moe_top_k": 2}),
}
# fmt: on


def config_of(architecture: str) -> dict[str, Any]:
    """What ``CHANGES`` and the defaults of a class say; the fields of ``_OWN`` without a class."""
    stem, changes = CHANGES.get(architecture, (None, {}))
    if stem is None:
        stem = re.sub(r"(For[A-Z].*|Model|LMHeadModel)$", "", architecture).lower()
        stem = stem if stem in _classes() else architecture
    config = base_of(stem) | changes
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and part.get("hidden_size"):
            part.update({name: value for name, value in _USUAL.items() if not part.get(name)})
    named = changes.get("architectures", [architecture])
    return config | {"architectures": named, "torch_dtype": "bfloat16"}
