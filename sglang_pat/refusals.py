# SPDX-License-Identifier: Apache-2.0
"""What ``pat`` does not serve: checked when the backend is made, and once per layer.

SGLang only logs a plugin that fails, so this is also where a missing hook or a changed interface
stops the server.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import hook
from sglang_pat.config import SUPPORTED_SGLANG
from sglang_pat.target import HEAD_DIM_STEP, MAX_HEAD_DIM

if TYPE_CHECKING:
    from sglang_pat.target import Target

# What the executors read, by device.
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
DEVICES = tuple(DTYPES)
CUDA_HEAD_DIMS, CUDA_MAX_GROUP = (64, 128, 256), 16


def refuse_unsafe(runner: Any) -> None:
    """Raise RuntimeError with every reason against serving with ``pat``, each with a way out."""
    reasons = [*interface_mismatches(), *_device(runner)]
    if not reasons:  # the rest reads what a foreign interface may lack
        reasons = [*_model(runner), *_pool(runner), *_modes()]
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise RuntimeError(f"sglang_pat refuses to serve with --attention-backend pat:{listed}")


def interface_mismatches() -> Iterator[str]:
    """What SGLang lacks of the interface that the plugin uses, which is 0.5.23's, hook included."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.schedule_batch import ReqKvInfo, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.version import __version__

    other = f"sglang_pat is made for SGLang {SUPPORTED_SGLANG} as released, this is {__version__}"
    if not hook.is_installed(ForwardBatch.init_new):
        yield (
            f"the hook after {hook.TARGET} is not installed: look for 'Failed to apply hooks' or "
            "'Failed to execute general plugin: pat' in the log above, and list pat in "
            "SGLANG_PLUGINS if that is set"
        )
    wanted = {
        "ForwardBatch.init_new": (ForwardBatch.init_new, ("batch", "model_runner")),
        "TorchNativeAttnBackend.forward_decode": (
            TorchNativeAttnBackend.forward_decode,
            ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        ),
        "TorchNativeAttnBackend.init_forward_metadata": (
            TorchNativeAttnBackend.init_forward_metadata,
            ("self", "forward_batch"),
        ),
        "AttentionBackend.init_forward_metadata_out_graph": (
            AttentionBackend.init_forward_metadata_out_graph,
            ("self", "forward_batch", "in_capture"),
        ),
        "AttentionBackend.init_forward_metadata_in_graph": (
            AttentionBackend.init_forward_metadata_in_graph,
            ("self", "forward_batch"),
        ),
        "KVWriteLoc.for_layer": (KVWriteLoc.for_layer, ("forward_batch", "layer")),
    }
    for name, (function, expected) in wanted.items():
        found = tuple(inspect.signature(function).parameters)[: len(expected)]
        if found != expected:
            yield f"{name} takes {found}, not {expected}: {other}"
    for cls, needed in (
        (ReqKvInfo, {"req_pool_idx", "cache_protected_len"}),
        (TreeLock, {"node"}),
        (
            ForwardBatch,
            {"req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "encoder_lens"},
        ),
        (ScheduleBatch, {"reqs", "tree_cache", "req_pool_indices_cpu"}),
    ):
        missing = needed - {field.name for field in dataclass_fields(cls)}
        if missing:
            yield f"{cls.__name__} has no {', '.join(sorted(missing))}: {other}"


def reason_against_gpu() -> str:
    """Why our kernels do not run on the current CUDA device, or "": one of them is tried."""
    from sglang_pat import _C

    if not hasattr(_C, "cuda_probe"):
        return "this sglang_pat was built without CUDA kernels (PAT_CUDA=OFF)"
    found = _C.cuda_probe(torch.cuda.current_device())
    if found["ok"]:
        return ""
    return (
        f"our kernels, built for compute capability 8.x and 9.0, do not run on GPU "
        f"{found['device']} of {found['arch'] / 10:.1f} ({found['error']})"
    )


def _device(runner: Any) -> Iterator[str]:
    if runner.device not in DEVICES:
        yield (
            f"this version serves on {', '.join(DEVICES)}, not on {runner.device!r}: set "
            "SGLANG_PLATFORM=pat_cpu and --device cpu, or choose another --attention-backend"
        )
    elif runner.device == "cuda":
        if reason := reason_against_gpu():
            yield f"{reason}: choose another --attention-backend"
    elif os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        yield (
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine: unset it and set "
            "SGLANG_PLATFORM=pat_cpu"
        )


def _model(runner: Any) -> Iterator[str]:
    model = runner.model_config
    way_out = "choose another --attention-backend"
    if runner.use_mla_backend:
        yield f"the model uses MLA, whose cache holds latents instead of K and V: {way_out}"
    if model.is_encoder_decoder:
        yield f"encoder-decoder models shift their rows of req_to_token: {way_out}"
    dtypes = DTYPES[runner.device]
    if runner.device == "cuda" and runner.kv_cache_dtype == torch.float8_e4m3fn:
        return  # its layers are the base's, see reason_against_layer
    if runner.kv_cache_dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        yield (
            f"the K/V cache is {runner.kv_cache_dtype}, on {runner.device} pat reads {names}: set "
            "--kv-cache-dtype auto and one of these --dtype"
        )
    elif runner.kv_cache_dtype != runner.dtype:
        yield (
            f"the K/V cache is {runner.kv_cache_dtype} but the model {runner.dtype}: "
            "set --kv-cache-dtype auto"
        )


def _pool(runner: Any) -> Iterator[str]:
    pool = runner.token_to_kv_pool
    translator = runner.kv_index_translator
    if translator.is_translating or pool.requires_physical_write_loc:
        yield (
            "slot ids of a unified memory pool are virtual: drop --enable-unified-memory and "
            "--enable-page-major-kv-layout"
        )
    for part in (pool, getattr(pool, "full_kv_pool", None)):
        layout = getattr(part, "kv_cache_layout", "nhd")
        if layout != "nhd":
            yield (
                f"the K/V cache has layout {layout!r}, not 'nhd': unset SGLANG_USE_HND_KVCACHE or "
                "the option that chose it"
            )
    quant = pool.get_kv_cache_quant_method()
    if quant is not None and quant.name != "unquantized":
        yield f"the K/V cache is quantized by {quant.name}: set --kv-cache-dtype auto"


def _modes() -> Iterator[str]:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import (
        get_disagg,
        get_exec,
        get_memory,
        get_parallel,
        get_schedule,
    )

    run, parallel, memory = get_exec(), get_parallel(), get_memory()
    active = {
        "--enable-two-batch-overlap: half batches have no requests of their own": (
            run.overlap.enable_two_batch_overlap
        ),
        "--enable-pdmux: two backends share one model runner": get_disagg().enable_pdmux,
        "--enable-deterministic-inference: packing depends on the batch": (
            run.deterministic.enable_deterministic_inference
        ),
        "--enable-torch-compile: it would freeze a plan": run.graph.enable_torch_compile,
        "--dcp-size > 1: a rank holds part of each sequence": parallel.attn_dcp_size > 1,
        "--attn-cp-size > 1: a rank holds part of each sequence": parallel.attn_cp_size > 1,
        "--enable-kv-cache-sharding: pages are interleaved over ranks": (
            parallel.enable_kv_cache_sharding
        ),
        "--enable-hisparse: slots move during a request": memory.enable_hisparse,
        "--prefill-only-disable-kv-cache: nothing is cached": (
            get_schedule().prefill_only_disable_kv_cache
        ),
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH: it would freeze a plan": (
            envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get()
        ),
    }
    for why, on in active.items():
        if on:
            yield f"{why}; drop it or choose another --attention-backend"


