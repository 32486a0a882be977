# SPDX-License-Identifier: Apache-2.0
"""What ``pat`` does not serve: checked when the backend is made, and once per layer.

SGLang only logs a plugin that fails, so this is also where a missing hook or a changed interface
stops the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import _C, gpus
from sglang_pat.srt import checkpoint, support
from sglang_pat.srt.interface import interface_mismatches
from sglang_pat.srt.layers import CAPPED
from sglang_pat.srt.scales import E4M3, reason_against_scales
from sglang_pat.target import HEAD_DIM_STEP, MAX_HEAD_DIM

if TYPE_CHECKING:
    from sglang_pat.srt.layers import Heads
    from sglang_pat.target import Target

# With up to so many packed rows a request, those of its draft tokens, verify steps took at most
# 1.03 of the better of FA3 and FlashInfer in all batches measured (docs/speculation.md). More rows
# were not measured.
MOST_DRAFT_ROWS = 64
CUDA_HEAD_DIMS, CUDA_MAX_GROUP = _C.CUDA_HEAD_DIMS, _C.CUDA_MAX_GROUP


def refuse_unsafe(runner: Any) -> None:
    """Raise RuntimeError with every reason against serving with ``pat``, each with a way out."""
    reasons = [*interface_mismatches(), *_device(runner)]
    if not reasons:  # the rest reads what a foreign interface may lack
        reasons = [*_model(runner), *_pool(runner), *_modes()]
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise RuntimeError(f"sglang_pat refuses to serve with --attention-backend pat:{listed}")


def reason_against_gpu() -> str:
    """Why our kernels do not run on the current CUDA device, or "": one of them is tried."""
    if not hasattr(_C, "cuda_probe"):
        return "this sglang_pat was built without CUDA kernels (PAT_CUDA=OFF)"
    found = _C.cuda_probe(torch.cuda.current_device())
    if found["ok"]:
        return ""
    return (
        f"our kernels, built for compute capability {gpus.built_for()}, do not run on GPU "
        f"{found['device']} of {found['arch'] / 10:.1f} ({found['error']})"
    )


def _device(runner: Any) -> Iterator[str]:
    yield from support.device_refusals(runner.device)
    if runner.device == "cuda" and (reason := reason_against_gpu()):
        yield f"{reason}: {support.CHOOSE_ANOTHER}"


def _model(runner: Any) -> Iterator[str]:
    yield from support.model_refusals(
        uses_mla=runner.use_mla_backend,
        is_encoder_decoder=runner.model_config.is_encoder_decoder,
        prefill_aware_swa=runner.prefill_aware_swa,
    )
    yield from support.kv_dtype_refusals(runner.device, runner.kv_cache_dtype, runner.dtype)


def _pool(runner: Any) -> Iterator[str]:
    pool = runner.token_to_kv_pool
    quant = pool.get_kv_cache_quant_method()
    parts = (pool, getattr(pool, "full_kv_pool", None))
    yield from support.pool_refusals(
        virtual_slots=(
            runner.kv_index_translator.is_translating or pool.requires_physical_write_loc
        ),
        layouts=tuple(getattr(part, "kv_cache_layout", "nhd") for part in parts),
        quant_name=_quantized_by(runner.kv_cache_dtype_str, quant),
    )


def _quantized_by(choice: str, quant: Any) -> str:
    """The name of the pool's quantization beside its dtype, "" for none: mxfp8 is stored as
    fp8_e4m3, with scales that only ``--kv-cache-dtype`` tells of."""
    if choice in checkpoint.SCALED_KV:
        return choice
    return "" if quant is None or quant.name == "unquantized" else str(quant.name)


def _modes() -> Iterator[str]:
    """Of the published configuration, which may have been changed since the arguments."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import (
        get_disagg,
        get_exec,
        get_memory,
        get_parallel,
        get_schedule,
    )

    run, parallel = get_exec(), get_parallel()
    yield from support.mode_refusals(
        {
            "two_batch_overlap": run.overlap.enable_two_batch_overlap,
            "pdmux": get_disagg().enable_pdmux,
            "deterministic": run.deterministic.enable_deterministic_inference,
            "torch_compile": run.graph.enable_torch_compile,
            "dcp": parallel.attn_dcp_size > 1,
            "cp": parallel.attn_cp_size > 1,
            "kv_sharding": parallel.enable_kv_cache_sharding,
            "hisparse": get_memory().enable_hisparse,
            "no_kv_cache": get_schedule().prefill_only_disable_kv_cache,
            "glue_graph": envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
        }
    )


