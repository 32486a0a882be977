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
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

from sglang_pat.config import PatConfig
from sglang_pat.srt import upstream
from sglang_pat.srt.base import prefill_attention
from sglang_pat.srt.check import check_plan
from sglang_pat.srt.dump import make_tap
from sglang_pat.srt.forward import Forward, Phase, beyond_workspace, no_memory
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.layer_mixin import LayerMixin
from sglang_pat.srt.lengths import Lengths, lengths_of
from sglang_pat.srt.pipeline import micro_batches
from sglang_pat.srt.reporting import start_reporter
from sglang_pat.srt.routes import LayerRoutes
from sglang_pat.srt.scales import CapturedScales
from sglang_pat.srt.sizing import make_executor
from sglang_pat.srt.step import StepPlanner
from sglang_pat.srt.step_clock import StepClock
from sglang_pat.stats import Stats

if TYPE_CHECKING:
    from sglang_pat.planner import Plan
    from sglang_pat.srt.survey import Survey

logger = logging.getLogger("sglang_pat")


class PatDecodeMixin(LayerMixin):
    """Plain decode by pack, forward and merge, in front of a base of SGLang."""

    req_to_token_pool: Any  # of the base

    def __init__(
        self,
        runner: Any,
        config: PatConfig,
        survey: Survey | None = None,
        *,
        packs: bool = True,
        **base_arguments: Any,
    ) -> None:
        """``survey``: of the model's layers; those it lacks are decided when they come by.
        ``packs``: whether a step may share anything on this server."""
        super().__init__(runner, **base_arguments)  # type: ignore[call-arg]
        self._config = config
        self._batches = upstream.batches_of(runner)
        self._executor = make_executor(runner, config)
        self._target = self._executor.target
        self._stats = Stats()
        self._steps = StepPlanner(self._target, self._stats, micro_batches())
        self._steps.tap = make_tap(runner, config, self._target)
        self._clock = StepClock(on_gpu=runner.device == "cuda")
        self._forward = Forward()
        self._scales = CapturedScales()
        self._captured = {}
        reporter = start_reporter(self._stats, serving=packs)
        self._layers = LayerRoutes(survey, self._target, reporter)
        logger.info(
            "sglang_pat: %s on pat, prefill on SGLang's own attention (%s), as intended; "
            "%d query heads, %d KV heads, head dim %d, up to %d requests on %d %s; %s",
            "decode runs" if self._target.draft_tokens == 1 else "verification of drafts runs",
            prefill_attention(runner, type(self).__bases__[1]),
            self._target.num_q_heads,
            self._target.num_kv_heads,
            self._target.head_dim,
            self._target.max_queries,
            self._target.num_sms,
            "threads" if runner.device == "cpu" else "SMs",
            config,
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward without a graph: the plan for a decode batch that pat admits, and the
        base unless pat serves every layer of it."""
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
            why = beyond_workspace(requests, room)
            self._stats.fall_back("batch beyond the workspace", why)
            return False
        self._clock.start()
        plan = self._steps.plan(batch, self._lengths(forward_batch, batch))
        if plan is None:
            return False
        try:
            self._load(plan, batch, forward_batch)
        except torch.cuda.OutOfMemoryError as error:
            why = no_memory(plan, "SGLang's attention serves them")
            self._stats.fall_back("no memory for the slots", f"{why}: {error}")
            return False
        return True

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture or a replay of a decode graph: our plan, and the base in a capture,
        for a batch that is not admitted, or where it serves a layer of the graph.

        What a graph runs was decided when it was captured, by its rows. A graph of fewer than
        ``min_batch`` rows is the base's alone. One of which pat served a layer has no other way to
        run, so every replay of it loads a plan for its batch: one that shares, or else nothing, or
        else ``StepPlanner.longest``, without which no layer is served in the capture. Where the GPU
        has no memory for a longer list, the host has. ``forward_batch`` holds the graph's buffers,
        of which the last ``num_padding`` rows are not requests.
        """
        if self._forward.in_base:
            super().init_forward_metadata_out_graph(forward_batch)  # type: ignore[misc]
            return
        self._forward = Forward(Phase.CAPTURE if in_capture else Phase.REPLAY)
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
        rows, max_context = forward_batch.batch_size, self.req_to_token_pool.req_to_token.shape[1]
        longest = self._steps.longest(rows, max_context)
        plan = self._steps.private(self._lengths(forward_batch, None))
        if longest is not None and plan is not None:
            self._forward.captured = longest
            self._load(plan, None, forward_batch)

    def _plan_replay(self, batch: LiveBatch | None, forward_batch: Any) -> None:
        self._clock.start()
        self._scales.check()  # graphs hold scales: raises if a weight update has changed one
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
        self._count_base_layers()  # a replay does not come by forward_decode
        self._load(plan, batch, forward_batch)

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
        """The lengths that the step is planned with; ``batch``: None if the scheduler gave none."""
        return lengths_of(forward_batch)

    def _count_base_layers(self) -> None:
        for reason in self._layers.of_base:
            self._stats.base_layer(reason)

    def _admit(self, forward_batch: Any, batch: LiveBatch | None) -> bool:
        """Admit a plain decode batch of enough rows, which pat can plan for; count any other by
        reason. Returns whether it was admitted. ``batch``: None where there is none to plan."""
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
        """Count a forward of a mode that pat does not serve by the one that the scheduler meant:
        a prefill may hold decodes."""
        capture = self._forward.phase is Phase.CAPTURE
        scheduled = "" if capture else self._batches.scheduled_mode
        self._stats.other_forward(scheduled or forward_batch.forward_mode.name)

    def _admit_rows(self, forward_batch: Any, batch: LiveBatch | None) -> bool:
        """Admit a batch of the right kind if it has enough rows and pat serves a layer; to replay
        a graph, if pat served one in its capture."""
        phase, rows = self._forward.phase, forward_batch.batch_size
        if phase is Phase.REPLAY and rows in self._captured:
            return True
        if self._layers.none_is_ours:
            self._count_base_layers()  # there is nothing to plan for
        elif rows >= self._config.min_batch:
            if phase is not Phase.REPLAY:
                return True
            self._stats.fall_back("batch not plannable")  # nor was it in the capture
        elif phase is not Phase.CAPTURE:  # too few requests to gain from sharing
            self._stats.small_batch(0 if batch is None else len(batch.reqs))
        return False

    def _load(self, plan: Plan, batch: LiveBatch | None, forward_batch: Any) -> None:
        """Make ``plan`` the one that the layers run. Without a ``batch`` nothing is timed or
        checked. Without a graph the snapshot is taken, too, which graphs have captured."""
        rows, eager = forward_batch.batch_size, self._forward.phase is Phase.EAGER
        try:
            self._executor.load(plan, rows)
        except torch.cuda.OutOfMemoryError as error:
            if eager:  # the base can serve it
                raise
            why = no_memory(plan, "they are in the host's, which is slower")
            self._stats.fall_back("no memory for the slots", f"{why}: {error}")
            self._executor.load(plan, rows, list_on_host=True)
        if eager:
            self._snapshot(forward_batch)
        self._forward.served = True
        if batch is None:
            return
        hidden = self._steps.made and self._clock.is_hidden()
        self._stats.host_time(self._clock.elapsed_ns(), made=self._steps.made, hidden=hidden)
        if self._config.check:
            table = self.req_to_token_pool.req_to_token
            check_plan(plan, batch.reqs, self._steps.view, table, batch.rows)


@lru_cache
def extend(base: type, mixin: type = PatDecodeMixin) -> type:
    """The class of a backend of SGLang with what ``mixin`` serves replaced; ``PatDecodeMixin`` says
    what its constructor takes beside the base's arguments."""
    return type(f"Pat{base.__name__}", (mixin, base), {})
