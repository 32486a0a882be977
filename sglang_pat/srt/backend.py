# SPDX-License-Identifier: Apache-2.0
"""The attention backend: SGLang's own for the device, with plain decode replaced, or on a server
that speculates the verification of drafts.

A subclass rather than a wrapper: whatever SGLang asks of a backend beside decode is answered by the
base, and a layer that is not ours is one ``super()`` call away. ``S``: SGLang 0.5.23's ``srt/``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_pat.config import PatConfig
from sglang_pat.ops import Executor
from sglang_pat.planner import Plan
from sglang_pat.srt.dump import make_tap
from sglang_pat.srt.hook import LiveBatch, batches_of
from sglang_pat.srt.layers import LayerRoutes, reads_latents
from sglang_pat.srt.metrics import start_reporter
from sglang_pat.srt.radix import check_plan
from sglang_pat.srt.step import (
    MAX_SLACK,
    Lengths,
    StepClock,
    StepPlanner,
    bounds_of,
    lengths_of,
    micro_batches,
)
from sglang_pat.srt.support import E4M3
from sglang_pat.stats import Stats

logger = logging.getLogger("sglang_pat")


@dataclass(slots=True, eq=False)
class Forward:
    """How one forward is served, from its preparation to its last layer."""

    phase: Literal["eager", "capture", "replay"] = "eager"
    served: bool = False  # pat has a plan for it, so its layers run on pat
    captured: Plan | None = None  # in a capture, the plan that any replay can fall back to
    unprepared: Any = None  # the batch, until the base prepares it: at the first layer of its own
    in_base: bool = False  # the base prepares it; some bases call the methods of graphs for that


def scales_of(layer: Any) -> tuple[float, float]:
    """What the values of a layer's K and V in fp8_e4m3 are multiplied by: on the host, beside the
    tensors with which the pool writes; None without scales (S layers/radix_attention.py:94)."""
    k, v = layer.k_scale_float, layer.v_scale_float
    return 1.0 if k is None else k, 1.0 if v is None else v


def _parts(
    q: torch.Tensor, q_rope: torch.Tensor | None, layer: Any, *, latents: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The queries of a layer by head: [rows, heads, D]; with ``latents`` [rows, heads, Dv], and
    [rows, heads, D - Dv] of their rope parts. Views: nothing is copied."""
    heads, dim, latent = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim
    if q_rope is not None:
        return q.view(-1, heads, latent), q_rope.view(-1, heads, dim - latent)
    q = q.reshape(-1, heads, dim)
    return (q[..., :latent], q[..., latent:]) if latents else (q, None)


