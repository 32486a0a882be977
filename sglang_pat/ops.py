# SPDX-License-Identifier: Apache-2.0
"""Run a plan: forward over its items, merge of the partial states (PAT sections 5 to 7)."""

from __future__ import annotations

import torch

from sglang_pat import _C
from sglang_pat.planner import Plan
from sglang_pat.slots import check_slots, require_tensor
from sglang_pat.target import Target
from sglang_pat.workspace import LAUNCHES, Workspace, require_kernels

# Values of pat::DType (csrc/cpu/forward.h) and pat::CudaType (csrc/cuda/decode.h).
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
    workspace: Workspace | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Decode attention of one layer: each of B queries over the tokens of its sequence.

    Args:
        q: [B, Hq, D], fp32, bf16 or fp16; its last dimension is contiguous, as in all tensors here.
            On CUDA bf16 or fp16, D and Dv both 64, 128 or 256, Hq / Hkv up to 16, and rows of q,
            the caches and out begin at multiples of 16 bytes.
        k_cache: [slots, Hkv, D] and v_cache: [slots, Hkv, Dv], of q's dtype; Hkv divides Hq.
        req_to_token: int32 [R, max_context], slot of each token of each row.
        rows: int [B], the row of ``req_to_token`` that query i reads.
        seq_lens: int [B], tokens of query i, the one being decoded included.
        plan: made for these B queries and lengths (``Plan.min_seq_lens``, ``max_seq_lens``).
        scale: factor on q.k; ``logit_cap`` c > 0 turns a score s into c * tanh(s / c).
        out: [B, Hq, Dv] of q's dtype to write to; made if None.
        lse: fp32 [B, Hq], contiguous; gets the log-sum-exp of the scores, base 2.
        partial_dtype: of the partial outputs that the merge reads, fp32 or bf16; on CUDA bf16
            means 2 bytes, of q's dtype. A workspace has its own.
        workspace: on CUDA the buffers that hold the plan and the slots, see ``Workspace``. With
            one this call only launches kernels and can be captured in a CUDA graph; the plan must
            be the one it loaded, ``req_to_token``, ``rows`` and ``seq_lens`` those of its snapshot,
            and B may exceed the plan's queries (a padded batch). Without one, buffers are made for
            the call and the lengths are read back, which waits for the device.
        check: first prove by ``check_slots`` that queries that share an item hold the same slots.
            Costs a comparison of all shared tokens, on CUDA with waiting, so not during a capture.

    Returns ``out``. A sequence of no tokens, or a row that pads, gives zeros and an LSE of -inf.

    Raises ValueError naming what does not fit: an argument that is no tensor or no plan, a device,
    dtype, shape or stride, a plan of another batch or other heads, a slot beyond the cache (on the
    CPU only); SlotMismatch, a ValueError, from the check; and RuntimeError with CUDA's error if a
    launch fails.
    """
    _check_types(
        plan,
        {"out": out, "lse": lse},
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        req_to_token=req_to_token,
        rows=rows,
        seq_lens=seq_lens,
    )
    num_queries, num_q_heads, head_dim = _shape("q", q, 3)
    num_slots, num_kv_heads, k_dim = _shape("k_cache", k_cache, 3)
    v_slots, v_heads, v_dim = _shape("v_cache", v_cache, 3)
    num_rows, max_context = _shape("req_to_token", req_to_token, 2)
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q is on {q.device}: sglang_pat decodes on CPU and CUDA devices")
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
    shape = (num_queries, num_q_heads, v_dim)
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
    if check:
        check_slots(plan, req_to_token, rows)
    if q.device.type == "cuda":
        _check_cuda(q, k_cache, v_cache, out, scale, logit_cap)
        if workspace is None:
            workspace = _workspace_for_call(q, k_cache, plan, max_context, partial_dtype)
            _check_lengths(plan, _per_query("seq_lens", seq_lens, num_queries))
            workspace.load(plan)
            workspace.snapshot(req_to_token, rows, seq_lens)
        _decode_cuda(workspace, q, k_cache, v_cache, out, lse, plan, scale, logit_cap)
        return out
    if workspace is not None:
        raise ValueError(f"workspace is on {workspace.device}, q on {q.device}: leave it out")
    rows = _per_query("rows", rows, num_queries)
    seq_lens = _per_query("seq_lens", seq_lens, num_queries)
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


def _check_types(plan: object, optional: dict[str, object], **tensors: object) -> None:
    """Raise ValueError for what is no plan, or no tensor; ``optional`` ones may be None."""
    for name, value in tensors.items():
        require_tensor(name, value)
    for name, value in optional.items():
        if value is not None:
            require_tensor(name, value)
    if not isinstance(getattr(plan, "data_ptr", None), int):
        raise ValueError(
            f"plan is of type {type(plan).__name__}, must be a Plan: make it with sglang_pat.plan"
        )


def _check_cuda(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    logit_cap: float,
) -> None:
    """What the kernels ask for beyond ``decode``, before anything is launched."""
    require_kernels()
    head_dim = q.shape[2]
    if q.dtype == torch.float32:
        raise ValueError("q is float32, the CUDA kernels take bfloat16 and float16")
    if v_cache.shape[2] != head_dim:
        raise ValueError(
            f"v_cache has head dim {v_cache.shape[2]}, q {head_dim}: must be alike on CUDA"
        )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        if tensor.data_ptr() % 16 or tensor.stride(0) % 8 or tensor.stride(1) % 8:
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
    )


def _decode_cuda(
    workspace: Workspace,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    plan: Plan,
    scale: float,
    logit_cap: float,
) -> None:
    """Check that the workspace is for this call, and launch."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    target = workspace.target
    if workspace.device != q.device:
        raise ValueError(f"the workspace is on {workspace.device}, q on {q.device}")
    if plan is not workspace.plan:
        raise ValueError("the workspace holds another plan: load() it and snapshot() first")
    heads = (num_q_heads, num_kv_heads, head_dim)
    if heads != (target.num_q_heads, target.num_kv_heads, target.head_dim):
        raise ValueError(
            f"{num_q_heads} query heads, {num_kv_heads} KV heads and head dim {head_dim}; the "
            f"workspace is for {target.num_q_heads}, {target.num_kv_heads} and {target.head_dim}"
        )
    workspace.check_rows(num_rows)
    with torch.cuda.device(q.device):
        _C.decode_cuda(
            workspace.plan_ptr,
            _address(q),
            _address(k_cache),
            _address(v_cache),
            _address(out),
            0 if lse is None else lse.data_ptr(),
            (workspace.slots.data_ptr(), workspace.slots.stride(0)),
            workspace.branches,
            workspace.partials.data_ptr(),
            workspace.partial_lse.data_ptr(),
            workspace.queue.data_ptr(),
            0 if workspace.trace is None else workspace.trace.data_ptr(),
            num_rows,
            *heads,
            _DTYPES[q.dtype],
            workspace.partials.element_size(),
            scale,
            logit_cap,
            LAUNCHES[workspace.launch],
            torch.cuda.current_stream().cuda_stream,
        )


def _workspace_for_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    plan: Plan,
    max_context: int,
    partial_dtype: torch.dtype,
) -> Workspace:
    """The buffers that ``plan`` needs on q's device."""
    if len(q) != plan.num_queries:
        raise ValueError(f"the plan is for {plan.num_queries} queries, q has {len(q)}")
    target = Target.h200(  # of its fields only the sizes are used
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=q.shape[2],
        max_queries=max(1, plan.num_queries),
        max_items=max(1, plan.num_items, plan.num_queries),
        max_partials=max(1, plan.num_partials),
        max_segments=plan.num_segments,
        max_branch_tokens=plan.branch_tokens,
    )
    return Workspace(target, max(1, max_context), q.device, partial_dtype=partial_dtype)


def _check_lengths(plan: Plan, seq_lens: torch.Tensor) -> None:
    if not plan.fits(seq_lens.data_ptr(), len(seq_lens)):
        raise ValueError(
            f"the plan was made for other lengths than {seq_lens.tolist()[:8]}...: every length "
            f"must lie in its [min_seq_lens, max_seq_lens]; make a new plan"
        )


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
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is {tensor.dtype}, must be an integer type")
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta, where tensors have no values")
    return tensor.to(device="cpu", dtype=torch.int64).contiguous()
