# SPDX-License-Identifier: Apache-2.0
"""Runs the plan of a decode step for the backend, layer by layer, on the device of the K/V pool."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sglang_pat import ops
from sglang_pat.capacity import MB, Capacity, fit_workspace
from sglang_pat.config import PatConfig
from sglang_pat.planning import Plan
from sglang_pat.srt import sleep
from sglang_pat.srt.survey import heads_of
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

logger = logging.getLogger("sglang_pat")


class Executor:
    """``ops.decode`` with what stays the same over the layers of a step.

    On a GPU it owns a ``Workspace``: its addresses are fixed, so that a CUDA graph that captured
    ``snapshot`` and ``decode`` runs whatever plan was loaded before the replay. ``table``:
    ``req_to_token``. ``region``: the context to allocate the workspace in.
    """

    def __init__(
        self,
        target: Target,
        config: PatConfig,
        table: torch.Tensor,
        region: AbstractContextManager[None] | None = None,
    ) -> None:
        self.target = target
        self._table = table
        self._partial_dtype = config.partial_dtype
        self._workspace: Workspace | None = None
        if table.device.type == "cuda":
            with torch.cuda.device(table.device), region or nullcontext():
                self._workspace = Workspace(
                    target,
                    table.shape[1],
                    table.device,
                    partial_dtype=config.partial_dtype,
                    launch=config.launch,
                )
        self._plan: Plan | None = None
        self._batch: tuple[torch.Tensor, torch.Tensor] | None = None
        sleep.reset_on_wake(self)

    def reset(self) -> None:
        """Forget the plan, since the workspace's memory has lost its contents; waits for the
        device, so that what comes next may run on any stream."""
        self._plan = self._batch = None
        if self._workspace is not None:
            self._workspace.reset()
            torch.cuda.synchronize(self._workspace.device)

    def load(self, plan: Plan, num_rows: int) -> None:
        """Take the plan of the next step, for a batch of ``num_rows``; rows beyond the plan's
        queries are padding, on a GPU only. The part of a step that no graph captures."""
        if self._workspace is not None:
            self._workspace.load(plan)
            self._workspace.check_rows(num_rows)
        self._plan = plan

    def snapshot(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Read what the loaded plan needs of the scheduler's table. Capturable.

        ``rows``, ``seq_lens`` [B] on the device. All reads of the table end here, before the
        attention begins: under overlap its rows may be another request's by then.
        """
        if self._workspace is not None:
            self._workspace.snapshot(self._table, rows, seq_lens)
        self._batch = (rows, seq_lens)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        logit_cap: float,
    ) -> None:
        """Attention of one layer; arguments as of ``ops.decode``."""
        if self._plan is None or self._batch is None:
            raise RuntimeError("decode() before load() and snapshot()")
        ops.decode(
            q,
            k_cache,
            v_cache,
            self._table,
            *self._batch,
            self._plan,
            scale=scale,
            logit_cap=logit_cap,
            out=out,
            partial_dtype=self._partial_dtype,
            workspace=self._workspace,
        )


def make_executor(runner: Any, config: PatConfig) -> Executor:
    """The executor for a model runner, its target sized by the runner's pools and graphs and, on a
    GPU, by the budget of its workspace."""
    table = runner.req_to_token_pool.req_to_token
    options: dict[str, Any] = {
        **heads_of(runner)._asdict(),
        "kv_bytes": runner.kv_cache_dtype.itemsize,
        "partial_bytes": config.partial_dtype.itemsize,
        "policy": config.policy,
        "split": config.split,
    }
    if config.branching != "cost":  # else as the device's target has it
        options["branching"] = config.branching
    requests = runner.req_to_token_pool.size
    largest_graph = _largest_graph(requests)
    if table.device.type == "cpu":  # there is no workspace
        options["max_queries"] = max(requests, largest_graph)
        target = Target.cpu(threads=torch.get_num_threads(), **options)
        return Executor(target, config, table)
    capacity = fit_workspace(
        num_q_heads=options["num_q_heads"],
        head_dim=options["head_dim"],
        max_context=table.shape[1],
        pool_requests=requests,
        largest_graph=largest_graph,
        partial_dtype=config.partial_dtype,
        budget=config.workspace_mb * MB,
    )
    _announce(capacity)
    options |= {"max_queries": capacity.max_queries, "max_partials": capacity.max_partials}
    target = Target.gpu(torch.cuda.get_device_properties(table.device), **options)
    return Executor(target, config, table, sleep.kv_cache_region(runner))


def _largest_graph(pool_requests: int) -> int:
    """Queries of the largest decode graph that SGLang may capture, padding included; 0 without
    graphs. As ``get_batch_sizes_to_capture`` (S model_executor/runner/base_cuda_graph_runner.py:65)
    clamps them."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.utils import get_cuda_graph_max_batch_size

    decode = get_exec().graph.cuda_graph_config.decode
    if decode.backend == Backend.DISABLED:
        return 0
    sizes: list[int] = [*(decode.bs or ()), decode.max_bs or 0]
    captured: int = get_cuda_graph_max_batch_size(pool_requests)
    return min(max(sizes), captured)


def _announce(capacity: Capacity) -> None:
    if capacity.over_budget:
        logger.warning("sglang_pat: %s", capacity.warning())
    logger.info("sglang_pat: %s", capacity)
