# SPDX-License-Identifier: Apache-2.0
"""config.json of every decoder architecture that SGLang has, as far as it can be made up: the
defaults of the configuration's class in SGLang or transformers, with fewer layers. Widths and heads
stay, as nothing is allocated, or are a released model's. For ``make test-models``, and for tests
that need a model of some kind without weights (``write_config``)."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``config`` with changes to its fields and those of its parts; a ``Part`` is a whole one."""
    made = dict(config)
    for name, value in changes.items():
        if isinstance(value, Part):
            value = merged(base_of(value.stem), value.changes)
        elif isinstance(value, dict) and isinstance(config.get(name), dict):
            value = merged(config[name], value)
        made[name] = value
    return made


class Part(NamedTuple):
    """Of a part of a model: the stem of its class's name ("" for none), and changes."""

    stem: str
    changes: dict[str, Any] = {}  # noqa: RUF012


class _Fields(dict[str, Any]):
    """A part of a configuration of a class that is not here."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def of_its_own(stem: str) -> dict[str, Any]:
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

    members = {"model_type": "of_its_own", "__post_init__": __post_init__}
    AutoConfig.register("of_its_own", type("OfItsOwn", (LlamaConfig,), members), exist_ok=True)
    return {"architectures": [stem], "model_type": "of_its_own"} | _OWN_USUAL | _OWN


def base_of(stem: str) -> dict[str, Any]:
    """A small configuration of the class of that stem; the fields of ``_OWN`` without a class."""
    return shrunk(defaults_of(stem)) if stem in _classes() else of_its_own(stem)


def defaults_of(name: str, **arguments: Any) -> dict[str, Any]:
    """What the class of that stem writes into config.json."""
    cls = _classes()[name]()
    written: dict[str, Any] = json.loads(cls(**arguments).to_json_string(use_diff=False))
    written.pop("dtype", None)
    return written


# fmt: off
# What config.json files have and the classes have no default for.
_USUAL: dict[str, Any] = {"pad_token_id": 0, "hidden_act": "silu", "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "full_attention_interval": 4, "rope_parameters": {"rope_type": "default",
    "rope_theta": 10000.0}, "in_chans": 3}
# Of models that bring their own configuration.
_OWN = {"hidden_size": 4096, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "vocab_size": 1024}
_OWN_USUAL = {"torch_dtype": "bfloat16", "max_position_embeddings": 8192, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": 0}
# Of kinds of models.
_TOWER = {"model_type": "tower"}
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
_SIZES = {"image_token_size": 64, "n_embed": 64, "image_token_embed": 64}
_ALIGNER = {"cls": "MlpProjector", "params": {"projector_type": "linear", "input_dim": 64,
    "n_embed": 64}}
_LLAVA = _OWN | {"rms_norm_eps": 1e-06, "text_config": Part("llama", {"num_key_value_heads": 8}),
    "mm_hidden_size": 1024, "mm_vision_tower": "made-up"}
_BAILING_MM = {"llm_config": Part("", _BAILING), "vision_config": None, "mlp_depth": 1}
_MINICPM_V = {"vision_config": _TOWER, "query_num": 64, "version": 2.6, "init_vision": True,
    "drop_vision_last_layer": False}
_VIT = {"args": {"model": "vit_huge_patch16_224"}, "video_temporal_patch_size": 2}
_RADIO = {"llm_config": Part("nemotronh", {"n_groups": 8}), "raw_vision_config": _VIT}
# Of released models, where the class's defaults are of none: AFM-4.5B, GLM-4-9B and 4.5, LFM2-1.2B,
# Phi-4, Qwen3-Omni-30B, StableLM 2 1.6B.
_FIELDS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPE = {name: dict(zip(_FIELDS, shape, strict=True)) for name, shape in {
    "arcee": (2560, 20, 4, 128), "glm": (4096, 96, 8, 128), "lfm2": (2048, 32, 8, 64),
    "phi4": (5120, 40, 10, 128), "qwen3_omni": (2048, 32, 4, 128), "stablelm": (2048, 32, 32, 64),
}.items()}
# By architecture: the class's stem where it is not the architecture's ("" for none) and changes.
CHANGES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "AfmoeForCausalLM": (None, _EXPERTS),
    "ArceeForCausalLM": (None, _SHAPE["arcee"]),
    "BaichuanForCausalLM": ("", {"num_key_value_heads": 32}),
    "BailingMM2NativeForConditionalGeneration": ("", _BAILING_MM),
    "BailingMMNativeForConditionalGeneration": ("", _BAILING_MM),
    "BailingMoEForCausalLM": ("", _BAILING),
    "BailingMoeForCausalLM": ("", _BAILING),
    "BailingMoeV2ForCausalLM": ("", _BAILING),
    "BailingMoeV2_5ForCausalLM": ("", _BAILING | _MLA),
    "BailingMoeV3ForCausalLM": ("", _BAILING | _MLA),
    "ChatGLMModel": (None, {"multi_query_attention": True, "multi_query_group_num": 2}),
    "Cohere2MoeForCausalLM": (None, {"prefix_dense_intermediate_size": 1024}),
    "Cohere2VisionForConditionalGeneration": (None, {"text_config": Part("cohere2moe",
        {"prefix_dense_intermediate_size": 1024})}),
    "Cosmos3ForConditionalGeneration": ("qwen3vl", {}),
    "DbrxForCausalLM": ("", {"model_type": "dbrx", "ffn_config": {"model_type": "",
        "moe_normalize_expert_weights": 1.0}, "attn_config": {"model_type": "", "kv_n_heads": 8}}),
    "DeciLMForCausalLM": ("", {"block_configs": [{"ffn": {"no_op": False, "ffn_mult": 2.0},
        "attention": {"no_op": n % 3 == 2, "n_heads_in_group": 4}} for n in range(LAYERS)]}),
    "DeepseekForCausalLM": ("", _EXPERTS),
    "DeepseekOCRForCausalLM": ("deepseekvlv2", {"tile_tag": "2D", "language_config": Part(
        "deepseekv2", _EXPERTS | dict.fromkeys(("head_dim", "kv_lora_rank")) | {"use_mla": False,
        "topk_method": "greedy", "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0})}),
    "DeepseekV2ForCausalLM": (None, _MLA | _EXPERTS),
    "DeepseekV4ForCausalLM": (None, {"compress_ratios": [0, 0, 4, 128] * (LAYERS // 4),
        "rope_scaling": _YARN} | {"rope_parameters": _YARN}),
    "DeepseekVL2ForCausalLM": (None, {"language_config": Part("deepseekv2", _EXPERTS |
        {"use_mla": False, "architectures": ["DeepseekForCausalLM"]}), "tile_tag": "2D"}),
    "DiffusionGemmaForBlockDiffusion": (None, {"vision_config": _TOWER, "text_config":
        {"per_layer_config": None, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 256}}),
    "Ernie4_5_ForCausalLM": ("ernie4_5", {}),
    "Ernie4_5_VLMoeForConditionalGeneration": ("", {"use_bias": False, "vision_config": _TOWER,
        "moe_num_experts": [8, 8], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [11, 11],
        "moe_layer_interval": 1, "moe_k": 2, "moe_num_shared_experts": 1, "freq_allocation": 20,
        "pixel_hidden_size": 64, "spatial_conv_size": 2, "temporal_conv_size": 2,
        "use_temporal_conv": True, "im_patch_id": 1, "moe_intermediate_size": [256, 256],
        "rope_scaling": {"rope_type": "default", "mrope_section": [22, 22, 20]}}),
    "Exaone4ForCausalLM": (None, {"sliding_window_pattern": "LLLG"}),
    "ExaoneMoEForCausalLM": (None, {"is_moe_layer": [True] * LAYERS}),
    "ExaoneMoeForCausalLM": (None, {"is_moe_layer": [True] * LAYERS}),
    "Gemma2ForCausalLM": (None, {"hidden_act": "gelu_pytorch_tanh"}),
    "Gemma3nForCausalLM": ("gemma3ntext", _SHARED),
    "Gemma3nForConditionalGeneration": (None, {"text_config": _SHARED}),
    "Gemma4ForCausalLM": ("gemma4text", {"per_layer_config": None}),
    "Gemma4ForConditionalGeneration": (None, {"text_config": {"per_layer_config": None},
        "vision_config": Part("gemma4vision")}),
    "Gemma4UnifiedForConditionalGeneration": (None, {"text_config": {"per_layer_config": None}}),
    "Glm5NextForConditionalGeneration": (None, {"vision_config": {"swiglu_limit": 10.0},
        "text_config": {"architectures": ["Glm5NextForConditionalGeneration"], "head_dim": 64,
        "num_key_value_heads": 64, "index_topk": 64, "index_head_dim": 64, "index_n_heads": 8,
        "swiglu_limit": 10.0, "index_skip_topk_offset": 1, "linear_lower_bound": -5.0}}),
    "Glm4MoeForCausalLM": (None, _SHAPE["glm"]),
    "Glm4vMoeForConditionalGeneration": (None, {"text_config": _SHAPE["glm"]}),
    "Grok1ForCausalLM": ("", _GROK),
    "Grok1ModelForCausalLM": ("", _GROK | {"attn_temperature_len": 1024}),
    "HYV3ForCausalLM": (None, {"route_norm": True}),
    "IQuestLoopCoderForCausalLM": ("", {"loop_num": 2, "loop_window_size": 64}),
    "IQuestQ1ForCausalLM": (None, {"num_hidden_layers": 88}),
    "InternS1ForConditionalGeneration": ("", {"vision_config": _TOWER, "text_config": Part("qwen3",
        {"architectures": ["Qwen3ForCausalLM"]}), "vision_feature_layer": -1,
        "downsample_ratio": 0.5, "ps_version": "v2"}),
    "InternS2MobiusForConditionalGeneration": (None, {"text_config": {"layer_types":
        [*["linear_attention"] * 3, "full_attention"] * (LAYERS // 4)}}),
    "InternVLChatModel": (None, {"llm_config": Part("gptoss",
        {"architectures": ["GptOssForCausalLM"]})} |
        {"vision_config": {"norm_type": "rms_norm"}}),
    "JetNemotronForCausalLM": (None, _JET),
    "JetVLMForConditionalGeneration": (None, {"text_config": Part("jetnemotron", _JET)}),
    "K2HorizonForCausalLM": (None, _OWN | _EXPERTS | {"rms_norm_eps": 1e-06}),
    "KimiK25ForConditionalGeneration": ("", {"encoder_only": False, "vision_config": _TOWER,
        "text_config": Part("deepseekv3", {"architectures": ["DeepseekV3ForCausalLM"]})}),
    "KimiK3ForConditionalGeneration": (None, {"text_config": Part("kimilinear", _KIMI)}),
    "KimiK3LinearForCausalLM": ("kimilinear", _KIMI),
    "KimiLinearForCausalLM": (None, _KIMI),
    "LLaDA2MoeModelLM": ("", _BAILING | {"expert_capacity": 4,
        "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "block_size": 32}),
    "Lfm2ForCausalLM": (None, _SHAPE["lfm2"]),
    "Lfm2MoeForCausalLM": (None, {"layer_types": ["conv", "conv", "full_attention"] * 4}),
    "Lfm2VlForConditionalGeneration": (None, {"text_config": _SHAPE["lfm2"]}),
    "LlavaForConditionalGeneration": (None, {"vision_config": Part("pixtralvision")}),
    "LlavaLlamaForCausalLM": ("llava", _LLAVA),
    "LlavaMistralForCausalLM": ("llava", _LLAVA),
    "LlavaQwenForCausalLM": ("llava", _LLAVA),
    "LlavaVidForCausalLM": ("llava", _LLAVA),
    "LongcatFlashForCausalLM": (None, {"num_hidden_layers": LAYERS, "rope_scaling": _YARN}),
    "Mamba2ForCausalLM": (None, {"intermediate_size": 8192, "rms_norm": True}),
    "MiDashengLMModel": ("", {"text_config": Part("qwen2"), "audio_encoder_config": _TOWER,
        "subsample_factor": 5}),
    "MiMoV2FlashForCausalLM": ("", _MIMO),
    "MiMoV2ForCausalLM": ("", _MIMO),
    "MiniCPMForCausalLM": ("", _MINICPM),
    "MiniCPMO": ("", _MINICPM_V | {"audio_config": _TOWER, "audio_pool_step": 2}),
    "MiniCPMSALAForCausalLM": ("minicpmhybrid", _MINICPM | {"sparse_config": {"topk": 64}}),
    "MiniCPMV": ("", _MINICPM_V),
    "MiniMaxM3SparseForCausalLM": ("", _EXPERTS | _M3),
    "MiniMaxM3SparseForConditionalGeneration": ("minimaxm3vl", {"encoder_only": False,
        "text_config": Part("", _EXPERTS | _M3), "vision_config": Part("clipvision",
        {"hidden_act": "gelu", "img_token_compression_config": {},
        "position_embedding_type": "rope", "rope_mode": "3d", "rope_theta": 10000.0,
        "vision_segment_max_frames": 4})}),
    "MistralLarge3ForCausalLM": ("", _MLA | _EXPERTS | {"routed_scaling_factor": 1.0}),
    "MossVLForConditionalGeneration": ("", {"vision_config": _TOWER, "text_config": Part("qwen3",
        {"cross_attention_layers": [3, 7, 11]})}),
    "MultiModalityCausalLM": ("multimodality", {"vision_config": {"cls": "CLIPVisionTower"},
        "aligner_config": _ALIGNER, "gen_aligner_config": _ALIGNER,
        "gen_vision_config": {"cls": "VQ-16", "params": _SIZES},
        "gen_head_config": {"cls": "vision_head", "params": _SIZES}}),
    "MuseGlimmerForCausalLM": (None, _MUSE),
    "MuseGlimmerForConditionalGeneration": (None, _MUSE | {"vision_config": {}}),
    "MuseSparkForConditionalGeneration": ("musespark", {"text_config": {"layer_types": _FOURTHS,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0.0, 10000.0, 10000.0] * (LAYERS // 6)}}),
    "NVILAForConditionalGeneration": ("", {"text_config": Part("qwen2"),
        "vision_config": Part("siglipvision")}),
    "NVILALiteForConditionalGeneration": ("", {"text_config": Part("qwen2"),
        "vision_config": Part("siglipvision")}),
    "NemotronHForCausalLM": (None, {"n_groups": 8}),
    "NemotronHPuzzleForCausalLM": ("nemotronh", {"model_type": "nemotron_h_puzzle", "n_groups": 8,
        "block_configs": [{}] * 52}),
    "NemotronH_Nano_Omni_Reasoning_V3": ("nemotronh_nano_omni_reasoning_v3", _RADIO),
    "NemotronH_Nano_VL_V2": ("nemotronh_nano_vl_v2", _RADIO),
    "NemotronH_Omni_Reasoning_V3": ("nemotronh_omni_reasoning_v3", _RADIO |
        {"vision_config": _VIT, "video_temporal_patch_size": 2}),
    "POINTSV15ChatModel": ("", {"vision_config": _TOWER, "llm_config": Part("qwen2")}),
    "Phi3ForCausalLM": (None, _SHAPE["phi4"]),
    "Phi3SmallForCausalLM": ("", {"hidden_act": "gegelu", "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-05, "mup_embedding_multiplier": 10.0, "mup_width_multiplier": 8.0,
        "mup_use_scaling": True, "mup_attn_multiplier": 1.0, "blocksparse_block_size": 64,
        "blocksparse_homo_head_pattern": False, "blocksparse_num_local_blocks": 16,
        "blocksparse_vert_stride": 8, "blocksparse_triton_kernel_block_size": 64,
        "dense_attention_every_n_layers": 2, "rope_embedding_base": 1000000,
        "rope_position_scale": 1.0, "dummy_token_indices": [1]}),
    "PixtralForConditionalGeneration": ("", {"text_config": Part("mistral"), "vision_config":
        Part("pixtralvision", {"model_type": "tower", "image_token_id": 1, "rope_theta": 1e4})}),
    "QWenLMHeadModel": ("", {"layer_norm_epsilon": 1e-06, "num_key_value_heads": 32}),
    "QuantMixtralForCausalLM": ("mixtral", {}),
    "Qwen3OmniMoeForConditionalGeneration": (None,
        {"thinker_config": {"text_config": _SHAPE["qwen3_omni"]}}),
    "Qwen3_5ForCausalLM": ("qwen3_5text", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5moetext", {}),
    "SDARMoeForCausalLM": ("", _EXPERTS),
    "SarvamMLAForCausalLM": ("", _BAILING | _MLA),
    "SarvamMoEForCausalLM": ("", _BAILING),
    "SolarForCausalLM": ("", {"bskcn_1": [0], "bskcn_2": [1], "bskcn_3": [2], "bskcn_4": [3],
        "bskcn_tv": [1, 1]}),
    "Step3VLForConditionalGeneration": (None, {"text_config": {"moe_layers_enum": "4,5,6,7,8"}}),
    "StableLmForCausalLM": (None, _SHAPE["stablelm"]),
    "Step3p5ForCausalLM": (None, _STEP),
    "Step3p7ForConditionalGeneration": (None, {"text_config": _STEP}),
    "StepVLForConditionalGeneration": ("", {"text_config": Part("qwen3"), "projector_bias": False,
        "vision_config": _TOWER | {"hidden_act": "gelu"}}),
    "TorchNativeLlamaForCausalLM": ("llama", {}),
    "TorchNativePhi3ForCausalLM": ("phi3", _SHAPE["phi4"]),
    "TransformersForCausalLM": ("seedoss", {"architectures": ["SeedOssForCausalLM"]}),
    "TransformersMoEForCausalLM": ("dots1", _EXPERTS | {"architectures": ["Dots1ForCausalLM"]}),
    "TransformersMultiModalForCausalLM": ("gotocr2",
        {"architectures": ["GotOcr2ForConditionalGeneration"]}),
    "TransformersMultiModalMoEForCausalLM": ("aria",
        {"architectures": ["AriaForConditionalGeneration"]}),
    "UnlimitedOCRForCausalLM": ("unlimitedvl", {"tile_tag": "2D"}),
    "XllmForCausalLM": (None, _OWN | _EXPERTS | {"rms_norm_eps": 1e-06}),
    "XverseMoeForCausalLM": ("", _EXPERTS | {"moe_top_k": 2}),
    "YiVLForCausalLM": ("llava", _LLAVA),
}
# fmt: on


def config_of(architecture: str) -> dict[str, Any]:
    """What ``CHANGES`` and the defaults of a class say; the fields of ``_OWN`` without a class."""
    stem, changes = CHANGES.get(architecture, (None, {}))
    if stem is None:
        stem = re.sub(r"(For[A-Z].*|Model|LMHeadModel)$", "", architecture).lower()
        stem = stem if stem in _classes() else architecture
    config = merged(base_of(stem), changes)
    for part in [config, *map(config.get, ("text_config", "llm_config", "language_config"))]:
        if isinstance(part, dict) and part.get("hidden_size"):
            part.update({name: value for name, value in _USUAL.items() if not part.get(name)})
    if isinstance(config.get("vision_config"), dict):
        config["vision_config"].setdefault("in_chans", 3)
    named = changes.get("architectures", [architecture])
    return config | {"architectures": named, "torch_dtype": "bfloat16"}


def write_config(folder: Path, architecture: str, **changes: Any) -> Path:
    """Make ``folder`` a model of which there is only config.json; ``changes`` to its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    config = merged(config_of(architecture), changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