def reason_against_layer(layer: Any, dtype: torch.dtype, pool: Any, target: Target) -> str:
    """Why the base must serve an attention layer, or "" if ``pat`` can."""
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type.value != "decoder":
        return f"attention type {layer.attn_type.value}"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "a sliding window"
    if layer.xai_temperature_len > 0:
        return "a temperature by position"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"logit capping by {layer.logit_capping_method}"
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
    if heads != (target.num_q_heads, target.num_kv_heads, target.num_kv_heads):
        return f"{heads} query, K and V heads, planned for others"
    reason = _against_heads(layer, pool.device)
    if reason:
        return reason
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if keys.shape[1:] != (layer.tp_k_head_num, layer.qk_head_dim):
        return f"a K cache of shape {tuple(keys.shape)}"
    if values.shape[1:] != (layer.tp_v_head_num, layer.v_head_dim):
        return f"a V cache of shape {tuple(values.shape)}"
    for cache in (keys, values):
        if cache.dtype != dtype:
            return f"a {cache.dtype} cache under {dtype} queries"
    return ""


def _against_heads(layer: Any, device: str) -> str:
    dims = (layer.qk_head_dim, layer.v_head_dim)
    if torch.device(device).type == "cpu":
        for dim in dims:
            if dim > MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
                return f"head dim {dim}, not a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        return ""
    if dims[0] != dims[1] or dims[0] not in CUDA_HEAD_DIMS:
        return f"head dims {dims[0]} and {dims[1]}, not both one of {CUDA_HEAD_DIMS}"
    group = layer.tp_q_head_num // layer.tp_k_head_num
    if group > CUDA_MAX_GROUP:
        return f"{group} query heads per KV head, more than {CUDA_MAX_GROUP}"
    return ""