class PatDecodeMixin:
    """Plain decode by pack, forward and merge, in front of a base of SGLang."""

    req_to_token_pool: Any  # these two are of the base
    token_to_kv_pool: Any

    def __init__(
        self,
        runner: Any,
        config: PatConfig,
        executor: Executor,
        survey: dict[int, str],
        *,
        packs: bool = True,
        **base_arguments: Any,
    ) -> None:
        """``survey``: of ``LayerRoutes``. ``packs``: whether a step may share anything."""
        super().__init__(runner, **base_arguments)  # type: ignore[call-arg]
        self._config = config
        self._batches = batches_of(runner)
        self._executor = executor
        self._target = executor.target
        self._stats = Stats()
        self._steps = StepPlanner(self._target, self._stats, micro_batches())
        self._steps.tap = make_tap(runner, config, self._target)
        self._clock = StepClock(on_gpu=runner.device == "cuda")
        self._forward = Forward()
        # By its rows, of each graph that has captured a layer of ours: a plan for any batch of it.
        self._captured: dict[int, Plan] = {}
        # By its id, each layer with scales of a graph: they are parameters of the graph's launches.
        self._scaled: dict[int, tuple[Any, tuple[float, float]]] = {}
        self._layers = LayerRoutes(survey, self._target, start_reporter(self._stats, serving=packs))
        logger.info(
            "sglang_pat: %s on pat, prefill on SGLang's own attention (%s), always; "
            "%d query heads, %d KV heads, up to %d requests; %s",
            "decode runs" if self._target.draft_tokens == 1 else "verification of drafts runs",
            runner.prefill_attention_backend_str,
            self._target.num_q_heads,
            self._target.num_kv_heads,
            self._target.max_queries,
            config,
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward without a graph: our plan, and the base unless all layers are ours."""
        self._forward = Forward()
        batch = self._batches.take(forward_batch)
        planned = self._admit(forward_batch, batch) and self._plan_eager(batch, forward_batch)
        # The base's metadata take host and device time.
        if planned and self._layers.all_are_ours:
            self._forward.unprepared = forward_batch
        else:
            self._prepare_base(forward_batch)

    def _plan_eager(self, batch: LiveBatch | None, forward_batch: Any) -> bool:
        """Plan a decode batch and load the plan. Returns False where the base has to serve it."""
        if batch is None:  # warm-up forwards do not come from SGLang's scheduler
            self._stats.warm_up()
            return False
        requests, room = forward_batch.batch_size, self._target.max_queries
        if requests > room:
            # The pool has no more requests, but data parallel attention may pad a batch beyond it.
            why = (
                f"a batch of {requests} requests, padding included, is beyond the {room} that the "
                "server runs, so SGLang's attention serves it"
            )
            self._stats.fall_back("batch beyond the workspace", why)
            return False
        self._clock.start()
        plan = self._steps.plan(batch, self._lengths(forward_batch, batch))
        return plan is not None and self._load(plan, batch, forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture or a replay of a decode graph: our plan, and the base in a capture,
        for a batch that is not admitted, or where it serves a layer of the graph.

        What a graph runs was decided when it was captured, by its rows. One of which pat served a
        layer has no other way to run, so every replay of it loads a plan for its batch: one that
        shares, or else nothing, or else ``StepPlanner.longest``, without which no layer is served
        in the capture. ``forward_batch`` holds the graph's buffers, of which the last
        ``num_padding`` rows are not requests.
        """
        if self._forward.in_base:
            super().init_forward_metadata_out_graph(forward_batch)  # type: ignore[misc]
            return
        self._forward = Forward("capture" if in_capture else "replay")
        batch = None if in_capture else self._batches.take(forward_batch)
        admitted = self._admit(forward_batch, batch)
        if in_capture or not admitted or not self._layers.all_are_ours:
            super().init_forward_metadata_out_graph(  # type: ignore[misc]
                forward_batch, in_capture=in_capture
            )
        if admitted and in_capture:
            self._plan_capture(forward_batch)
        elif admitted:
            self._plan_replay(batch, forward_batch)

    def _plan_capture(self, forward_batch: Any) -> None:
        max_context = self.req_to_token_pool.req_to_token.shape[1]
        longest = self._steps.longest(forward_batch.batch_size, max_context)
        plan = self._steps.private(self._lengths(forward_batch, None))
        if longest is not None and plan is not None:
            self._forward.captured = longest
            self._load(plan, None, forward_batch)

    def _plan_replay(self, batch: LiveBatch | None, forward_batch: Any) -> None:
        self._clock.start()
        self._check_scales()
        count = forward_batch.batch_size - forward_batch.num_padding
        lens = self._lengths(forward_batch, batch).first(count)
        if batch is not None:
            plan = self._steps.plan(batch, lens)
        else:
            if count:  # an idle rank of data parallel attention has nothing to plan
                self._stats.fall_back("graph without a batch from the scheduler")
            plan = self._steps.private(lens)
        if plan is None:
            plan, batch = self._captured[forward_batch.batch_size], None
        self._stats.base_layer(*self._layers.of_base)  # a replay does not come by forward_decode
        self._load(plan, batch, forward_batch)

    def _check_scales(self) -> None:
        """Raise RuntimeError if a weight update has changed a scale that decode graphs hold."""
        for layer, captured in self._scaled.values():
            if scales_of(layer) != captured:
                raise RuntimeError(
                    f"sglang_pat: the K/V scales of layer {layer.layer_id} are now "
                    f"{scales_of(layer)}, but the decode graphs hold {captured}: after a weight "
                    "update that changes them, restart the server, or run it with "
                    "--disable-cuda-graph"
                )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Captured, and so replayed, between the above and the layers: the snapshot, after
        which nothing is read that the scheduler may change."""
        super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        if self._forward.served and not self._forward.in_base:
            self._snapshot(forward_batch)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """From where on SGLang may change what a forward of mode ``fm`` reads: not before the
        snapshot, as the row that a plan reads for several queries may be of one that has ended."""
        ends: SharedReadEnds = super().shared_read_ends(fm)  # type: ignore[misc]
        if fm.is_decode() or fm.is_target_verify():
            ends = SharedReadEnds.max_of((ends, SharedReadEnds.IN_REPLAY))
        return ends

    def _snapshot(self, forward_batch: Any) -> None:
        self._executor.snapshot(forward_batch.req_pool_indices, forward_batch.seq_lens)

    def _lengths(self, forward_batch: Any, batch: LiveBatch | None) -> Lengths:
        return lengths_of(forward_batch)

    def _admit(self, forward_batch: Any, batch: LiveBatch | None) -> bool:
        """Whether pat can plan for a forward, a plain decode batch of enough rows; counts any other
        by reason. ``batch``: None where the scheduler gave none."""
        if not forward_batch.forward_mode.is_decode():
            self._count_other(forward_batch)
        elif forward_batch.spec_info is not None:
            self._stats.fall_back("speculative decoding")
        elif forward_batch.encoder_lens is not None:
            self._stats.fall_back("encoder lengths in the batch")
        else:
            return self._admit_rows(forward_batch, batch)
        return False

    def _count_other(self, forward_batch: Any) -> None:
        # A prefill may hold decodes.
        scheduled = "" if self._forward.phase == "capture" else self._batches.scheduled_mode
        self._stats.other_forward(scheduled or forward_batch.forward_mode.name)

    def _admit_rows(self, forward_batch: Any, batch: LiveBatch | None) -> bool:
        """Whether a batch of the right kind has enough rows and pat serves a layer; to replay a
        graph, whether pat served one in its capture."""
        phase, rows = self._forward.phase, forward_batch.batch_size
        if phase == "replay" and rows in self._captured:
            return True
        if self._layers.none_is_ours:
            self._stats.base_layer(*self._layers.of_base)  # there is nothing to plan for
        elif rows >= self._config.min_batch:
            if phase != "replay":
                return True
            self._stats.fall_back("batch not plannable")  # nor was it in the capture
        elif phase != "capture":  # too few requests to gain from sharing
            self._stats.small_batch(0 if batch is None else len(batch.reqs))
        return False

    def _load(self, plan: Plan, batch: LiveBatch | None, forward_batch: Any) -> bool:
        """Make ``plan`` the one that the layers run. Without a ``batch`` nothing is timed or
        checked. Without a graph the snapshot is taken, too, which graphs have captured. Where the
        GPU has no memory for a longer list, the host has; without a graph the base serves the step
        instead, and this returns False."""
        eager = self._forward.phase == "eager"
        try:
            self._fill(plan, forward_batch)
            if eager:
                self._snapshot(forward_batch)
        except torch.cuda.OutOfMemoryError as error:
            so = "SGLang's attention serves them" if eager else "they are in the host's, slower"
            why = (
                f"a plan for {plan.num_queries} requests lists {plan.list_tokens} slots, for which "
                f"the GPU has no memory, so {so}; lower --mem-fraction-static: {error}"
            )
            self._stats.fall_back("no memory for the slots", why)
            if eager:
                return False
            self._fill(plan, forward_batch, list_on_host=True)
        self._forward.served = True
        if batch is not None:
            hidden = self._steps.made and self._clock.is_hidden()
            self._stats.host_time(self._clock.elapsed_ns(), made=self._steps.made, hidden=hidden)
            if self._config.check:
                table = self.req_to_token_pool.req_to_token
                check_plan(plan, batch.reqs, self._steps.view, table, batch.rows)
        return True

    def _fill(self, plan: Plan, forward_batch: Any, *, list_on_host: bool = False) -> None:
        self._executor.load(plan, forward_batch.batch_size, list_on_host=list_on_host)

    def _prepare_base(self, forward_batch: Any) -> None:
        self._forward.in_base = True
        try:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        finally:
            self._forward.in_base = False

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One layer of a decode step: q [B, Hq * D] -> [B, Hq * Dv]; k, v [B, Hkv, D or Dv]. Of
        latents (MLA) q may be [B, Hq, Dv] beside ``q_rope`` [B, Hq, D - Dv], and k and v [B, 1, Dv]
        beside ``k_rope`` [B, 1, D - Dv]."""
        out = self._attend(*args, **kwargs)
        if out is None:
            out = super().forward_decode(*args, **kwargs)  # type: ignore[misc]
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **arguments: Any,
    ) -> torch.Tensor | None:
        """One layer, or None if it is the base's, which is prepared then. ``arguments``: what the
        model gives its attention beside these."""
        served, pool = self._forward.served, self.token_to_kv_pool
        if served and (reason := self._layers.reason_against(layer, q.dtype, pool, arguments)):
            self._stats.base_layer(reason)
            served = False
        if not served:
            self._leave(forward_batch)
            return None
        captured = self._forward.captured
        if captured is not None:
            self._captured[captured.num_queries] = captured
        latents = reads_latents(self._target)
        if save_kv_cache and k is not None and v is not None:
            loc = KVWriteLoc.for_layer(forward_batch, layer)
            if not latents:
                pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
            elif (k_rope := arguments.get("k_rope")) is not None:
                pool.set_mla_kv_buffer(layer, loc, k, k_rope)
            else:
                pool.set_kv_buffer(layer, loc, k, v)
        heads = layer.tp_q_head_num
        out = q.new_empty((q.shape[0], heads * layer.v_head_dim))
        q, q_rope = _parts(q, arguments.get("q_rope"), layer, latents=latents)
        keys = pool.get_key_buffer(layer.layer_id)
        scales = (1.0, 1.0)
        if keys.dtype == E4M3:
            scales = scales_of(layer)
            # A layer without scales cannot get any.
            if captured is not None and (layer.k_scale is not None or layer.v_scale is not None):
                self._scaled[layer.layer_id] = layer, scales
        self._executor.decode(
            q,
            keys,
            pool.get_value_buffer(layer.layer_id),
            out.view(-1, heads, layer.v_head_dim),
            q_rope=q_rope,
            sinks=arguments.get("sinks"),  # a graph holds its address: weights are updated in place
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        return out

    def _leave(self, _forward_batch: Any) -> None:
        """Leave a layer to the base, and prepare it if all layers so far were ours."""
        if self._forward.unprepared is not None:
            self._prepare_base(self._forward.unprepared)
            self._forward.unprepared = None


class PatVerifyMixin(PatDecodeMixin):
    """Verification of draft tokens by pack, forward and merge, in front of a base: a request is one
    query with ``Target.draft_tokens`` tokens. SGLang sends the layers of a verify step to
    ``forward_extend``, with the draft tokens of a request as neighbouring rows of q."""

    verify_mask: Any  # of the base

    def _admit(self, forward_batch: Any, batch: LiveBatch | None) -> bool:
        mode = forward_batch.forward_mode
        if not mode.is_target_verify():
            if mode.is_decode():
                self._stats.fall_back("decode step on a server that speculates")
            else:
                self._count_other(forward_batch)
            return False
        given, planned = forward_batch.spec_info.draft_token_num, self._target.draft_tokens
        if given != planned:
            self._stats.fall_back("other draft tokens", f"{given} a request instead of {planned}")
            return False
        if self.token_to_kv_pool.device == "cpu":
            return True  # SGLang's attention on a CPU cannot verify
        return self._admit_rows(forward_batch, batch)

    def _lengths(self, forward_batch: Any, batch: LiveBatch | None) -> Lengths:
        """SGLang's lengths of a verify step do not count the draft tokens, a plan's do."""
        draft_tokens = self._target.draft_tokens
        if forward_batch.seq_lens_cpu is None and batch is not None:
            why = f"no bounds, or more than {MAX_SLACK} draft tokens"
            try:
                bounds = bounds_of(batch.reqs, draft_tokens)
            except (AttributeError, TypeError) as error:  # not requests as SGLang has them
                bounds, why = None, repr(error)
            if bounds is not None:
                return bounds
            self._stats.fall_back("lengths read from the GPU", why)
        return lengths_of(forward_batch, draft_tokens)

    def _snapshot(self, forward_batch: Any) -> None:
        with_drafts = forward_batch.seq_lens + self._target.draft_tokens
        self._executor.snapshot(forward_batch.req_pool_indices, with_drafts)

    def _fill(self, plan: Plan, forward_batch: Any, *, list_on_host: bool = False) -> None:
        """Where drafts may be a tree, their masks first: without memory for these the step is not
        served."""
        if self._executor.has_draft_masks:
            spec_info = forward_batch.spec_info
            self._executor.read_draft_masks(
                spec_info.custom_mask,
                forward_batch.seq_lens,
                with_prefix=have_prefix(spec_info, self.verify_mask),
            )
        super()._fill(plan, forward_batch, list_on_host=list_on_host)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One layer of a verify step, as in ``forward_decode`` with B * T rows; or of another
        forward, which is the base's, as is every prefill that expands latents (MLA): models verify
        on the latents themselves (S models/deepseek_common/attention_backend_handler.py:135)."""
        out = self._attend(*args, **kwargs)
        if out is None:
            out = super().forward_extend(*args, **kwargs)  # type: ignore[misc]
        return out

    def _leave(self, forward_batch: Any) -> None:
        on_cpu = self.token_to_kv_pool.device == "cpu"
        if on_cpu and forward_batch.forward_mode.is_target_verify():
            raise RuntimeError(
                "sglang_pat: could not serve a verify step, for the reason in the last warning, "
                "and SGLang's attention on a CPU has none: restart without --speculative-algorithm"
            )
        super()._leave(forward_batch)


def have_prefix(spec_info: Any, verify_mask: Any) -> bool:
    """Whether the masks of a verify step are ``with_prefix``. ``verify_mask``: the base's buffer,
    into which EAGLE's workers write them (S speculative/eagle_worker_common.py:411), or None;
    NGRAM's have a tensor of their own (S speculative/ngram_worker.py:350)."""
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
    from sglang.srt.speculative.spec_info import SpecInputType

    own = verify_mask is None or spec_info.spec_input_type == SpecInputType.NGRAM_VERIFY
    mode = default_tree_mask_mode() if own else verify_mask.mode
    full: bool = mode == TreeMaskMode.FULL_MASK
    return full


@lru_cache
def extend(base: type, mixin: type = PatDecodeMixin) -> type:
    """The class of a backend of SGLang with what ``mixin`` serves replaced."""
    return type(f"Pat{base.__name__}", (mixin, base), {})
