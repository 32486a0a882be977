# SPDX-License-Identifier: Apache-2.0
"""Run a plan: forward over its items, merge of the partial states (PAT sections 5 to 7).

Every layer of every step comes by here, so the checks of the common case are short. Each raises
ValueError with what was given and what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_pat import _C
from sglang_pat.draft_masks import check_draft_masks, masks_of
from sglang_pat.planner import Plan
from sglang_pat.slots import check_slots, require_tensor
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace, check_dims, check_partial_dtype, require_kernels

# Element types of both executors, with their numbers in the extension; and of K/V.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): at for name, at in _C.DTYPES.items()}
KV_DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): at for name, at in _C.KV_DTYPES.items() if name != "same"
}
_FLOAT32 = torch.finfo(torch.float32)
_LEAST_SCALE, _LARGEST_SCALE = _FLOAT32.tiny, _FLOAT32.max  # the executors' scales are float32


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
    q_rope: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    draft_masks: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
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
        q_rope: [B, Hq, D - Dv], or with q's rows, of q's dtype: the last part of q, which then is
            [B, Hq, Dv]; V is then the first Dv numbers of K, so v_cache is the view
            ``k_cache[..., :Dv]``. For multi-head latent attention (MLA).
        scale: factor on q.k; ``logit_cap`` c > 0 turns a score s into c * tanh(s / c).
        k_scale, v_scale: floats more than 0 by which the values of float8_e4m3fn caches are to be
            multiplied; 1 for others.
        draft_masks: int64 [B, T], contiguous, for drafts that are a tree, T up to 64: bit j of
            [i, t] says that draft token t of query i attends to draft token j of the query. All
            attend to draft token 0. On CUDA the plan has no branches (``Target.cuts``).
            None: each attends to those before it. A workspace has masks of its own
            (``set_draft_masks``), and these beside it raise ValueError.
        sinks: [Hq], fp32, bf16 or fp16 whatever q is, contiguous: a logit of each query head that
            counts in its softmax beside the tokens, once a row of q, and has no value, as GPT-OSS
            has them; -inf is none. ``scale`` and ``logit_cap`` do not change it. Read where it
            lies at every call, and at every replay of a CUDA graph, so that new values written
            there count from then on.
        out: [B, Hq, Dv] of q's dtype, with q's rows, to write to; made if None. On CUDA it is
            contiguous where T is more than 1.
        lse: fp32 [B, Hq], with q's rows, contiguous; gets the log-sum-exp of the scores, base 2,
            the sink among them, as in FlashAttention: so ``out`` and ``lse`` are a state that
            merges with others, and of the parts of one softmax only one may have sinks.
        partial_dtype: of the partial outputs that the merge reads, fp32 or bf16; on CUDA bf16
            means 2 bytes, of q's dtype. A workspace has its own.
        workspace: on CUDA the buffers that hold the plan and the slots, see ``Workspace``. With
            one this call only launches kernels and can be captured in a CUDA graph; the plan must
            be the one it loaded, ``req_to_token``, ``rows`` and ``seq_lens`` those of its snapshot,
            and B may exceed the plan's queries (a padded batch). Without one, buffers are made for
            the call and the lengths are read back, which waits for the device.
        check: first prove by ``check_slots`` that queries that share an item hold the same slots.
            Costs a comparison of all shared tokens, on CUDA with waiting, so not during a capture.

    Returns ``out``. A sequence of no tokens, or a row that pads, gives zeros and an LSE of -inf, or
    of its sink.

    Raises ValueError naming what does not fit: an argument that is no tensor or no plan, a device,
    dtype, shape or stride, a plan of another batch or other heads, a slot beyond the cache (on the
    CPU only); SlotMismatch, a ValueError, from the check; and RuntimeError with CUDA's error if a
    launch fails.
    """
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "req_to_token": req_to_token}
    check_types(plan, **inputs, rows=rows, seq_lens=seq_lens)
    draft_tokens = plan.draft_tokens
    rope_dim = 0 if q_rope is None else check_rope(q, q_rope, k_cache, v_cache)
    check_inputs(**inputs, draft_tokens=draft_tokens, rope_dim=rope_dim)
    check_partial_dtype(partial_dtype)
    num_q_rows, num_q_heads, _ = q.shape
    head_dim = k_cache.shape[2]
    num_slots, num_kv_heads, v_head_dim = v_cache.shape
    num_queries = num_q_rows // draft_tokens
    check_draft_masks(draft_masks, q.device, num_queries, draft_tokens)
    check_sinks(sinks, q.device, num_q_heads)
    out = check_outputs(q, out, lse, (num_q_rows, num_q_heads, v_head_dim))
    factors: dict[str, Any] = {
        "scale": scale,
        "logit_cap": logit_cap,
        "kv_dtype": check_kv(q, k_cache, v_cache, k_scale, v_scale),
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if check:
        check_slots(plan, req_to_token, rows)
    tensors: dict[str, Any] = {
        "q": _address(q),
        "k_cache": _address(k_cache),
        "v_cache": _address(v_cache),
        "out": _address(out),
        "lse": 0 if lse is None else lse.data_ptr(),
        "dtype": DTYPES[q.dtype],
        "sinks": 0 if sinks is None else sinks.data_ptr(),
        "sink_dtype": 0 if sinks is None else DTYPES[sinks.dtype],
        "q_rope": (0, 0, 0) if q_rope is None else _address(q_rope),
    }
    if q.is_cuda:
        check_cuda(q, k_cache, v_cache, out, draft_tokens, factors, q_rope)
        if workspace is None:
            batch = (req_to_token, rows, seq_lens)
            heads = (num_q_heads, num_kv_heads, head_dim, v_head_dim)
            workspace = _workspace_for_call(plan, q, heads, batch, partial_dtype, draft_masks)
        elif draft_masks is not None:
            raise ValueError("draft_masks beside a workspace: call its set_draft_masks() instead")
        _check_workspace(workspace, plan, q, k_cache.shape[1:], num_queries)
        with torch.cuda.device(q.device):
            _C.decode_cuda(
                workspace.bound,
                num_rows=num_queries,
                stream=torch.cuda.current_stream().cuda_stream,
                **tensors,
                **factors,
            )
        return out
    if workspace is not None:
        raise ValueError(f"workspace is on {workspace.device}, q on {q.device}: leave it out")
    rows = per_query("rows", rows, num_queries)
    seq_lens = per_query("seq_lens", seq_lens, num_queries)
    _C.decode_cpu(
        plan=plan.data_ptr,
        plan_bytes=plan.nbytes,
        req_to_token=(req_to_token.data_ptr(), req_to_token.stride(0), *req_to_token.shape),
        rows=rows.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        num_slots=num_slots,
        num_queries=num_queries,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        partial_dtype=DTYPES[partial_dtype],
        num_threads=torch.get_num_threads(),
        draft_tokens=draft_tokens,
        draft_masks=0 if draft_masks is None else draft_masks.data_ptr(),
        **tensors,
        **factors,
    )
    return out


def check_types(plan: object, **tensors: object) -> None:
    """Raise ValueError for what is no plan, or no tensor."""
    for name, tensor in tensors.items():
        require_tensor(name, tensor)
    if not isinstance(getattr(plan, "data_ptr", None), int):
        raise ValueError(
            f"plan is of type {type(plan).__name__}, must be a Plan: make it with sglang_pat.plan"
        )


def check_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    draft_tokens: int,
    rope_dim: int,
) -> None:
    """Check devices, dtypes, strides and shapes. The last ``rope_dim`` numbers of q's rows stand in
    another tensor."""
    num_q_rows, _, q_dim = _shape("q", q, 3)
    head_dim = q_dim + rope_dim
    if not (q.is_cpu or q.is_cuda):
        raise ValueError(f"q is on {q.device}: sglang_pat decodes on CPU and CUDA devices")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}, must be float32, bfloat16 or float16")
    for name, tensor, dims in (
        ("k_cache", k_cache, 3),
        ("v_cache", v_cache, 3),
        ("req_to_token", req_to_token, 2),
    ):
        _shape(name, tensor, dims)
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: move one of them")
    if req_to_token.dtype != torch.int32:
        raise ValueError(f"req_to_token is {req_to_token.dtype}, must be int32")
    if num_q_rows % draft_tokens:
        raise ValueError(
            f"q has {num_q_rows} rows, must be a multiple of the plan's {draft_tokens} draft "
            f"tokens a query"
        )
    num_slots, num_kv_heads, k_head_dim = k_cache.shape
    if k_head_dim != head_dim:
        raise ValueError(f"k_cache has head dim {k_head_dim}, q has {head_dim}")
    if v_cache.shape[:2] != (num_slots, num_kv_heads):
        raise ValueError(
            f"v_cache has {v_cache.shape[0]} slots of {v_cache.shape[1]} heads, k_cache "
            f"{num_slots} of {num_kv_heads}"
        )


