# SPDX-License-Identifier: Apache-2.0
"""Run a plan: forward over its items, merge of the partial states (PAT sections 5 to 7)."""

from __future__ import annotations

import torch

from sglang_pat import _C
from sglang_pat.planning import Plan

# Values of pat::DType (csrc/cpu/forward.h).
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    logit_cap: float = 0.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    partial_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode attention of one layer: each of B queries over the tokens of its sequence.

    Args:
        q: [B, Hq, D], fp32, bf16 or fp16; its last dimension is contiguous, as in all tensors here.
        k_cache: [slots, Hkv, D] and v_cache: [slots, Hkv, Dv], of q's dtype; Hkv divides Hq.
        req_to_token: int32 [R, max_context], slot of each token of each row.
        rows: int [B], the row of ``req_to_token`` that query i reads.
        seq_lens: int [B], tokens of query i, the one being decoded included.
        plan: made for these B queries and lengths (``Plan.min_seq_lens``, ``max_seq_lens``).
        scale: factor on q.k; ``logit_cap`` c > 0 turns a score s into c * tanh(s / c).
        out: [B, Hq, Dv] of q's dtype to write to; made if None.
        lse: fp32 [B, Hq], contiguous; gets the log-sum-exp of the scores, base 2.
        partial_dtype: of the partial outputs that the merge reads, fp32 or bf16.

    Returns ``out``. A sequence of no tokens gives zeros and an LSE of -inf.

    Raises ValueError naming what does not fit: device, dtype, shape, stride, a plan of another
    batch or other heads, a slot beyond the cache.
    """
    num_queries, num_q_heads, head_dim = _shape("q", q, 3)
    num_slots, num_kv_heads, k_dim = _shape("k_cache", k_cache, 3)
    v_slots, v_heads, v_dim = _shape("v_cache", v_cache, 3)
    num_rows, max_context = _shape("req_to_token", req_to_token, 2)
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device}: this version of sglang_pat decodes on the CPU only")
    for name, tensor in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("req_to_token", req_to_token),
    ):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move one of them")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q is {q.dtype}, must be float32, bfloat16 or float16")
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(
            f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}, must be {q.dtype} as q is"
        )
    if req_to_token.dtype != torch.int32:
        raise ValueError(f"req_to_token is {req_to_token.dtype}, must be int32")
    if partial_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"partial_dtype is {partial_dtype}, must be float32 or bfloat16")
    if k_dim != head_dim:
        raise ValueError(f"k_cache has head dim {k_dim}, q has {head_dim}")
    if (v_slots, v_heads) != (num_slots, num_kv_heads):
        raise ValueError(
            f"v_cache has {v_slots} slots of {v_heads} heads, k_cache {num_slots} of {num_kv_heads}"
        )
    rows = _per_query("rows", rows, num_queries)
    seq_lens = _per_query("seq_lens", seq_lens, num_queries)
    shape = (num_queries, num_q_heads, v_dim)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype)
    elif _shape("out", out, 3) != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, must be {shape} {q.dtype} "
            f"on {q.device}"
        )
    if lse is not None and (
        lse.shape != shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse is {tuple(lse.shape)} {lse.dtype}, must be contiguous {shape[:2]} float32"
        )
    _C.decode_cpu(
        plan.data_ptr,
        plan.nbytes,
        _address(q),
        _address(k_cache),
        _address(v_cache),
        _address(out),
        0 if lse is None else lse.data_ptr(),
        (req_to_token.data_ptr(), req_to_token.stride(0), num_rows, max_context),
        rows.data_ptr(),
        seq_lens.data_ptr(),
        num_slots,
        num_queries,
        num_q_heads,
        num_kv_heads,
        head_dim,
        v_dim,
        _DTYPES[q.dtype],
        _DTYPES[partial_dtype],
        scale,
        logit_cap,
        torch.get_num_threads(),
    )
    return out


def _shape(name: str, tensor: torch.Tensor, dims: int) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) != dims:
        raise ValueError(f"{name} has shape {shape}, must have {dims} dimensions")
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, the last must be 1")
    return shape


def _address(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and outer strides, in elements."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


def _per_query(name: str, tensor: torch.Tensor, num_queries: int) -> torch.Tensor:
    """[B] as contiguous int64 on the CPU; a copy only where it is not that already."""
    if tensor.shape != (num_queries,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, q has {num_queries} queries")
    if tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}, must be an integer type")
    return tensor.to(device="cpu", dtype=torch.int64).contiguous()
