# SPDX-License-Identifier: Apache-2.0
"""Device memory of the CUDA executor: one per server, shared by all layers and graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from sglang_pat import _C
from sglang_pat.capacity import ROOM, buffer_shapes
from sglang_pat.draft_masks import check_custom_mask, check_draft_masks
from sglang_pat.planner import Plan
from sglang_pat.target import LATENT_DIMS, Target

LAUNCHES = _C.LAUNCHES
LIST_TOKENS = 1 << 20  # of a workspace that is not told otherwise: 4 MB
_STAGINGS = 3  # pinned buffers through which plans go to the device


def require_kernels() -> None:
    """Raise ValueError if the extension has no CUDA kernels."""
    if not hasattr(_C, "decode_cuda"):
        raise ValueError(
            "this sglang_pat was built without CUDA kernels: install it with PAT_CUDA=ON"
        )


def check_dims(head_dim: int, v_head_dim: int) -> None:
    """Raise ValueError for head dims of K and V that no CUDA kernel has together."""
    if head_dim != v_head_dim and (head_dim, v_head_dim) != LATENT_DIMS:
        raise ValueError(
            f"V has head dim {v_head_dim}, K {head_dim}: must be alike on CUDA, or 512 and 576; "
            "the CPU executor takes others"
        )


def check_partial_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype that partial outputs cannot have."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"partial_dtype is {dtype}, must be float32 or bfloat16")


class Workspace:
    """Buffers that plans for ``target`` are executed in: plan, list of slots, partial results.

    Once a step: ``load`` the plan, then ``snapshot`` the slots; then ``decode`` every layer with
    ``workspace=``. A captured CUDA graph serves every plan that is loaded later: no address changes
    but that of the list, which the kernels read from the plan's header. All calls of one workspace
    belong on one stream, or on streams that wait for each other. Not thread-safe. It may be dropped
    while a graph is captured: its pinned memory is freed when the next workspace is made.

    ``max_context``: tokens of the longest sequence. ``list_tokens``: tokens that the list has room
    for at first; it grows when a plan needs more. ``region``: gives the context in which device
    memory is allocated, now and later. ``partial_dtype``: fp32, or bf16 for partial
    outputs of 2 bytes, then of q's dtype. ``launch``: ``queue`` (one persistent kernel)
    or ``streams`` (one kernel a row tile, side by side).
    ``draft_masks``: the draft tokens of a query may be a tree: ``set_draft_masks`` or
    ``read_draft_masks`` before a step. ``check``: read through every plan that is loaded, also
    those of this process's planner, of which otherwise the sizes alone are looked at.

    Takes ``nbytes`` on the device (``capacity.buffer_shapes``): 4 * list_tokens for the slots and,
    with fp32 partials, 4 * max_partials * draft_tokens * Hq * Dv for the partial outputs, which is
    most of it. With ``draft_masks`` 8 * max_queries * draft_tokens more.
    Raises ValueError for arguments that make no sense, and torch's OutOfMemoryError.
    """

    def __init__(
        self,
        target: Target,
        max_context: int,
        device: torch.device | str | int = "cuda",
        *,
        list_tokens: int = LIST_TOKENS,
        partial_dtype: torch.dtype = torch.float32,
        launch: str = "queue",
        draft_masks: bool = False,
        check: bool = False,
        region: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        check_dims(target.head_dim, target.v_head_dim)
        require_kernels()
        self.device = torch.empty(0, device=device).device  # with its index
        if self.device.type != "cuda":
            raise ValueError(f"a workspace is on a CUDA device, not on {self.device}")
        check_partial_dtype(partial_dtype)
        if launch not in LAUNCHES:
            raise ValueError(f"launch is {launch!r}, must be one of {', '.join(LAUNCHES)}")
        for name, tokens in (("max_context", max_context), ("list_tokens", list_tokens)):
            if tokens < 1:
                raise ValueError(f"{name} is {tokens}, must be 1 or more")
        self.target = target
        self.max_context = max_context
        shapes = buffer_shapes(
            target.draft_tokens * target.num_q_heads,
            target.v_head_dim,
            list_tokens,
            partial_dtype,
            {name: getattr(target, name) for name in ROOM},
        )
        if draft_masks:
            shapes["draft_masks"] = ((target.max_queries, target.draft_tokens), torch.int64)
        self._region = region
        self._check = check
        with torch.cuda.device(self.device), region():
            self._buffers = {
                name: torch.empty(shape, dtype=dtype, device=self.device)
                for name, (shape, dtype) in shapes.items()
            }
        self._host_list: torch.Tensor | None = None
        self.partials = self._buffers["partials"]
        self.partial_lse = self._buffers["partial_lse"]
        self.queue = self._buffers["queue"]
        self._draft_masks = self._buffers.get("draft_masks")
        # The addresses and sizes that every launch needs, once: they never change.
        self.bound = _C.CudaBuffers(
            **{
                name: self._buffers[name].data_ptr()
                for name in ("plan", "row_masks", "partials", "partial_lse", "queue", "first_units")
            },
            partial_bytes=self.partials.element_size(),
            launch=LAUNCHES[launch],
            draft_masks=0 if self._draft_masks is None else self._draft_masks.data_ptr(),
            target=target.native,
        )
        with torch.cuda.device(self.device):
            self._staging = _C.PlanStaging(self._buffers["plan"].nbytes, _STAGINGS)
        self.plan: Plan | None
        self.reset()

    @property
    def has_draft_masks(self) -> bool:
        """Whether it is for draft tokens that may be a tree."""
        return self._draft_masks is not None

    def set_draft_masks(self, masks: torch.Tensor) -> None:
        """What the draft tokens of the queries at hand attend to, int64 [B, T], as ``decode`` takes
        it: from here on in the current stream. Raises ValueError for a workspace without masks, or
        masks of another shape, dtype or device."""
        held = self._masks_of_trees()
        rows = min(masks.shape[0], len(held)) if masks.dim() else 0
        check_draft_masks(masks, self.device, rows, self.target.draft_tokens)
        held[:rows].copy_(masks)

    def read_draft_masks(
        self, custom_mask: torch.Tensor, seq_lens: torch.Tensor, *, with_prefix: bool
    ) -> None:
        """``set_draft_masks`` of the masks that serving engines give, a byte a cell: arguments as
        of ``draft_masks.masks_of``, on the workspace's device. One kernel. Raises ValueError as
        these do."""
        held, tokens = self._masks_of_trees(), self.target.draft_tokens
        check_custom_mask(custom_mask, seq_lens, tokens, with_prefix=with_prefix)
        if custom_mask.device != self.device:
            raise ValueError(f"custom_mask is on {custom_mask.device}, must be on {self.device}")
        if len(seq_lens) > len(held):
            raise ValueError(f"draft masks of {len(seq_lens)} queries, at most {len(held)} fit")
        with torch.cuda.device(self.device):
            _C.read_draft_masks_cuda(
                cells=custom_mask.data_ptr(),
                num_cells=len(custom_mask),
                seq_lens=(seq_lens.data_ptr() if with_prefix else 0, seq_lens.element_size()),
                num_rows=len(seq_lens),
                draft_tokens=tokens,
                masks=held.data_ptr(),
                stream=torch.cuda.current_stream().cuda_stream,
            )

    def _masks_of_trees(self) -> torch.Tensor:
        if self._draft_masks is None:
            raise ValueError(
                "this workspace is for chains of draft tokens: make it with draft_masks=True"
            )
        return self._draft_masks

    def reset(self) -> None:
        """Hold no plan and what the kernels expect before the first one, in the current stream.

        For a workspace whose memory was given back and mapped anew (SGLang's memory saver): the
        addresses are the same, the contents are lost.
        """
        # Zeros are an empty plan; the kernels expect and leave zeros in the queue; and of a branch
        # they may read the row masks of a whole KV tile, beyond the tokens of a step.
        for name in ("plan", "queue", "row_masks"):
            self._buffers[name].zero_()
        self.plan = None

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def list_tokens(self) -> int:
        """Tokens that the list has room for."""
        return len(self._buffers["list"])

    def load(self, plan: Plan, *, list_on_host: bool = False) -> bool:
        """Make ``plan`` the one that ``snapshot`` and ``decode`` run, from here on in the current
        stream: one copy to the device, none for the plan that is loaded already. Returns whether
        it copied: then outputs are wrong until ``snapshot`` has run. Not while a graph is captured,
        where the plan of the capture would be replayed.

        ``list_on_host``: this plan's list is in pinned memory of the host, where kernels read it
        all the same, but slower: for a GPU without memory for it.

        Raises ValueError, saying what was given and what fits, for a plan that is damaged, for
        other heads or larger than the buffers; and torch's OutOfMemoryError for a plan whose list
        is longer than the memory left. The plan before is then still loaded.
        """
        if plan is self.plan:
            return False
        _C.check_plan_cuda(
            plan=plan.data_ptr,
            plan_bytes=plan.nbytes,
            target=self.target.native,
            max_bytes=self._buffers["plan"].nbytes,
            max_context=self.max_context,
            max_list_tokens=max(self.list_tokens, plan.list_tokens),
            # The planner's plans are sound; what else is given as a plan may be anything.
            made=None
            if self._check or not isinstance(plan, Plan)
            else (plan.last_token, plan.most_rows),
        )
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            held = self._buffers["list"]
            fitting = (self._list_on_host if list_on_host else self._fitting_list)(plan.list_tokens)
            to = self._buffers["plan"].data_ptr()
            self._staging.copy(
                plan.data_ptr, plan.nbytes, to, fitting.data_ptr(), stream.cuda_stream
            )
            if fitting is not held and not list_on_host:
                # Kernels that were launched before may still read it, those after the copy do not.
                held.record_stream(stream)
                self._buffers["list"] = fitting
        self.plan = plan
        return True

    def _fitting_list(self, needed: int) -> torch.Tensor:
        """The list, or a longer one for a plan that lists ``needed`` tokens: with a quarter more
        for those to come, where there is memory for it."""
        held = self._buffers["list"]
        if needed <= len(held):
            return held
        try:
            return self._empty_list(needed + needed // 4)
        except torch.cuda.OutOfMemoryError:
            return self._empty_list(needed)

    def _empty_list(self, tokens: int) -> torch.Tensor:
        with self._region():
            return torch.empty(tokens, dtype=torch.int32, device=self.device)

    def _list_on_host(self, needed: int) -> torch.Tensor:
        if self._host_list is None or len(self._host_list) < needed:
            torch.cuda.synchronize(self.device)  # kernels may still read the one before
            self._host_list = torch.empty(needed, dtype=torch.int32, device="cpu", pin_memory=True)
        return self._host_list

    def snapshot(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> None:
        """Copy the slots of all tokens that the loaded plan reads, tell its device copy how long
        its items are in this step, and write down what each SM begins with. Capturable.

        Args:
            req_to_token: int32 [R, <= max_context], slot of each token of each row.
            rows: int32 or int64 [B], the row of ``req_to_token`` that query i reads.
            seq_lens: int32 or int64 [B], tokens of query i.

        B may exceed the plan's queries (a padded batch): the rows beyond are not read. The values
        of ``rows`` and ``seq_lens`` are read on the device, unchecked: a row that is not below R is
        read all the same, and so are tokens of the plan beyond the table's width. Of a tail that is
        longer than the plan holds for the list gets the tokens that it has room for.

        Raises ValueError for a wrong dtype, shape, stride or device, and for B smaller than the
        plan's queries or larger than the target's.
        """
        num_rows = self.check_batch(req_to_token, rows, seq_lens)
        with torch.cuda.device(self.device):
            _C.snapshot_cuda(
                self.bound,
                req_to_token=(
                    req_to_token.data_ptr(),
                    req_to_token.stride(0),
                    req_to_token.shape[1],
                ),
                rows=(rows.data_ptr(), rows.element_size()),
                seq_lens=(seq_lens.data_ptr(), seq_lens.element_size()),
                num_rows=num_rows,
                stream=torch.cuda.current_stream().cuda_stream,
            )

    def check_batch(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> int:
        """Check the arguments of ``snapshot`` and give B."""
        for name, tensor, dims, dtypes in (
            ("req_to_token", req_to_token, 2, ("int32",)),
            ("rows", rows, 1, ("int32", "int64")),
            ("seq_lens", seq_lens, 1, ("int32", "int64")),
        ):
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, the workspace on {self.device}")
            if tensor.dim() != dims or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, must "
                    f"have {dims} dimensions, the last of stride 1"
                )
            if str(tensor.dtype).removeprefix("torch.") not in dtypes:
                raise ValueError(f"{name} is {tensor.dtype}, must be {' or '.join(dtypes)}")
        if rows.shape != seq_lens.shape:
            raise ValueError(f"{len(rows)} rows and {len(seq_lens)} seq_lens: need one of each")
        if req_to_token.shape[1] > self.max_context:
            raise ValueError(
                f"req_to_token has {req_to_token.shape[1]} tokens a row, the workspace holds "
                f"{self.max_context}: make it for a larger max_context"
            )
        self.check_rows(len(rows))
        return len(rows)

    def check_rows(self, num_rows: int) -> None:
        """Raise ValueError unless a batch of ``num_rows`` holds the plan and fits."""
        planned = 0 if self.plan is None else self.plan.num_queries
        if not planned <= num_rows <= self.target.max_queries:
            raise ValueError(
                f"a batch of {num_rows}: the loaded plan has {planned} queries and the workspace "
                f"room for {self.target.max_queries}; plan for this batch, or make the workspace "
                f"for a target of larger max_queries"
            )
