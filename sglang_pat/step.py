# SPDX-License-Identifier: Apache-2.0
"""Lazy update (PAT section 5.2): plan a decode step anew only if the last plan no longer holds.

A plan depends on the batch through three numbers per request: its row of ``req_to_token``, the
radix node it holds and the tokens that are safe to share. They are compared at every step. Node
handles are never given out twice, not even after a flush, and splitting a node only refines paths,
so equal numbers mean equal sharing. Lengths grow every step; ``Plan.fits`` says for how long.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat.hook import LiveBatch
from sglang_pat.planning import Plan, Planner
from sglang_pat.radix import Path, RadixView
from sglang_pat.stats import Stats
from sglang_pat.target import Target

logger = logging.getLogger("sglang_pat")


class StepPlanner:
    """Holds the plan of the last decode step of one model runner."""

    def __init__(self, target: Target, stats: Stats) -> None:
        self._planner = Planner(target)
        self._stats = stats
        self._view = RadixView(None)
        self._key: tuple[object, ...] = ()
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
        start = time.perf_counter_ns()
        stats = self._stats
        count = len(seq_lens)
        key = (count, *self._read_key(batch))
        plan = self._plan
        if plan is not None and key == self._key and plan.fits(seq_lens.data_ptr(), count):
            stats.plans_reused += 1
        else:
            plan = self._make(batch, seq_lens)
            self._plan, self._key = plan, key
            if plan is None:
                return None
            stats.plans_made += 1
            stats.plan_ns += time.perf_counter_ns() - start
        total = int(seq_lens.numpy().sum())
        stats.decode_steps += 1
        stats.packed_steps += plan.num_shared_items > 0
        stats.kv_tokens_unpacked += total
        stats.kv_tokens_read += plan.kv_tokens_read(total)
        return plan

    def private(self, seq_lens: torch.Tensor) -> Plan:
        """A plan that shares nothing, the last such one if that fits; ``seq_lens`` as in ``plan``.
        Not counted.

        Raises ValueError for more queries than the target holds.
        """
        plan = self._private
        if plan is None or not plan.fits(seq_lens.data_ptr(), len(seq_lens)):
            plan = self._planner.plan([None] * len(seq_lens), seq_lens.numpy())
            self._private = plan
        return plan

    def _read_key(self, batch: LiveBatch) -> tuple[object, ...]:
        """What the plan of this step depends on."""
        if batch.tree_cache is not self._view.tree_cache:
            self._view = RadixView(batch.tree_cache)
            logger.info("sglang_pat: reads paths from %s", self._view.kind or self._view.disabled)
        try:
            held = self._view.key(batch.reqs)
        except AttributeError as error:
            self._stats.fall_back("requests not readable", error)
            held = object()  # unlike any other: plan anew
        return (batch.rows.numpy().tobytes(), held)

    def _make(self, batch: LiveBatch, seq_lens: torch.Tensor) -> Plan | None:
        try:
            paths, limits = self._shared_paths(batch, len(seq_lens))
            return self._planner.plan(paths, seq_lens.numpy(), limits, self._view.fields)
        except Exception as error:  # a tree that is not one, a node that is gone: see plan()
            self._stats.fall_back("sharing not usable", repr(error))
        try:
            return self.private(seq_lens)
        except ValueError as error:
            self._stats.fall_back("batch not plannable", error)
            return None

    def _shared_paths(
        self, batch: LiveBatch, count: int
    ) -> tuple[list[Path | None], npt.NDArray[np.int64]]:
        """Path of each query of the batch and the tokens of it that are safe to share."""
        reqs = batch.reqs
        extra = count - len(reqs)
        if extra < 0:
            raise ValueError(f"{len(reqs)} requests in a batch of {count} rows")
        handles = self._view.read_handles(reqs, batch.rows.numpy()[: len(reqs)])
        paths, private = self._view.paths(reqs, handles)
        if extra:
            private["row without a request"] = extra
        self._stats.private(private)
        limits = np.zeros(count, dtype=np.int64)
        limits[: len(reqs)] = handles[:, 1]
        return [*paths, *[None] * extra], limits
