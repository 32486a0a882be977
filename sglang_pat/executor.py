# SPDX-License-Identifier: Apache-2.0
"""Runs the plan of a decode step for the backend, layer by layer, on the device of the K/V pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from sglang_pat import ops
from sglang_pat.config import PatConfig
from sglang_pat.draft_masks import masks_of
from sglang_pat.planner import Plan
from sglang_pat.target import Target
from sglang_pat.workspace import LIST_TOKENS, Workspace


class Executor:
    """``ops.decode`` with what stays the same over the layers of a step.

    On a GPU it owns a ``Workspace``: its addresses are fixed, but for the list's, which the
    kernels read in the plan, so that a CUDA graph that captured ``snapshot`` and ``decode`` runs
    whatever plan was loaded before the replay. ``table``: ``req_to_token``. ``region``,
    ``list_tokens``, ``draft_masks``: of the ``Workspace``.
    """

    def __init__(
        self,
        target: Target,
        config: PatConfig,
        table: torch.Tensor,
        region: Callable[[], AbstractContextManager[None]] = nullcontext,
        list_tokens: int = LIST_TOKENS,
        *,
        draft_masks: bool = False,
    ) -> None:
        self.target = target
        self.has_draft_masks = draft_masks
        self._table = table
        self._workspace: Workspace | None = None
        if table.device.type == "cuda":
            # Of latents there is one kernel, whatever the policy.
            launch = config.launch if target.v_head_dim == target.head_dim else "queue"
            self._workspace = Workspace(
                target,
                table.shape[1],
                table.device,
                list_tokens=list_tokens,
                launch=launch,
                draft_masks=draft_masks,
                check=config.check,
                region=region,
            )
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
        """Take the plan of the next step, for a batch of ``num_rows``; rows beyond the plan's
        queries are padding, on a GPU only. The part of a step that no graph captures.
        ``list_on_host``, and what is raised: of ``Workspace.load``."""
        if self._workspace is not None:
            self._workspace.load(plan, list_on_host=list_on_host)
            self._workspace.check_rows(num_rows)
        self._plan = plan

    def snapshot(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Read what the loaded plan needs of SGLang's table. Capturable.

        ``rows``, ``seq_lens`` [B] on the device. All reads of the table end here, before the
        attention begins: under overlap its rows may be another request's by then.
        """
        if self._workspace is not None:
            self._workspace.snapshot(self._table, rows, seq_lens)
        self._batch = (rows, seq_lens)

    def read_draft_masks(
        self, custom_mask: torch.Tensor, seq_lens: torch.Tensor, *, with_prefix: bool
    ) -> None:
        """The draft masks of the next step, for a B that includes padding: arguments as of
        ``draft_masks.masks_of``. Raises ValueError as that does."""
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
        *,
        q_rope: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **factors: float,
    ) -> None:
        """Attention of one layer; arguments as of ``ops.decode``. ``factors``: its ``scale``,
        ``logit_cap``, ``k_scale`` and ``v_scale``."""
        if self._plan is None or self._batch is None:
            raise RuntimeError("decode() before load() and snapshot()")
        ops.decode(
            q,
            k_cache,
            v_cache,
            self._table,
            *self._batch,
            self._plan,
            q_rope=q_rope,
            draft_masks=self._draft_masks,
            sinks=sinks,
            out=out,
            workspace=self._workspace,
            **factors,  # type: ignore[arg-type]  # by name, all floats
        )