def check_rope(
    q: torch.Tensor, q_rope: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> int:
    """Check that ``q_rope`` continues the rows of q and that V is a view of K; its head dim."""
    require_tensor("q_rope", q_rope)
    shape, of_q = _shape("q_rope", q_rope, 3), _shape("q", q, 3)
    alike = q_rope.dtype == q.dtype and q_rope.device == q.device
    if shape[:2] != of_q[:2] or not shape[2] or not alike:
        raise ValueError(
            f"q_rope is {tuple(shape)} {q_rope.dtype} on {q_rope.device}, must have the rows and "
            f"heads of q, {tuple(of_q)} {q.dtype} on {q.device}"
        )
    of_v = _shape("v_cache", v_cache, 3)
    same = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    if not same or of_v[2] != of_q[2]:
        raise ValueError(
            f"v_cache is {tuple(of_v)} at {v_cache.data_ptr():#x} with strides {v_cache.stride()}, "
            f"k_cache at {k_cache.data_ptr():#x} with strides {k_cache.stride()}: with q_rope give "
            f"the first part of K, k_cache[..., :{of_q[2]}]"
        )
    return shape[2]


def sinks_fit(sinks: torch.Tensor, num_q_heads: int) -> bool:
    """Whether the executors can read ``sinks`` of a layer."""
    return sinks.shape == (num_q_heads,) and sinks.dtype in DTYPES and sinks.is_contiguous()


def check_sinks(sinks: torch.Tensor | None, device: torch.device, num_q_heads: int) -> None:
    if sinks is None:
        return
    require_tensor("sinks", sinks)
    if sinks.device != device or not sinks_fit(sinks, num_q_heads):
        raise ValueError(
            f"sinks is {tuple(sinks.shape)} {sinks.dtype} on {sinks.device} with strides "
            f"{sinks.stride()}, must be contiguous ({num_q_heads},), one a query head, of float32, "
            f"bfloat16 or float16 on {device}"
        )


def check_kv(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: float, v_scale: float
) -> int:
    """Check the dtypes of K and V and the scales, and give the extension's number of the dtype."""
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
    if dtype != v_cache.dtype or not (dtype == q.dtype or dtype in KV_DTYPES):
        raise ValueError(
            f"k_cache is {dtype} and v_cache {v_cache.dtype}, must both be {q.dtype} as q is or "
            f"both torch.float8_e4m3fn"
        )
    if dtype == q.dtype and not k_scale == v_scale == 1:
        raise ValueError(
            f"k_scale is {k_scale} and v_scale {v_scale}, must be 1 where K and V are {dtype} "
            f"as q is: only float8_e4m3fn has scales"
        )
    return KV_DTYPES.get(dtype, _C.KV_DTYPES["same"])


def check_outputs(
    q: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    shape: tuple[int, int, int],
) -> torch.Tensor:
    """Check what ``decode`` writes, of ``shape`` [B, Hq, Dv] and [B, Hq]; make ``out`` if None."""
    for name, tensor in (("out", out), ("lse", lse)):
        if tensor is not None:
            require_tensor(name, tensor)
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
    draft_tokens: int,
    factors: dict[str, Any],
    q_rope: torch.Tensor | None = None,
) -> None:
    """Check what the CUDA kernels ask for beyond the CPU's executor."""
    head_dim, v_head_dim = k_cache.shape[2], v_cache.shape[2]
    check_dims(head_dim, v_head_dim)
    require_kernels()
    if q_rope is None and head_dim != v_head_dim:
        raise ValueError(
            f"q has head dim {head_dim}, V {v_head_dim}: on CUDA give q[..., :{v_head_dim}] and "
            f"q[..., {v_head_dim}:] as q_rope"
        )
    if q.dtype == torch.float32:
        raise ValueError("q is float32, the CUDA kernels take bfloat16 and float16")
    aligned = [("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)]
    if q_rope is not None:
        aligned.append(("q_rope", q_rope))
    for name, tensor in aligned:
        whole = 16 // tensor.element_size()  # elements of 16 bytes
        if tensor.data_ptr() % 16 or tensor.stride(0) % whole or tensor.stride(1) % whole:
            raise ValueError(
                f"{name} is at address {tensor.data_ptr():#x} with strides {tensor.stride()}: its "
                f"rows must begin at multiples of 16 bytes; make it contiguous"
            )
    _C.check_decode_cuda(
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        k_stride_slot=k_cache.stride(0),
        v_stride_slot=v_cache.stride(0),
        scale=factors["scale"],
        logit_cap=factors["logit_cap"],
        kv_dtype=factors["kv_dtype"],
        draft_tokens=draft_tokens,
        dtype=DTYPES[q.dtype],
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


def _shape(name: str, tensor: torch.Tensor, dims: int) -> torch.Size:
    shape = tensor.shape
    if len(shape) != dims:
        raise ValueError(f"{name} has shape {tuple(shape)}, must have {dims} dimensions")
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, the last must be 1")
    return shape


def _check_workspace(
    workspace: Workspace, plan: Plan, q: torch.Tensor, kv_heads: Sequence[int], num_queries: int
) -> None:
    target = workspace.target
    if workspace.device != q.device:
        raise ValueError(f"the workspace is on {workspace.device}, q on {q.device}")
    if plan is not workspace.plan:
        raise ValueError("the workspace holds another plan: load() it and snapshot() first")
    heads = (q.shape[1], *kv_heads)
    if heads != (target.num_q_heads, target.num_kv_heads, target.head_dim):
        raise ValueError(
            f"{heads[0]} query heads, {heads[1]} KV heads and head dim {heads[2]}; the "
            f"workspace is for {target.num_q_heads}, {target.num_kv_heads} and {target.head_dim}"
        )
    workspace.check_rows(num_queries)
    if workspace.has_draft_masks and plan.branch_tokens:
        raise ValueError("on CUDA a branch has no draft masks: plan with cuts=WITHOUT_BRANCHES")


def _workspace_for_call(
    plan: Plan,
    q: torch.Tensor,
    heads: tuple[int, int, int, int],
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    partial_dtype: torch.dtype,
    draft_masks: torch.Tensor | None,
) -> Workspace:
    """The buffers for this call alone, with the plan and the slots of ``batch``: ``req_to_token``,
    ``rows`` and ``seq_lens``. ``heads``: query and KV heads, head dims of K and V."""
    num_queries = q.shape[0] // plan.draft_tokens
    if num_queries != plan.num_queries:
        raise ValueError(f"the plan is for {plan.num_queries} queries, q has {num_queries}")
    lens = per_query("seq_lens", batch[2], num_queries)
    if not plan.fits(lens.data_ptr(), num_queries):
        raise ValueError(
            f"the plan was made for other lengths than {lens.tolist()[:8]}...: every length "
            f"must lie in its [min_seq_lens, max_seq_lens]; make a new plan"
        )
    target = Target.h200(  # of its fields only the sizes are used
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        v_head_dim=heads[3],
        draft_tokens=plan.draft_tokens,
        max_queries=max(1, plan.num_queries),
        max_items=max(1, plan.num_items, plan.num_queries),
        max_partials=max(1, plan.num_partials),
        max_segments=plan.num_segments,
        max_branch_tokens=plan.branch_tokens,
    )
    workspace = Workspace(
        target,
        max(1, batch[0].shape[1]),
        q.device,
        list_tokens=max(1, plan.list_tokens),
        partial_dtype=partial_dtype,
        draft_masks=draft_masks is not None,
    )
    if draft_masks is not None:
        workspace.set_draft_masks(draft_masks)
    workspace.load(plan)
    workspace.snapshot(*batch)
    return workspace


def _address(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and outer strides, in elements."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


class Executor:
    """``decode`` with what stays the same over the layers of a step, for SGLang's backend.

    ``table``: ``req_to_token``. On a GPU there is a ``workspace``, so that a CUDA graph that
    captured ``snapshot`` and ``decode`` runs whatever plan was loaded before the replay.
    ``draft_masks``: the draft tokens of a query may be a tree.
    """

    def __init__(
        self,
        target: Target,
        table: torch.Tensor,
        workspace: Workspace | None = None,
        *,
        draft_masks: bool = False,
    ) -> None:
        self.target = target
        self.has_draft_masks = draft_masks
        self._table = table
        self._workspace = workspace
        self._plan: Plan | None = None
        self._batch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._draft_masks: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget the plan, since the workspace's memory has lost its contents; waits for the
        device, so that what comes next may run on any stream."""
        self._plan = self._batch = None
        if self._workspace is not None:
            self._workspace.reset()
            torch.cuda.synchronize(self._workspace.device)

    def load(self, plan: Plan, num_rows: int, *, list_on_host: bool = False) -> None:
        """Take the plan of the next step, as ``Workspace.load``, for a batch of ``num_rows``: rows
        beyond the plan's queries are padding, on a GPU only. No graph captures this."""
        if self._workspace is not None:
            self._workspace.load(plan, list_on_host=list_on_host)
            self._workspace.check_rows(num_rows)
        self._plan = plan

    def snapshot(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Read what the loaded plan needs of the table, for ``rows`` and ``seq_lens`` [B] on the
        device. Capturable. On a GPU all reads of the table end here, before the attention begins:
        under overlap its rows may be another request's by then."""
        if self._workspace is not None:
            self._workspace.snapshot(self._table, rows, seq_lens)
        self._batch = (rows, seq_lens)

    def read_draft_masks(
        self, custom_mask: torch.Tensor, seq_lens: torch.Tensor, *, with_prefix: bool
    ) -> None:
        """The draft masks of the next step, as ``draft_masks.masks_of`` takes them."""
        if self._workspace is not None:
            self._workspace.read_draft_masks(custom_mask, seq_lens, with_prefix=with_prefix)
        else:
            tokens = self.target.draft_tokens
            self._draft_masks = masks_of(custom_mask, seq_lens, tokens, with_prefix=with_prefix)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        **options: Any,
    ) -> None:
        """Attention of one layer; ``options``: others of ``ops.decode``."""
        if self._plan is None or self._batch is None:
            raise RuntimeError("decode() before load() and snapshot()")
        decode(
            q,
            k_cache,
            v_cache,
            self._table,
            *self._batch,
            self._plan,
            out=out,
            draft_masks=self._draft_masks,
            workspace=self._workspace,
            **options,
        )
