# SPDX-License-Identifier: Apache-2.0
"""Lazy update (PAT section 5.2): plan a decode step anew only if the last plan no longer holds.

A plan depends on the batch through three numbers per request: its row of ``req_to_token``, the
radix node it holds and the tokens that are safe to share. Node handles are never given out twice,
not even after a flush, and splitting a node only refines paths, so equal numbers mean equal
sharing. Lengths grow every step; ``Plan.total_tokens`` says for how long a plan holds, and one that
is outgrown is made anew from the paths that were read for it.

Reading the numbers costs a cache miss or six per request, so what has settled is not read: a batch
of the same requests, and no forward but decodes, as for the last ``SETTLE_STEPS``, and in another
batch those of its requests that were there as long (``csrc/pack/handle_memory.h``). SGLang makes a
new tensor of rows whenever a batch changes, and gives a running request another node only when it
has processed its prefill, which under overlap is a step or two after it ran. A node that changed
all the same would cost sharing, not results, and for ``RECHECK_STEPS`` at most: the slots are read
anew at every step, a row is given to another request only after that, and what a released request
had in common with others they keep locked.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat.hook import LiveBatch
from sglang_pat.planning import Plan, Planner
from sglang_pat.radix import RECHECK_STEPS, SETTLE_STEPS, RadixView
from sglang_pat.stats import Stats
from sglang_pat.target import Target

logger = logging.getLogger("sglang_pat")


class StepPlanner:
    """Holds the plan of the last decode step of one model runner."""

    def __init__(self, target: Target, stats: Stats) -> None:
        self._planner = Planner(target)
        self._stats = stats
        self._view = RadixView(None)
        self.made = False  # whether the last ``plan()`` made its plan
        # What the last step's batch was, and the numbers that were last read of it.
        self._rows: torch.Tensor | None = None
        self._others = 0
        self._age = 0  # steps since the batch was another
        self._step = 0  # those that were asked for
        self._anew = False  # whether what is remembered of requests may be wrong
        self._key: tuple[object, ...] | None = None
        self._has_paths = False  # whether the planner's last paths are those of the key
        self._reasons: dict[str, int] = {}  # how many of its requests share nothing, and why
        self._plan: Plan | None = None
        self._private: Plan | None = None

    @property
    def view(self) -> RadixView:
        """The prefix cache of the last step's batch."""
        return self._view

    def plan(self, batch: LiveBatch, seq_lens: torch.Tensor) -> Plan | None:
        """The plan of a decode step, or None if there can be none (counted; the base must serve).

        ``seq_lens`` [B] int64, CPU, contiguous: tokens, the one being decoded included. Queries
        beyond ``batch.reqs`` (padding, beams) share nothing. Counts the step. Never raises: what
        goes wrong in reading SGLang's tree or in planning costs the sharing, not the server.
        """
        count = len(seq_lens)
        self._step += 1
        plan, handles = self._plan, None
        settled = self._is_settled(batch)
        total = _total_tokens(plan, seq_lens) if settled else -1
        if total < 0 and not (settled and self._has_paths):
            key, handles = self._read(batch, count)
            if key is not None and key == self._key:
                total = _total_tokens(plan, seq_lens)
            else:
                self._has_paths = False
            self._key = key
        self.made = total < 0
        if self.made:
            plan = self._plan = self._make(batch, seq_lens, handles)
            total = _total_tokens(plan, seq_lens)
        if plan is None:
            return None
        self._stats.step(plan, total, made=self.made)
        return plan

    def private(self, seq_lens: torch.Tensor) -> Plan:
        """A plan that shares nothing, the last such one if that fits; ``seq_lens`` as in ``plan``.
        Not counted.

        Raises ValueError for more queries than the target holds.
        """
        plan = self._private
        if plan is None or not plan.fits(seq_lens.data_ptr(), len(seq_lens)):
            self._has_paths = False
            plan = self._planner.plan([None] * len(seq_lens), seq_lens.numpy())
            self._private = plan
        return plan

    def _is_settled(self, batch: LiveBatch) -> bool:
        """Whether what the plan depends on is as it was without looking: see above."""
        # The tensor of rows, held here, stands for the requests: holding those would make this the
        # place where the finished ones are freed, in the middle of a step.
        if (
            batch.others != self._others
            or batch.rows is not self._rows
            or batch.tree_cache is not self._view.tree_cache
        ):
            self._others, self._rows, self._age = batch.others, batch.rows, 0
            return False
        self._age += 1
        self._anew |= self._age % RECHECK_STEPS == 0
        return self._age > SETTLE_STEPS and not self._anew

    def _read(self, batch: LiveBatch, count: int) -> tuple[tuple[object, ...] | None, bytes | None]:
        """What a plan depends on, to be compared, and the requests' handles; None if unreadable."""
        if batch.tree_cache is not self._view.tree_cache:
            self._view = RadixView(batch.tree_cache)
            self._key = None
            kind, disabled = self._view.kind, self._view.disabled
            where = f"in SGLang's radix cache ({kind})" if kind else f"nowhere: {disabled}"
            logger.info("sglang_pat: looks for shared prefixes %s", where)
        anew, self._anew = self._anew, False
        try:
            handles = self._view.read_handles(batch.reqs, batch.rows, self._step, anew=anew)
        except (AttributeError, TypeError, ValueError) as error:
            self._stats.fall_back("requests not readable", error)
            return None, None
        return (count, handles), handles

    def _make(self, batch: LiveBatch, seq_lens: torch.Tensor, handles: bytes | None) -> Plan | None:
        try:
            if self._has_paths or handles is not None:
                return self._pack(batch, seq_lens, handles)
        except Exception as error:  # a tree that is not one, a node that is gone: see plan()
            self._stats.fall_back("sharing not usable", repr(error))
            self._anew = True
        try:
            return self.private(seq_lens)
        except ValueError as error:
            self._stats.fall_back("batch not plannable", error)
            return None

    def _pack(self, batch: LiveBatch, seq_lens: torch.Tensor, handles: bytes | None) -> Plan:
        """A plan for the last paths, or else for those of ``handles``."""
        lens = seq_lens.numpy()
        again, self._has_paths = self._has_paths, False
        if again:
            plan = self._planner.plan_again(lens)
        else:
            assert handles is not None
            found, limits = self._look_up(batch, len(seq_lens), handles)
            plan = self._view.plan(self._planner, found, lens, limits)
        self._has_paths = True
        self._stats.private(self._reasons)
        return plan

    def _look_up(
        self, batch: LiveBatch, count: int, handles: bytes
    ) -> tuple[list[Any], npt.NDArray[np.int64]]:
        """Leaf or path of each query (``RadixView.look_up``) and its tokens safe to share."""
        found, limits, self._reasons = self._view.look_up(batch.reqs, handles, count)
        if count > len(batch.reqs):
            self._reasons["row without a request"] = count - len(batch.reqs)
        return found, limits


def _total_tokens(plan: Plan | None, seq_lens: torch.Tensor) -> int:
    """Sum of the lengths, -1 if there is no plan or it does not hold for them."""
    return -1 if plan is None else plan.total_tokens(seq_lens.data_ptr(), len(seq_lens))
