# SPDX-License-Identifier: Apache-2.0
"""The attention backend: SGLang's own for the device, with plain decode replaced.

A subclass rather than a wrapper: whatever SGLang asks of a backend beside decode is answered by
the base, and a layer that is not ours is one ``super()`` call away.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import ops, refusals
from sglang_pat.check import check_plan
from sglang_pat.config import PatConfig
from sglang_pat.hook import LiveBatch, Mailbox
from sglang_pat.metrics import Reporter
from sglang_pat.stats import Stats
from sglang_pat.step import StepPlanner
from sglang_pat.target import Target

if TYPE_CHECKING:
    from sglang_pat.planning import Plan

logger = logging.getLogger("sglang_pat")


class PatDecodeMixin:
    """Plain decode by pack, forward and merge, in front of a base of SGLang."""

    # Of the base.
    req_to_token_pool: Any
    token_to_kv_pool: Any
    swa_out_cache_loc: torch.Tensor | None

    def __init__(self, runner: Any, config: PatConfig) -> None:
        super().__init__(runner)  # type: ignore[call-arg]
        self._config = config
        self._mailbox = Mailbox.on(runner)
        self._target = _target_of(runner, config)
        self._stats = Stats()
        self._steps = StepPlanner(self._target, self._stats)
        self._plan: Plan | None = None
        self._layers: dict[int, str] = {}
        self._reporter = _start_reporter(self._stats)
        logger.info(
            "sglang_pat serves decode on %s over %s: %d query heads, %d KV heads, head dim %d, "
            "%d threads, up to %d requests; %s",
            runner.device,
            type(self).__mro__[2].__name__,
            self._target.num_q_heads,
            self._target.num_kv_heads,
            self._target.head_dim,
            self._target.units,
            self._target.max_queries,
            config,
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the base, and for a plain decode batch the plan."""
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        batch = self._mailbox.take()
        self._plan = None
        mode = forward_batch.forward_mode
        if not mode.is_decode():
            self._stats.fall_back(mode.name.lower(), level=logging.INFO)
        elif forward_batch.spec_info is not None:
            self._stats.fall_back("speculative decoding")
        elif forward_batch.encoder_lens is not None:
            self._stats.fall_back("encoder lengths in the batch")
        else:
            self._plan = self._plan_decode(forward_batch, batch)

    def _plan_decode(self, forward_batch: Any, batch: LiveBatch | None) -> Plan | None:
        if batch is None:  # warm-up forwards are made without the scheduler
            self._stats.fall_back("no batch from the scheduler", level=logging.INFO)
            return None
        rows = forward_batch.req_pool_indices.to(torch.int64).contiguous()
        seq_lens = forward_batch.seq_lens.to(torch.int64).contiguous()
        plan = self._steps.plan(batch, rows, seq_lens)
        if plan is not None and self._config.check:
            table = self.req_to_token_pool.req_to_token
            check_plan(plan, batch.reqs, self._steps.view, table, rows)
        return plan

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer of a decode step: q [B, Hq * D] -> [B, Hq * Dv]; k, v [B, Hkv, D or Dv]."""
        plan = self._plan
        reason = None if plan is None else self._reason_against(layer, q, kwargs)
        if plan is None or reason:
            if reason:
                self._stats.fall_back(f"layer with {reason}")
            return super().forward_decode(  # type: ignore[misc, no-any-return]
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, self._write_loc(forward_batch), k, v)
        heads = layer.tp_q_head_num
        out = q.new_empty((q.shape[0], heads * layer.v_head_dim))
        ops.decode(
            q.reshape(-1, heads, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            plan,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            out=out.view(-1, heads, layer.v_head_dim),
            partial_dtype=self._config.partial_dtype,
        )
        return out

    def _write_loc(self, forward_batch: Any) -> Any:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        return KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)

    def _reason_against(self, layer: Any, q: torch.Tensor, kwargs: dict[str, Any]) -> str:
        """Why a layer is the base's, or "". The layer's own part is worked out once."""
        if kwargs:
            return f"arguments {', '.join(sorted(kwargs))}"
        reason = self._layers.get(layer.layer_id)
        if reason is None:
            reason = refusals.reason_against_layer(
                layer,
                q.dtype,
                self.token_to_kv_pool,
                self._target,
            )
            self._layers[layer.layer_id] = reason
        return reason


def make_pat_backend(runner: Any) -> Any:
    """Make the backend of a model runner, or refuse.

    Raises RuntimeError with all reasons against serving this model in this configuration, each with
    the way out, and ValueError for an ``SGLANG_PAT_*`` variable that is not known.
    """
    config = PatConfig.from_env()
    refusals.refuse_unsafe(runner)
    base = _base_class()
    if runner.is_draft_worker:
        return base(runner)  # drafts do not go through the scheduler's batches
    return _subclass(base)(runner, config)


def _base_class() -> type:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend  # type: ignore[no-any-return]


@lru_cache
def _subclass(base: type) -> type:
    return type(f"Pat{base.__name__}", (PatDecodeMixin, base), {})


def _target_of(runner: Any, config: PatConfig) -> Target:
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel().attn_tp_size
    model = runner.model_config
    return Target.cpu(
        threads=torch.get_num_threads(),
        num_q_heads=model.num_attention_heads // ranks,
        num_kv_heads=model.get_num_kv_heads(ranks),
        head_dim=model.head_dim,
        max_queries=runner.req_to_token_pool.size,
        kv_bytes=runner.kv_cache_dtype.itemsize,
        partial_bytes=config.partial_dtype.itemsize,
        policy=config.policy,
        split=config.split,
    )


def _start_reporter(stats: Stats) -> Reporter:
    """Report as SGLang does: from the first tensor-parallel rank, unless told to from all."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel, options = get_parallel(), get_observability()
    export = options.enable_metrics and (
        parallel.attn_tp_rank == 0 or options.enable_metrics_for_all_schedulers
    )
    labels = {"tp_rank": str(parallel.tp_rank), "pp_rank": str(parallel.pp_rank)}
    reporter = Reporter(stats, labels, export=export)
    reporter.start()
    return reporter
