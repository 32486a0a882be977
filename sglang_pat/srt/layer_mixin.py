# SPDX-License-Identifier: Apache-2.0
"""The layers of a forward that was prepared: ours, or the base's."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_pat.executor import Executor
from sglang_pat.planner import Plan
from sglang_pat.srt.forward import Forward
from sglang_pat.srt.routes import LayerRoutes
from sglang_pat.srt.scales import E4M3, ONES, CapturedScales, scales_of
from sglang_pat.stats import Stats


class LayerMixin:
    """Serves the layers of a forward for which there is a plan, in front of a base of SGLang."""

    token_to_kv_pool: Any  # of the base
    _executor: Executor
    _forward: Forward
    _layers: LayerRoutes
    _scales: CapturedScales
    _stats: Stats
    # By its rows, of each graph that has captured a layer of ours: a plan for any batch of it.
    _captured: dict[int, Plan]

    def _prepare_base(self, forward_batch: Any) -> None:
        self._forward.in_base = True
        try:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        finally:
            self._forward.in_base = False

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
        out = self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        if out is not None:
            return out
        return super().forward_decode(  # type: ignore[misc, no-any-return]
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """One layer of the forward that ``_forward`` says, or None if it is the base's, which is
        prepared then."""
        served = self._forward.served
        pool = self.token_to_kv_pool
        if served and (reason := self._layers.reason_against(layer, q.dtype, pool, kwargs)):
            self._stats.base_layer(reason)
            served = False
        if not served:
            if self._forward.unprepared is not None:  # a layer that had not come by before
                self._prepare_base(self._forward.unprepared)
                self._forward.unprepared = None
            return None
        captured = self._forward.captured
        if captured is not None:
            self._captured[captured.num_queries] = captured
        if save_kv_cache and k is not None and v is not None:
            loc = KVWriteLoc.for_layer(forward_batch, layer)
            pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        heads = layer.tp_q_head_num
        out = q.new_empty((q.shape[0], heads * layer.v_head_dim))
        keys = pool.get_key_buffer(layer.layer_id)
        scales = ONES
        if keys.dtype == E4M3:
            scales = scales_of(layer)
            if captured is not None:
                self._scales.add(layer, scales)
        self._executor.decode(
            q.reshape(-1, heads, layer.qk_head_dim),
            keys,
            pool.get_value_buffer(layer.layer_id),
            out.view(-1, heads, layer.v_head_dim),
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            k_scale=scales.k,
            v_scale=scales.v,
        )
        return out
