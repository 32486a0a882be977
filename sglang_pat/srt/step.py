# SPDX-License-Identifier: Apache-2.0
"""Lazy update (PAT section 5.2): plan a decode step anew only if the last plan no longer holds.

A plan depends on the batch through three numbers per request, its handle: its row of
``req_to_token``, the radix node it holds and the tokens that are safe to share. Node ids are never
given out twice, not even after a flush, and splitting a node only refines paths, so equal handles
mean equal sharing. Lengths grow every step; a plan that is outgrown is made anew from the paths
that were read for it.

Reading handles costs a cache miss or six per request. So nothing is read of a batch that has been
the same, with decodes only, for more than ``SETTLE_STEPS``; and in a changed batch nothing of the
requests that have been in it that long (``csrc/srt/handles.h``). SGLang makes a new tensor of rows
whenever a batch changes, and gives a running request another node only when it has processed its
prefill, which under overlap is a step or two after it ran.

If a node changed all the same, sharing would be lost for at most ``RECHECK_STEPS``, never a result.
The slots are read anew at every step. A row is given out anew only after its request has lost it,
which changes the batch. What a released request shared, the others keep locked.

Lengths are on the host before a decode step runs. Where SGLang overlaps the scheduler with the GPU
and speculates, how many draft tokens the last verify step accepted is known on the GPU only. The
host then has bounds of each request (``kv`` in SGLang 0.5.23's ``srt/managers/schedule_batch.py``).
It knows the tokens that were committed when it last looked, at most one step ago. To these come the
draft tokens of the step to come and, at most, those of the step that it has not seen; and a request
never has more tokens than slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat import _C
from sglang_pat.planner import Plan, Planner
from sglang_pat.srt.dump import Tap
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS, RadixView
from sglang_pat.stats import NO_REQUEST, NOT_READABLE, NOT_USABLE, Stats
from sglang_pat.target import Target

logger = logging.getLogger("sglang_pat")

# Bounds further apart are not used: a plan made for the least lengths holds for as many more.
MAX_SLACK = _C.LEAST_HEADROOM


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """``least``, ``most`` [B] int64, CPU, contiguous: bounds of each query's tokens, those that it
    decodes or verifies included. The same tensor where the lengths are known."""

    least: torch.Tensor
    most: torch.Tensor

    @property
    def are_known(self) -> bool:
        return self.least is self.most

    def first(self, count: int) -> Lengths:
        """Those of the first ``count`` queries."""
        if count == len(self.least):
            return self
        least = self.least[:count]
        return Lengths(least, least if self.are_known else self.most[:count])

    def total(self, plan: Plan | None) -> int:
        """Sum of the least, -1 if there is no plan or it does not hold for all that they may be."""
        if plan is None:
            return -1
        if not self.are_known and plan.total_tokens(self.most.data_ptr(), self.most.numel()) < 0:
            return -1
        return plan.total_tokens(self.least.data_ptr(), self.least.numel())


def known(seq_lens: torch.Tensor) -> Lengths:
    """Lengths [B] int64, CPU, contiguous, that the host knows."""
    return Lengths(seq_lens, seq_lens)


def lengths_of(forward_batch: Any, added: int = 0) -> Lengths:
    """SGLang's lengths of a batch, with ``added`` tokens each. Waits for the device where the host
    has none."""
    lens: torch.Tensor | None = forward_batch.seq_lens_cpu
    if lens is None:
        lens = forward_batch.seq_lens.cpu()
    if lens.dtype != torch.int64 or not lens.is_contiguous():
        lens = lens.to(torch.int64).contiguous()
    return known(lens + added if added else lens)


def bounds_of(reqs: Sequence[Any], draft_tokens: int) -> Lengths | None:
    """Bounds of the lengths of a verify step, from what SGLang keeps of its requests; None if there
    are none, or a new plan would not hold for them."""
    owned = [req.kv for req in reqs]
    # NumPy takes a third of torch's time for so few numbers.
    least = np.array([kv.kv_committed_len for kv in owned], np.int64) + draft_tokens
    # Slots come in whole pages: they may be for many more tokens than the two steps can add.
    slots = np.array([kv.kv_allocated_len for kv in owned], np.int64)
    most = np.minimum(slots, least + draft_tokens)
    slack = most - least
    if slack.size and not (slack.min() >= 0 and slack.max() <= MAX_SLACK):
        return None
    return Lengths(torch.from_numpy(least), torch.from_numpy(most))


@dataclass(slots=True, eq=False)
class MicroBatch:
    """What is remembered of one micro-batch: the batch of its last step, what was read of it, and
    the plan. The planner and its working memory are this micro-batch's alone."""

    planner: Planner
    view: RadixView
    # The tensor of rows stands for the requests: holding those would make this the place where the
    # finished ones are freed, in the middle of a step.
    rows: torch.Tensor | None = None
    others: int = 0
    steps: int = 0  # decode steps of this micro-batch
    age: int = 0  # those since the batch last changed
    exact: bool = False  # whether the same rows and others mean that nothing has changed
    suspect: bool = False  # whether what is remembered of its requests may be wrong
    handles: bytes | None = None  # what a plan depends on, as last read
    has_paths: bool = False  # whether the planner's last paths are those of the handles
    private: dict[str, int] = field(default_factory=dict)  # requests without a path, by reason
    plan: Plan | None = None

    @property
    def is_settled(self) -> bool:
        """Whether what the plan depends on is as it was, without looking: see the module."""
        return self.age > (0 if self.exact else SETTLE_STEPS) and not self.suspect

    def advance(self, batch: LiveBatch) -> None:
        """Note that ``batch`` is decoded next."""
        self.steps += 1
        self.exact = batch.exact
        if (
            batch.rows is self.rows
            and batch.others == self.others
            and batch.tree_cache is self.view.tree_cache
        ):
            self.age += 1
            self.suspect |= self.age % RECHECK_STEPS == 0 and not self.exact
        else:
            self.rows, self.others, self.age = batch.rows, batch.others, 0


