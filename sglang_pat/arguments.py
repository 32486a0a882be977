# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors that ``decode`` and ``Workspace.snapshot`` are given.

Every layer of every step comes by here, so the common case is short. Each check raises ValueError
with what was given and what fits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_pat import _C
from sglang_pat.planner import Plan

INPUTS = ("q", "k_cache", "v_cache", "req_to_token", "rows", "seq_lens")
OUTPUTS = ("out", "lse")
_TENSORS, _TENSORS_OR_NONE = frozenset({torch.Tensor}), frozenset({torch.Tensor, type(None)})
# Element types of both executors, with their numbers in the extension.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): at for name, at in _C.DTYPES.items()}
# Of K/V that are not of q's dtype, likewise; and the number of those that are.
KV_DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): at for name, at in _C.KV_DTYPES.items() if name != "same"
}
SAME_KV: int = _C.KV_DTYPES["same"]
_FLOAT32 = torch.finfo(torch.float32)
_LEAST_SCALE, _LARGEST_SCALE = _FLOAT32.tiny, _FLOAT32.max  # the executors' scales are float32


def require_kernels() -> None:
    """Raise ValueError if the extension has no CUDA kernels."""
    if not hasattr(_C, "decode_cuda"):
        raise ValueError(
            "this sglang_pat was built without CUDA kernels: install it with PAT_CUDA=ON"
        )


class KV(NamedTuple):
    """How K/V are stored: the extension's number of their dtype, and what their values are
    multiplied by, 1 where they are of q's dtype."""

    dtype: int
    k_scale: float
    v_scale: float


class Sizes(NamedTuple):
    """Of a call of ``decode``. ``num_q_rows``: rows of q, num_queries x draft tokens. ``table``:
    the shape of ``req_to_token``, [R, max_context]."""

    num_q_rows: int
    num_queries: int
    num_q_heads: int
    head_dim: int
    num_slots: int
    num_kv_heads: int
    v_head_dim: int
    table: tuple[int, ...]


def require_tensor(name: str, value: object) -> None:
    """Raise ValueError, saying what to do, unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{name} is of type {type(value).__name__}, must be a torch.Tensor: "
            f"convert it with torch.as_tensor"
        )


def check_types(plan: object, inputs: tuple[object, ...], outputs: tuple[object, ...]) -> None:
    """Raise ValueError for what is no plan, or no tensor; outputs may be None.

    ``inputs``, ``outputs``: the arguments of ``decode`` that ``INPUTS`` and ``OUTPUTS`` name.
    """
    if not _TENSORS.issuperset(map(type, inputs)):  # isinstance() of a tensor is slow
        for name, value in zip(INPUTS, inputs, strict=True):
            require_tensor(name, value)
    if not _TENSORS_OR_NONE.issuperset(map(type, outputs)):
        for name, value in zip(OUTPUTS, outputs, strict=True):
            if value is not None:
                require_tensor(name, value)
    if not isinstance(getattr(plan, "data_ptr", None), int):
        raise ValueError(
            f"plan is of type {type(plan).__name__}, must be a Plan: make it with sglang_pat.plan"
        )


def check_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    partial_dtype: torch.dtype,
    draft_tokens: int,
) -> Sizes:
    """Check devices, dtypes, strides and shapes of what ``decode`` reads. q has ``draft_tokens``
    rows a query."""
    num_q_rows, num_q_heads, head_dim = _shape("q", q, 3)
    num_slots, num_kv_heads, k_head_dim = _shape("k_cache", k_cache, 3)
    v_slots, v_heads, v_head_dim = _shape("v_cache", v_cache, 3)
    table = _shape("req_to_token", req_to_token, 2)
    device, dtype = q.device, q.dtype
    if not (q.is_cpu or q.is_cuda):
        raise ValueError(f"q is on {device}: sglang_pat decodes on CPU and CUDA devices")
    for name, tensor in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("req_to_token", req_to_token),
    ):
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, q on {device}: move one of them")
    if dtype not in DTYPES:
        raise ValueError(f"q is {dtype}, must be float32, bfloat16 or float16")
    if req_to_token.dtype != torch.int32:
        raise ValueError(f"req_to_token is {req_to_token.dtype}, must be int32")
    if partial_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"partial_dtype is {partial_dtype}, must be float32 or bfloat16")
    if num_q_rows % draft_tokens:
        raise ValueError(
            f"q has {num_q_rows} rows, must be a multiple of the plan's {draft_tokens} draft "
            f"tokens a query"
        )
    if k_head_dim != head_dim:
        raise ValueError(f"k_cache has head dim {k_head_dim}, q has {head_dim}")
    if v_slots != num_slots or v_heads != num_kv_heads:
        raise ValueError(
            f"v_cache has {v_slots} slots of {v_heads} heads, k_cache {num_slots} of {num_kv_heads}"
        )
    return Sizes(
        num_q_rows,
        num_q_rows // draft_tokens,
        num_q_heads,
        head_dim,
        num_slots,
        num_kv_heads,
        v_head_dim,
        table,
    )


def check_kv(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: float, v_scale: float
) -> KV:
    """Check the dtypes of K and V and the scales; ``q`` has passed ``check_inputs``."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, (float, int)):
            raise ValueError(
                f"{name} is of type {type(scale).__name__}, must be a float, one for the whole "
                f"cache: a tensor would be read back from the device at every call"
            )
        if not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
            raise ValueError(
                f"{name} is {scale}, must be from {_LEAST_SCALE:.2g} to {_LARGEST_SCALE:.2g}"
            )
    dtype = k_cache.dtype
    if dtype == v_cache.dtype:
        if dtype in KV_DTYPES:
            return KV(KV_DTYPES[dtype], k_scale, v_scale)
        if dtype == q.dtype and k_scale == v_scale == 1:
            return KV(SAME_KV, 1.0, 1.0)
        if dtype == q.dtype:
            raise ValueError(
                f"k_scale is {k_scale} and v_scale {v_scale}, must be 1 where K and V are {dtype} "
                f"as q is: only float8_e4m3fn has scales"
            )
    raise ValueError(
        f"k_cache is {dtype} and v_cache {v_cache.dtype}, must both be {q.dtype} as q is or both "
        f"torch.float8_e4m3fn"
    )