def reason_against_layer(layer: Any, dtype: torch.dtype, pool: Any, planned: Target | Heads) -> str:
    """Why the base must serve an attention layer, or "" if ``pat`` can.

    ``dtype``: of the queries. ``planned``: the heads that plans are made for. Raises what the pool
    raises for a layer that it does not have.
    """
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type.value != "decoder":
        return f"attention type {layer.attn_type.value}"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "a sliding window"
    if layer.use_irope:  # FlashAttention attends within chunks of the sequence there
        return "chunked attention (use_irope)"
    if _in_sliding_pool(layer, pool):  # slots beyond the window are freed while the request runs
        return "its K/V in the sliding-window pool"
    if layer.xai_temperature_len > 0:
        return "a temperature by position"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"logit capping by {layer.logit_capping_method}"
    if layer.logit_cap > 0 and planned.draft_tokens > 1 and pool.device != "cpu":
        return CAPPED
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
    if heads != (planned.num_q_heads, planned.num_kv_heads, planned.num_kv_heads):
        return f"{heads} query, K and V heads, planned for others"
    if layer.qk_head_dim != planned.head_dim:
        return f"head dim {layer.qk_head_dim}, planned for {planned.head_dim}"
    reason = reason_against_heads(layer, pool.device, draft_tokens=planned.draft_tokens)
    if reason:
        return reason
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if keys.shape[1:] != (layer.tp_k_head_num, layer.qk_head_dim):
        return f"a K cache of shape {tuple(keys.shape)}"
    if values.shape[1:] != (layer.tp_v_head_num, layer.v_head_dim):
        return f"a V cache of shape {tuple(values.shape)}"
    if keys.dtype == values.dtype == E4M3:
        return reason_against_scales(layer, pool.device)
    for cache in (keys, values):
        if cache.dtype != dtype:
            return f"a {cache.dtype} cache under {dtype} queries"
    return ""


def reason_against_heads(
    layer: Any, device: str, shared: int | None = None, draft_tokens: int = 1
) -> str:
    """Why the executor of a device has no room for a layer's heads, or "". ``draft_tokens``: of a
    query (``Target``).

    ``shared``: bytes of shared memory that one block of the GPU can have, of a GPU that is not
    here; None asks ``device``.
    """
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
    rows = group * draft_tokens
    if draft_tokens > 1 and rows > MOST_DRAFT_ROWS:
        return (
            f"{draft_tokens} draft tokens of {group} query heads per KV head: from "
            f"{MOST_DRAFT_ROWS + 1} packed rows a request on, SGLang's attention serves them"
        )
    if not hasattr(_C, "cuda_min_shared_bytes"):
        return "no CUDA kernel: this sglang_pat was built without (PAT_CUDA=OFF)"
    needed = _C.cuda_min_shared_bytes(dims[0])
    limit = _shared_memory(device) if shared is None else shared
    if needed > limit:
        return (
            f"head dim {dims[0]}, which needs {needed} bytes of shared memory per block where "
            f"this GPU has {limit}"
        )
    return ""


def _shared_memory(device: str) -> int:
    """Bytes of shared memory that one block of a GPU can have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _in_sliding_pool(layer: Any, pool: Any) -> bool:
    mapping = getattr(pool, "layers_mapping", None)  # layer -> (its id in its pool, sliding?)
    return mapping is not None and bool(mapping[layer.layer_id][1])
