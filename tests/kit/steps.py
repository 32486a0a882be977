# SPDX-License-Identifier: Apache-2.0
"""Requests in SGLang's own radix caches, and the step planner that reads them. No server."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import retract_all
from sglang.srt.runtime_context import get_context

from benchmarks.host.live import LiveCache
from sglang_pat.planner import Plan
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import SETTLE_STEPS, RadixView, check_plan
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats
from sglang_pat.target import Target

TARGET = Target.cpu(threads=4, num_q_heads=8, num_kv_heads=2, head_dim=64, max_queries=64)
QUERIES = 8
# How many tokens all requests, those of a tool, and one request alone have.
SYSTEM, TOOL, OWN = 200, 100, 30


def retract(cache: LiveCache, reqs: list[Any]) -> None:
    """Take all requests out of their rows, as a pause of SGLang's does."""
    with get_context().override_server_args():  # it reads the configuration of a server
        retract_all(
            reqs=reqs,
            req_to_token_pool=cache.table,
            token_to_kv_pool_allocator=cache.allocator,
            tree_cache=cache.tree,
            hisparse_coordinator=None,
        )


def flush(cache: LiveCache) -> None:
    """Forget everything, as SGLang does for new weights; no request may be in a row."""
    cache.tree.reset()
    cache.table.clear()
    cache.allocator.clear()


class StepBed:
    """A test bed: requests of two tools, by turns, under one system prompt in a real cache, the
    batch of them (``batch``, and ``lens``: its sequence lengths) and a step planner."""

    def __init__(self, kind: str, queries: int = QUERIES) -> None:
        self.rng = random.Random(0)
        self.cache = LiveCache(kind, slots=40_000, rows=queries + 2, context=1024)
        self.system, self.tools = self.text(SYSTEM), [self.text(TOOL), self.text(TOOL)]
        self.reqs: list[Any] = []
        self.use([self.admit(i) for i in range(queries)])
        self.stats = Stats()
        self.steps = StepPlanner(TARGET, self.stats)

    def text(self, length: int) -> list[int]:
        return [self.rng.randrange(1 << 15) for _ in range(length)]

    def admit(self, index: int) -> Any:
        """A new request of tool 0 or 1, if ``index`` is even or odd."""
        return self.cache.admit(self.system + self.tools[index % 2] + self.text(OWN))

    def use(self, reqs: list[Any]) -> None:
        """Make these the batch."""
        self.reqs = reqs
        self.batch, self.lens = self.cache.batch(reqs)

    def plan(self) -> Plan:
        """The plan of the next step."""
        plan = self.steps.plan(self.batch, known(self.lens))
        assert plan is not None
        return plan

    def settle(self) -> Plan:
        """Plan until the batch counts as settled: from then on it is not read. The last plan."""
        for _ in range(SETTLE_STEPS + 1):
            plan = self.plan()
        return plan

    def check(self, plan: Plan, batch: LiveBatch | None = None) -> None:
        """Raises SlotMismatch where queries that read tokens together have different slots."""
        batch = batch or self.batch
        table = self.cache.table.req_to_token
        check_plan(plan, batch.reqs, self.steps.view, table, batch.rows)


def shared_tokens(plan: Plan) -> int:
    """Tokens of items that several queries share."""
    return int(plan.segments["kv_len"][plan.segments["num_queries"] > 1].sum())


def count_calls(monkeypatch: pytest.MonkeyPatch, method: str) -> list[None]:
    """A list that grows by one with every call of this method of ``RadixView``."""
    calls: list[None] = []
    original = getattr(RadixView, method)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(RadixView, method, counting)
    return calls
