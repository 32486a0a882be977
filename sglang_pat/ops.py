# SPDX-License-Identifier: Apache-2.0
"""Run a plan: forward over its items, merge of the partial states (PAT sections 5 to 7)."""

from __future__ import annotations

import torch

from sglang_pat import _C
from sglang_pat.arguments import (
    DTYPES,
    KV,
    Sizes,
    check_cuda,
    check_inputs,
    check_kv,
    check_lengths,
    check_outputs,
    check_types,
    per_query,
)
from sglang_pat.draft_masks import check_draft_masks
from sglang_pat.planner import Plan
from sglang_pat.slots import check_slots
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    draft_masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    partial_dtype: torch.dtype = torch.float32,
    workspace: Workspace | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Decode attention of one layer: each of B queries over the tokens of its sequence.

    Args:
        q: [B, Hq, D], fp32, bf16 or fp16, or [B * T, Hq, D] with a plan for T draft tokens a
            query (``Target.draft_tokens``): those of a query are neighbouring rows, the last T
            tokens of its sequence, each of which attends to all tokens up to itself; its last
            dimension is contiguous, as in all tensors here.
            On CUDA bf16 or fp16, D and Dv both 64, 128 or 256, Hq / Hkv up to 16, T * Hq / Hkv up
            to 128, and rows of q, the caches and out begin at multiples of 16 bytes.
        k_cache: [slots, Hkv, D] and v_cache: [slots, Hkv, Dv], both of q's dtype or both
            float8_e4m3fn; Hkv divides Hq.
        req_to_token: int32 [R, max_context], slot of each token of each row.
        rows: int [B], the row of ``req_to_token`` that query i reads.
        seq_lens: int [B], tokens of query i, the one being decoded, or all draft tokens, included.
        plan: made for these B queries and lengths (``Plan.min_seq_lens``, ``max_seq_lens``).
        scale: factor on q.k; ``logit_cap`` c > 0 turns a score s into c * tanh(s / c).
        k_scale, v_scale: floats more than 0 by which the values of float8_e4m3fn caches are to be
            multiplied; 1 for others.
        draft_masks: int64 [B, T], contiguous, for drafts that are a tree, T up to 64: bit j of
            [i, t] says that draft token t of query i attends to draft token j of the query. All
            attend to draft token 0. On CUDA the plan has no branches (``Target.cuts``).
            None: each attends to those before it. A workspace has masks of its own
            (``set_draft_masks``), and these beside it raise ValueError.
        out: [B, Hq, Dv] of q's dtype, with q's rows, to write to; made if None. On CUDA it is
            contiguous where T is more than 1.
        lse: fp32 [B, Hq], with q's rows, contiguous; gets the log-sum-exp of the scores, base 2.
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
    check_types(plan, (q, k_cache, v_cache, req_to_token, rows, seq_lens), (out, lse))
    draft_tokens = plan.draft_tokens
    sizes = check_inputs(q, k_cache, v_cache, req_to_token, partial_dtype, draft_tokens)
    kv = check_kv(q, k_cache, v_cache, k_scale, v_scale)
    check_draft_masks(draft_masks, q.device, sizes.num_queries, draft_tokens)
    out = check_outputs(q, out, lse, (sizes.num_q_rows, sizes.num_q_heads, sizes.v_head_dim))
    if check:
        check_slots(plan, req_to_token, rows)
    if q.is_cuda:
        check_cuda(q, k_cache, v_cache, out, scale, logit_cap, kv, draft_tokens)
        if workspace is None:
            workspace = _workspace_for_call(plan, sizes, q.device, partial_dtype, draft_masks)
            check_lengths(plan, per_query("seq_lens", seq_lens, sizes.num_queries))
            workspace.load(plan)
            workspace.snapshot(req_to_token, rows, seq_lens)
        elif draft_masks is not None:
            raise ValueError("draft_masks beside a workspace: call its set_draft_masks() instead")
        _check_workspace(workspace, q.device, plan, sizes)
        _launch(workspace, sizes, q, k_cache, v_cache, out, lse, scale, logit_cap, kv)
        return out
    if workspace is not None:
        raise ValueError(f"workspace is on {workspace.device}, q on {q.device}: leave it out")
    rows = per_query("rows", rows, sizes.num_queries)
    seq_lens = per_query("seq_lens", seq_lens, sizes.num_queries)
    _C.decode_cpu(
        plan=plan.data_ptr,
        plan_bytes=plan.nbytes,
        q=_address(q),
        k_cache=_address(k_cache),
        v_cache=_address(v_cache),
        out=_address(out),
        lse=0 if lse is None else lse.data_ptr(),
        req_to_token=(req_to_token.data_ptr(), req_to_token.stride(0), *sizes.table),
        rows=rows.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        num_slots=sizes.num_slots,
        num_queries=sizes.num_queries,
        num_q_heads=sizes.num_q_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        dtype=DTYPES[q.dtype],
        partial_dtype=DTYPES[partial_dtype],
        scale=scale,
        logit_cap=logit_cap,
        num_threads=torch.get_num_threads(),
        draft_tokens=draft_tokens,
        kv_dtype=kv.dtype,
        k_scale=kv.k_scale,
        v_scale=kv.v_scale,
        draft_masks=0 if draft_masks is None else draft_masks.data_ptr(),
    )
    return out