def check_outputs(
    q: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    shape: tuple[int, int, int],
) -> torch.Tensor:
    """Check what ``decode`` writes, of ``shape`` [B, Hq, Dv] and [B, Hq]; make ``out`` if None."""
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    elif _shape("out", out, 3) != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, must be {shape} {q.dtype} "
            f"on {q.device}"
        )
    if lse is not None and (
        lse.shape != shape[:2]
        or lse.dtype != torch.float32
        or not lse.is_contiguous()
        or lse.device != q.device
    ):
        raise ValueError(
            f"lse is {tuple(lse.shape)} {lse.dtype} on {lse.device} with strides {lse.stride()}, "
            f"must be contiguous {shape[:2]} float32 on {q.device}"
        )
    return out


def check_cuda(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    logit_cap: float,
    kv: KV,
    draft_tokens: int = 1,
) -> None:
    """Check what the CUDA kernels ask for beyond the CPU's executor, before a launch."""
    require_kernels()
    head_dim = q.shape[2]
    if q.dtype == torch.float32:
        raise ValueError("q is float32, the CUDA kernels take bfloat16 and float16")
    if v_cache.shape[2] != head_dim:
        raise ValueError(
            f"v_cache has head dim {v_cache.shape[2]}, q {head_dim}: must be alike on CUDA"
        )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        whole = 16 // tensor.element_size()  # elements of 16 bytes
        if tensor.data_ptr() % 16 or tensor.stride(0) % whole or tensor.stride(1) % whole:
            raise ValueError(
                f"{name} is at address {tensor.data_ptr():#x} with strides {tensor.stride()}: its "
                f"rows must begin at multiples of 16 bytes; make it contiguous"
            )
    _C.check_decode_cuda(
        q.shape[1],
        k_cache.shape[1],
        head_dim,
        k_cache.stride(0),
        v_cache.stride(0),
        scale,
        logit_cap,
        kv_dtype=kv.dtype,
        k_scale=kv.k_scale,
        v_scale=kv.v_scale,
        draft_tokens=draft_tokens,
    )


def check_lengths(plan: Plan, seq_lens: torch.Tensor) -> None:
    """Check that ``plan`` holds for ``seq_lens`` [B] int64, on the CPU, contiguous."""
    if not plan.fits(seq_lens.data_ptr(), len(seq_lens)):
        raise ValueError(
            f"the plan was made for other lengths than {seq_lens.tolist()[:8]}...: every length "
            f"must lie in its [min_seq_lens, max_seq_lens]; make a new plan"
        )


def per_query(name: str, tensor: torch.Tensor, num_queries: int) -> torch.Tensor:
    """[B] as contiguous int64 on the CPU; a copy only where it is not that already."""
    if tensor.shape != (num_queries,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, q has {num_queries} queries")
    if tensor.dtype is torch.int64 and tensor.is_cpu and tensor.is_contiguous():
        return tensor  # the common case, and to() is slow
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is {tensor.dtype}, must be an integer type")
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta, where tensors have no values")
    return tensor.to(device="cpu", dtype=torch.int64).contiguous()


def check_batch(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    device: torch.device,
    max_context: int,
) -> None:
    """Check the arguments of ``Workspace.snapshot`` for a workspace on ``device``."""
    named = (("req_to_token", req_to_token, 2), ("rows", rows, 1), ("seq_lens", seq_lens, 1))
    for name, tensor, dims in named:
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the workspace on {device}")
        if tensor.dim() != dims or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, must "
                f"have {dims} dimensions, the last of stride 1"
            )
    if req_to_token.dtype != torch.int32:
        raise ValueError(f"req_to_token is {req_to_token.dtype}, must be int32")
    for name, tensor in (("rows", rows), ("seq_lens", seq_lens)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {tensor.dtype}, must be int32 or int64")
    if rows.shape != seq_lens.shape:
        raise ValueError(f"{len(rows)} rows and {len(seq_lens)} seq_lens: need one of each")
    if req_to_token.shape[1] > max_context:
        raise ValueError(
            f"req_to_token has {req_to_token.shape[1]} tokens a row, the workspace holds "
            f"{max_context}: make it for a larger max_context"
        )


def _shape(name: str, tensor: torch.Tensor, dims: int) -> torch.Size:
    shape = tensor.shape
    if len(shape) != dims:
        raise ValueError(f"{name} has shape {tuple(shape)}, must have {dims} dimensions")
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, the last must be 1")
    return shape
