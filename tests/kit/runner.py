# SPDX-License-Identifier: Apache-2.0
"""What SGLang gives the plugin when a server starts: server arguments, a model's configuration, and
a model runner of real attention layers, the rest of it stand-ins. No weights, no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    resolving_view,
)
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from sglang_pat.srt.stock import let_sglang_choose

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEADS, KV_HEADS, DIM = 8, 2, 64
# Changes to a model's configuration that make it one of latents; its head dim is then a dummy.
LATENTS = {
    "attention_arch": AttentionArch.MLA,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 256,
}

# Fields of a model with QSA attention, as SGLang's parse_qsa_profile asks for them.
QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}

# Arguments of a server that speculates.
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def server_args(declared: dict[str, Any] | None = None, **values: Any) -> ServerArgs:
    """Arguments for ``pat`` on a GPU, with fa3 where no backend is named; ``declared``: what
    SGLang's resolution adds to them."""
    args = ServerArgs(
        model_path="dummy", **({"device": "cuda", "attention_backend": "pat"} | values)
    )
    let_sglang_choose(args)
    if resolving_view(args).attention_backend is None:
        declare_resolution(args, "test", attention_backend="fa3")
    if declared:
        declare_resolution(args, "test", **declared)
    return args


def model_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> SimpleNamespace:
    """A model's configuration that is served, but for ``changes``; ``hf_config``: fields of the
    model's own config.json."""
    config = PretrainedConfig(architectures=[architecture], **changes.pop("hf_config", {}))
    values = {
        "hf_config": config,
        "hf_text_config": config,
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "is_generation": True,
        "is_draft_model": False,
        "linear_attn_registry_result": None,
        "has_asymmetric_kv": False,
        "has_attention_sinks": False,
        "dtype": BF16,
        "quantization": None,
        "model_path": "dummy",
        "revision": None,
        "num_attention_heads": HEADS,
        "get_num_attention_heads": lambda ranks: HEADS // ranks,
        "get_num_kv_heads": lambda ranks: KV_HEADS // ranks,
        "head_dim": DIM,
    }
    return SimpleNamespace(**(values | changes))


def make_layer(layer_id: int, **arguments: Any) -> RadixAttention:
    """An attention layer of SGLang that is served, but for ``arguments``."""
    return RadixAttention(HEADS, DIM, 1.0, KV_HEADS, layer_id=layer_id, **arguments)


def set_scales(layer: RadixAttention, k_scale: float, v_scale: float) -> None:
    """Give a layer K/V scales as SGLang has them once it has loaded a checkpoint's."""
    layer.k_scale = torch.nn.Parameter(torch.tensor(k_scale), requires_grad=False)
    layer.v_scale = torch.nn.Parameter(torch.tensor(v_scale), requires_grad=False)
    layer.k_scale_float, layer.v_scale_float = k_scale, v_scale


def make_pool(
    layers: int, sliding: tuple[int, ...] = (), dtype: torch.dtype = BF16
) -> SimpleNamespace:
    """A pool of one slot a layer; ``sliding``: layers whose K/V are in its window's part."""
    cache = {layer: torch.zeros(1, KV_HEADS, DIM, dtype=dtype) for layer in range(layers)}
    pool = SimpleNamespace(
        device="cpu",
        get_key_buffer=cache.__getitem__,
        get_value_buffer=cache.__getitem__,
        get_kv_cache_quant_method=lambda: None,
        requires_physical_write_loc=False,
    )
    if sliding:
        pool.layers_mapping = {layer: (layer, layer in sliding) for layer in range(layers)}
    return pool


def make_runner(
    layers: list[RadixAttention],
    *,
    sliding: tuple[int, ...] = (),
    args: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> SimpleNamespace:
    """A runner on a CPU of a model with these layers, but for ``changes``.

    Args:
        sliding: the layers whose K/V are in the pool's part for sliding windows.
        args, config: changes to the server's arguments and to the model's configuration.
    """
    options = {"device": "cpu"} | (args or {})
    given = server_args(**options)
    prefill, decode = attention_backends_of(resolving_view(given))
    values = {
        "model": torch.nn.ModuleList(layers),
        "model_config": model_config(**(config or {})),
        "server_args": given,
        "prefill_attention_backend_str": prefill,
        "decode_attention_backend_str": decode,
        "device": options["device"],
        "dtype": BF16,
        "kv_cache_dtype": BF16,
        "kv_cache_dtype_str": "auto",
        "prefill_aware_swa": False,
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "token_to_kv_pool": make_pool(len(layers), sliding),
        "is_draft_worker": False,
        "init_new_workspace": False,
    }
    return SimpleNamespace(**(values | changes))


def set_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Have SGLang say that so many ranks of tensor parallelism share the attention heads."""
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_tp_size=ranks)
    )