def _launch(
    workspace: Workspace,
    sizes: Sizes,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    logit_cap: float,
    kv: KV,
) -> None:
    """Launch the kernels of one layer for the plan that ``workspace`` holds."""
    with torch.cuda.device(q.device):
        _C.decode_cuda(
            workspace.bound,
            q=_address(q),
            k_cache=_address(k_cache),
            v_cache=_address(v_cache),
            out=_address(out),
            lse=0 if lse is None else lse.data_ptr(),
            trace=0 if workspace.trace is None else workspace.trace.data_ptr(),
            num_rows=sizes.num_queries,
            dtype=DTYPES[q.dtype],
            scale=scale,
            logit_cap=logit_cap,
            kv_dtype=kv.dtype,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            stream=torch.cuda.current_stream().cuda_stream,
        )


def _check_workspace(workspace: Workspace, device: torch.device, plan: Plan, sizes: Sizes) -> None:
    """Check that the workspace is for this call."""
    target = workspace.target
    if workspace.device != device:
        raise ValueError(f"the workspace is on {workspace.device}, q on {device}")
    if plan is not workspace.plan:
        raise ValueError("the workspace holds another plan: load() it and snapshot() first")
    heads = (sizes.num_q_heads, sizes.num_kv_heads, sizes.head_dim)
    if heads != (target.num_q_heads, target.num_kv_heads, target.head_dim):
        raise ValueError(
            f"{heads[0]} query heads, {heads[1]} KV heads and head dim {heads[2]}; the "
            f"workspace is for {target.num_q_heads}, {target.num_kv_heads} and {target.head_dim}"
        )
    workspace.check_rows(sizes.num_queries)
    if workspace.has_draft_masks and plan.branch_tokens:
        raise ValueError("on CUDA a branch has no draft masks: plan with cuts=WITHOUT_BRANCHES")


def _workspace_for_call(
    plan: Plan,
    sizes: Sizes,
    device: torch.device,
    partial_dtype: torch.dtype,
    draft_masks: torch.Tensor | None,
) -> Workspace:
    """The buffers that ``plan`` needs on ``device``, for this call alone."""
    if sizes.num_queries != plan.num_queries:
        raise ValueError(f"the plan is for {plan.num_queries} queries, q has {sizes.num_queries}")
    target = Target.h200(  # of its fields only the sizes are used
        num_q_heads=sizes.num_q_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        draft_tokens=plan.draft_tokens,
        max_queries=max(1, plan.num_queries),
        max_items=max(1, plan.num_items, plan.num_queries),
        max_partials=max(1, plan.num_partials),
        max_segments=plan.num_segments,
        max_branch_tokens=plan.branch_tokens,
    )
    workspace = Workspace(
        target,
        max(1, sizes.table[1]),
        device,
        list_tokens=max(1, plan.list_tokens),
        partial_dtype=partial_dtype,
        draft_masks=draft_masks is not None,
    )
    if draft_masks is not None:
        workspace.set_draft_masks(draft_masks)
    return workspace


def _address(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and outer strides, in elements."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