class StepPlanner:
    """Holds the plans of the last decode steps of one model runner, one per micro-batch.

    More than one take turns under pipeline parallelism. SGLang gives them no name, but each keeps
    its tensor of rows until its requests change, so a tensor not seen before belongs to the one
    that was decoded the longest time ago. Where that guess is wrong, a plan is made that could have
    been reused; it is never another batch's.
    """

    def __init__(self, target: Target, stats: Stats, micro_batches: int = 1) -> None:
        self._stats = stats
        # The one decoded the longest time ago comes first, the current one last.
        self._states = [MicroBatch(Planner(target), RadixView(None)) for _ in range(micro_batches)]
        self.made = False  # whether the last ``plan()`` made its plan
        self.tap: Tap | None = None  # where new plans' batches are dumped to, if anywhere
        self._private_planner = Planner(target)
        self._private: Plan | None = None

    @property
    def view(self) -> RadixView:
        """The prefix cache of the last step's batch."""
        return self._states[-1].view

    def plan(self, batch: LiveBatch, lengths: Lengths) -> Plan | None:
        """The plan of a decode step, which is counted, or None if there can be none (counted; the
        base must serve). It holds for all that the lengths may be. Queries beyond ``batch.reqs``
        (padding, beams) share nothing. What goes wrong in reading SGLang's tree or in planning
        raises nothing: it costs the sharing, not the server."""
        state = self._state_of(batch.rows)
        state.advance(batch)
        plan, handles = state.plan, None
        settled = state.is_settled
        total = lengths.total(plan) if settled else -1
        if total < 0:
            as_many = plan is not None and plan.num_queries == lengths.least.numel()
            # A settled batch that has outgrown its plan is planned from the paths it has.
            if not (settled and state.has_paths and as_many):
                handles = self._read(state, batch)
                if as_many and handles is not None and handles == state.handles:
                    total = lengths.total(plan)
                else:
                    state.has_paths = False
                state.handles = handles
        self.made = total < 0
        if self.made:
            plan = state.plan = self._make(state, batch, lengths, handles)
            total = lengths.total(plan)
        if plan is not None and total < 0:
            self._stats.fall_back(NOT_USABLE, "a new plan does not hold for its own lengths")
            plan = state.plan = None
        if plan is None:
            return None
        self._stats.step(plan, total, made=self.made)
        if self.made and self.tap is not None:
            planner = state.planner if state.has_paths else None
            self.tap = self.tap.take(planner, lengths.least, plan)
        return plan

    def private(self, lengths: Lengths) -> Plan | None:
        """A plan that shares nothing, the last such one if that fits; None if there can be none
        (counted). The step is not counted."""
        plan = self._private
        if plan is None or lengths.total(plan) < 0:
            plan = self._share_nothing(self._private_planner, lengths.least)
            self._private = plan
        return plan

    def longest(self, num_queries: int, max_context: int) -> Plan | None:
        """A plan that holds for ``num_queries`` sequences of any lengths up to ``max_context``:
        each is one item that no other query shares. None if there can be none (counted)."""
        whole = replace(self._private_planner.target, policy="default", cuts=())
        return self._share_nothing(Planner(whole), torch.full((num_queries,), max_context))

    def _share_nothing(self, planner: Planner, seq_lens: torch.Tensor) -> Plan | None:
        try:
            return planner.plan([None] * len(seq_lens), seq_lens.numpy())
        except (ValueError, MemoryError) as error:
            self._stats.fall_back("batch not plannable", error)
            return None

    def _state_of(self, rows: torch.Tensor) -> MicroBatch:
        """Make the micro-batch of ``rows`` the current one: see the class."""
        states = self._states
        if rows is not states[-1].rows and len(states) > 1:
            state = next((one for one in states if one.rows is rows), states[0])
            states.remove(state)
            states.append(state)
        return states[-1]

    def _read(self, state: MicroBatch, batch: LiveBatch) -> bytes | None:
        """What a plan depends on, read from the batch's requests; None if they are unreadable."""
        suspect, state.suspect = state.suspect, False
        try:
            if batch.tree_cache is not state.view.tree_cache:
                self._look_into(state, batch.tree_cache)
            return state.view.read_handles(batch.reqs, batch.rows, state.steps, anew=suspect)
        except Exception as error:  # requests or a cache of another form: see plan()
            self._stats.fall_back(NOT_READABLE, repr(error))
            return None

    def _look_into(self, state: MicroBatch, tree_cache: Any) -> None:
        """Make ``tree_cache`` the prefix cache of a micro-batch; logs one not seen before."""
        new = all(one.view.tree_cache is not tree_cache for one in self._states)
        state.view, state.handles = RadixView(None), None  # no cache, should the new one be none
        state.view = RadixView(tree_cache)
        if new:
            kind, disabled = state.view.kind, state.view.disabled
            where = f"in SGLang's radix cache ({kind})" if kind else f"nowhere: {disabled}"
            logger.info("sglang_pat: looks for shared prefixes %s", where)

    def _make(
        self, state: MicroBatch, batch: LiveBatch, lengths: Lengths, handles: bytes | None
    ) -> Plan | None:
        """A plan for the last paths if the batch still stands on them, or else for ``handles``.
        One that shares nothing where there are none and where planning fails."""
        again, state.has_paths = state.has_paths, False
        lens = lengths.least.numpy()
        try:
            if again:
                plan = state.planner.plan_again(lens)
            elif handles is not None:
                plan = self._plan_handles(state, batch, handles, lens)
            else:
                return self.private(lengths)
        except Exception as error:  # a tree that is not one, a node that is gone: see plan()
            self._stats.fall_back(NOT_USABLE, repr(error))
            state.suspect = True
            return self.private(lengths)
        state.has_paths = True
        self._stats.private_requests.update(state.private)
        return plan

    def _plan_handles(
        self, state: MicroBatch, batch: LiveBatch, handles: bytes, lens: npt.NDArray[np.int64]
    ) -> Plan:
        """A plan for ``handles``, or for what is read anew if one has a node that is gone."""
        reqs = batch.reqs
        try:
            plan, private = state.view.plan(state.planner, reqs, handles, lens)
        except KeyError:
            self._look_into(state, batch.tree_cache)  # forgets all that is remembered
            handles = state.view.read_handles(reqs, batch.rows, state.steps, anew=True)
            state.handles = handles
            plan, private = state.view.plan(state.planner, reqs, handles, lens)
        if len(lens) > len(reqs):
            private[NO_REQUEST] = len(lens) - len(reqs)
        state.private = private
        if state.view.unread:  # the next step reads on, and plans anew
            state.handles, state.suspect = None, True
        return plan


class StepClock:
    """Times the preparation of one step at a time.

    With SGLang's overlap scheduler the host prepares a step while the GPU runs the one before. So
    an event is recorded behind the work that the GPU has when the preparation begins: if the event
    is not done when the preparation ends, the GPU never waited, and the host time was hidden.
    Without a GPU nothing is hidden.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._event: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._began = 0

    def start(self) -> None:
        if self._event is not None:
            self._event.record()
        self._began = time.perf_counter_ns()

    def elapsed_ns(self) -> int:
        return time.perf_counter_ns() - self._began

    def is_hidden(self) -> bool:
        """Whether the GPU still has work from before ``start()``."""
        return self._event is not None and not self._event.query()


def micro_batches() -> int:
    """Batches that take turns in this scheduler (``SchedulerPPMixin.init_pp_loop_state``)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_size + parallel.pp_async_batch_depth if parallel.pp_size > 1 else 1
