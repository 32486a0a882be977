# SPDX-License-Identifier: Apache-2.0
"""Radix view, lazy update and check mode on SGLang's own caches and requests, without a server."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_pat.bench.host.live import CACHES, LiveCache
from sglang_pat.planner import Plan
from sglang_pat.srt.check import SlotMismatch, check_plan
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS, RadixView
from sglang_pat.srt.step import StepPlanner
from sglang_pat.stats import Stats
from sglang_pat.target import Target

TARGET = Target.cpu(threads=4, num_q_heads=8, num_kv_heads=2, head_dim=64, max_queries=64)
QUERIES = 8
SYSTEM, TOOL, OWN = 200, 100, 30


class Bed:
    """Eight requests of two tools under one system prompt, in a real cache, and a planner."""

    def __init__(self, kind: str, queries: int = QUERIES) -> None:
        self.rng = random.Random(0)
        self.cache = LiveCache(kind, slots=40_000, rows=queries + 2, context=1024)
        self.system, self.tools = self.text(SYSTEM), [self.text(TOOL), self.text(TOOL)]
        self.reqs = [self.admit(i) for i in range(queries)]
        self.batch, self.lens = self.cache.batch(self.reqs)
        self.stats = Stats()
        self.steps = StepPlanner(TARGET, self.stats)

    def text(self, length: int) -> list[int]:
        return [self.rng.randrange(1 << 15) for _ in range(length)]

    def admit(self, index: int) -> Any:
        return self.cache.admit(self.system + self.tools[index % 2] + self.text(OWN))

    def plan(self) -> Plan:
        plan = self.steps.plan(self.batch, self.lens)
        assert plan is not None
        return plan

    def check(self, plan: Plan) -> None:
        table = self.cache.table.req_to_token
        check_plan(plan, self.batch.reqs, self.steps.view, table, self.batch.rows)


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> Bed:
    return Bed(request.param)


def _begins(plan: Plan) -> npt.NDArray[np.int32]:
    """Of each item the first token."""
    begins: npt.NDArray[np.int32] = plan.segments[plan.item_segments["first_segment"]]["kv_start"]
    return begins


def shared_tokens(plan: Plan) -> int:
    """Tokens of items that several queries share."""
    return int(plan.segments["kv_len"][plan.segments["num_queries"] > 1].sum())


def test_paths_of_the_live_tree_are_packed(bed: Bed) -> None:
    plan = bed.plan()
    assert shared_tokens(plan) == SYSTEM + 2 * TOOL
    bed.check(plan)
    private = QUERIES * (OWN + 1)
    assert bed.stats.kv_tokens_read == SYSTEM + 2 * TOOL + private
    assert bed.stats.kv_tokens_unpacked == QUERIES * (SYSTEM + TOOL + OWN + 1)
    assert (bed.stats.decode_steps, bed.stats.packed_steps) == (1, 1)
    assert not bed.stats.fallbacks and not bed.stats.private_requests


def test_a_plan_is_reused_while_tails_grow(bed: Bed) -> None:
    first = bed.plan()
    for _ in range(3):
        bed.lens += 1
        assert bed.plan() is first
    assert (bed.stats.plans_made, bed.stats.plans_reused) == (1, 3)


def test_steady_steps_make_few_plans() -> None:
    bed = Bed("rust", queries=64)
    for _ in range(256):
        bed.plan()
        bed.lens += 1
    assert bed.stats.plans_made <= 8
    assert bed.stats.plans_made + bed.stats.plans_reused == bed.stats.decode_steps == 256


@pytest.mark.parametrize("what", ["row", "node", "protected"])
def test_whatever_changes_makes_a_new_plan(bed: Bed, what: str) -> None:
    first = bed.plan()
    req = bed.reqs[3]
    if what == "row":
        req.kv.req_pool_idx = bed.batch.rows[3] = bed.batch.rows.max() + 1
    elif what == "node":
        req.lock = bed.cache.tree.lock(bed.reqs[1].lock.node)
    else:
        req.kv.cache_protected_len -= OWN + TOOL
    second = bed.plan()
    assert second is not first
    assert bed.stats.plans_made == 2
    if what == "protected":
        assert 3 not in [
            query
            for item in second.items[_begins(second) == SYSTEM]
            if item["num_queries"] > 1
            for query in second.members["query"][item["member_offset"] :][: item["num_queries"]]
        ]


def count(monkeypatch: pytest.MonkeyPatch, method: str) -> list[None]:
    """Grows by one with every call of a method of radix views."""
    calls: list[None] = []
    original = getattr(RadixView, method)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(RadixView, method, counting)
    return calls


def settle(bed: Bed) -> Plan:
    for _ in range(SETTLE_STEPS + 1):
        plan = bed.plan()
    return plan


def test_a_settled_batch_is_not_read(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a forward that is no decode, another batch, or the next time that all is read."""
    reads = count(monkeypatch, "read_handles")
    first = settle(bed)
    before = len(reads)
    bed.reqs[3].kv.cache_protected_len -= OWN + TOOL
    assert bed.plan() is first and len(reads) == before
    bed.batch = replace(bed.batch, others=1)  # a prefill
    bed.plan()
    assert len(reads) == before + 1
    settle(bed)
    before = len(reads)
    bed.batch = replace(bed.batch, reqs=bed.reqs[::-1], rows=bed.batch.rows.flip(0))
    second = bed.plan()
    assert second is not first and len(reads) == before + 1
    settle(bed)
    before = len(reads)
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert len(reads) == before + 1
    assert third is not second and third.kv_tokens_read(0) > first.kv_tokens_read(0)


@pytest.mark.parametrize("how", ["outgrown", "changed", "prefill"])
def test_settled_requests_are_not_looked_at(bed: Bed, how: str) -> None:
    """Nor when the plan is made anew: a change is seen when all is read again."""
    settle(bed)
    first = bed.plan()
    bed.reqs[3].kv.cache_protected_len -= OWN + TOOL
    if how == "outgrown":
        bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    elif how == "changed":
        bed.batch, bed.lens = bed.cache.batch(bed.reqs[1:])
    else:
        bed.batch = replace(bed.batch, others=1)
    second = bed.plan()
    assert (second is first) == (how == "prefill")
    assert shared_tokens(second) == SYSTEM + 2 * TOOL
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert third.kv_tokens_read(0) > second.kv_tokens_read(0)


@pytest.mark.parametrize("settled", [True, False])
def test_a_plan_that_is_outgrown_keeps_its_paths(
    bed: Bed, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, look_ups = count(monkeypatch, "read_handles"), count(monkeypatch, "look_up")
    first = settle(bed) if settled else bed.plan()
    for _ in range(3):
        last = bed.plan()
        before = len(reads)
        bed.lens = torch.from_numpy(last.max_seq_lens + 1)
        second = bed.plan()
        assert bed.steps.made and second is not last
        assert shared_tokens(second) == shared_tokens(first) and second.fits(
            bed.lens.data_ptr(), QUERIES
        )
        bed.check(second)
        assert len(reads) == before + (not settled) and len(look_ups) == 1
        if not settled:  # a prefill came between
            bed.batch = replace(bed.batch, others=bed.batch.others + 1)
            bed.plan()


def test_paths_are_read_again_after_a_failure_only(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_ups = count(monkeypatch, "look_up")
    first = settle(bed)
    bed.steps.private(bed.lens)  # has a working memory of its own
    bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    assert shared_tokens(bed.plan()) == shared_tokens(first)
    assert len(look_ups) == 1
    grown, bed.lens = bed.lens, bed.lens - 250  # shorter than the paths
    assert shared_tokens(bed.plan()) == 0
    assert bed.stats.fallbacks == {"sharing not usable": 1}
    bed.lens = grown
    assert shared_tokens(bed.plan()) == shared_tokens(first)
    assert len(look_ups) == 2


def test_a_request_that_comes_shares_with_the_settled_at_once(bed: Bed) -> None:
    """Also where it splits a node of theirs: their paths are not remembered."""
    text = bed.system + bed.tools[0] + bed.text(400)
    bed.reqs.append(bed.cache.admit(text))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    assert shared_tokens(settle(bed)) == SYSTEM + 2 * TOOL
    bed.reqs.append(bed.cache.admit(text[:-100] + bed.text(OWN)))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    second = bed.plan()
    assert shared_tokens(second) == SYSTEM + 2 * TOOL + 300
    bed.check(second)


@pytest.mark.parametrize("what", ["released", "gone"])
def test_a_settled_request_whose_node_is_gone(bed: Bed, what: str) -> None:
    """Costs the others their sharing for one step at most."""
    settle(bed)
    bed.plan()
    req = bed.reqs[3]
    lock, req.lock = req.lock, None
    if what == "gone":
        bed.cache.tree.unlock(lock)
        bed.cache.tree.evict(EvictParams(num_tokens=OWN))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs[1:])
    bed.plan()
    assert shared_tokens(bed.plan()) == SYSTEM + 2 * TOOL


def test_a_flushed_cache_gives_other_nodes(bed: Bed) -> None:
    """The same batch shape after a flush has another key: handles are not given out twice."""
    first = bed.plan()
    nodes = [getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs]
    bed.cache.tree.reset()
    bed.cache.table.clear()
    bed.cache.allocator.clear()
    bed.reqs = [bed.admit(i // 4) for i in range(QUERIES)]
    assert not set(nodes) & {getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs}
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    second = bed.plan()
    assert second is not first
    bed.check(second)


def test_released_requests_and_rows_beyond_them_are_private(bed: Bed) -> None:
    bed.reqs[0].lock = None
    bed.reqs[1].kv.req_pool_idx = None
    bed.lens = torch.cat([bed.lens, torch.tensor([1, 1])])  # as padding and beams have it
    plan = bed.plan()
    sharing = {
        int(query)
        for item in plan.items[plan.items["num_queries"] > 1]
        for query in plan.members["query"][item["member_offset"] :][: item["num_queries"]]
    }
    assert sharing == set(range(2, QUERIES))
    assert bed.stats.private_requests == {"no tree lock": 2, "row without a request": 2}
    bed.check(plan)


def test_a_node_that_is_gone_costs_the_sharing_only(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    lock, gone = bed.reqs[2].lock, 1 << 40
    lock.node = SimpleNamespace(id=gone) if hasattr(lock.node, "id") else gone
    with caplog.at_level(logging.WARNING, logger="sglang_pat"):
        for protected in (5, 6):
            bed.reqs[0].kv.cache_protected_len = protected
            assert bed.plan().num_shared_items == 0
    assert bed.stats.fallbacks == {"sharing not usable": 2}
    assert len([r for r in caplog.records if "sharing not usable" in r.message]) == 1
    assert bed.stats.kv_tokens_read == bed.stats.kv_tokens_unpacked


def test_requests_of_another_form_cost_the_sharing_only(bed: Bed) -> None:
    bed.batch = LiveBatch([object()] * QUERIES, bed.cache.tree, bed.batch.rows)
    assert bed.plan().num_shared_items == 0
    assert bed.stats.fallbacks == {"requests not readable": 1}


def test_a_batch_beyond_the_target_is_the_bases(bed: Bed) -> None:
    many = TARGET.max_queries + 1
    lens = torch.ones(many, dtype=torch.int64)
    assert bed.steps.plan(bed.batch, lens) is None
    assert bed.stats.fallbacks["batch not plannable"] == 1
    assert bed.stats.decode_steps == 0


def take_turns(bed: Bed, micro_batches: int) -> list[tuple[LiveBatch, torch.Tensor]]:
    """The bed's requests in so many micro-batches, as pipeline parallelism has them."""
    bed.steps = StepPlanner(TARGET, bed.stats, micro_batches)
    return [bed.cache.batch(bed.reqs[i::micro_batches]) for i in range(micro_batches)]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_that_take_turns_keep_their_plans(
    bed: Bed, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count(monkeypatch, "read_handles")
    turns = take_turns(bed, micro_batches)
    plans: list[Plan | None] = [None] * micro_batches
    for step in range(RECHECK_STEPS):
        for i, (batch, lens) in enumerate(turns):
            plan = bed.steps.plan(batch, lens)
            assert plan is not None and bed.steps.made == (step == 0)
            assert plans[i] is None or plan is plans[i]
            plans[i] = plan
            table = bed.cache.table.req_to_token
            check_plan(plan, batch.reqs, bed.steps.view, table, batch.rows)
            lens += step % 2
    assert len({id(plan) for plan in plans}) == micro_batches
    assert bed.stats.plans_made == micro_batches
    assert bed.stats.plans_reused == micro_batches * (RECHECK_STEPS - 1)
    # Each is read until it has settled, as one batch alone would be.
    assert len(reads) == micro_batches * (SETTLE_STEPS + 1)


def test_a_micro_batch_that_changes_leaves_the_others_their_plans(bed: Bed) -> None:
    turns = take_turns(bed, 2)
    for _ in range(SETTLE_STEPS + 2):
        first, second = (bed.steps.plan(batch, lens) for batch, lens in turns)
    turns[0] = bed.cache.batch(bed.reqs[2::2])  # one of its requests is done
    changed = bed.steps.plan(*turns[0])
    assert bed.steps.made and changed is not first
    assert bed.steps.plan(*turns[1]) is second
    assert bed.steps.plan(*turns[0]) is changed
    assert bed.stats.plans_made == 3


def test_an_outgrown_plan_is_made_from_the_paths_of_its_own_micro_batch(bed: Bed) -> None:
    turns = take_turns(bed, 2)
    for _ in range(SETTLE_STEPS + 2):
        for batch, lens in turns:
            plan = bed.steps.plan(batch, lens)
    assert plan is not None
    batch, lens = turns[0]
    lens += 600  # beyond what its plan holds for
    again = bed.steps.plan(batch, lens)
    assert bed.steps.made and again is not None and again.num_queries == len(batch.reqs)
    assert again.fits(lens.data_ptr(), len(lens))
    check_plan(again, batch.reqs, bed.steps.view, bed.cache.table.req_to_token, batch.rows)
    assert bed.steps.plan(*turns[1]) is plan


def test_micro_batches_may_have_caches_of_their_own(bed: Bed) -> None:
    """What check mode compares with is the cache of the batch that was planned last."""
    other = Bed("python")
    turns = take_turns(bed, 2)
    turns[1] = (other.batch, other.lens)
    for batch, lens in turns * 2:
        plan = bed.steps.plan(batch, lens)
        assert plan is not None and bed.steps.view.tree_cache is batch.tree_cache
    assert bed.stats.plans_made == 2


def test_there_is_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="micro_batches is 0, must be 1 or more"):
        StepPlanner(TARGET, Stats(), 0)


@pytest.mark.parametrize(
    ("pp_size", "depth", "expected"), [(1, 0, 1), (1, 2, 1), (2, 0, 2), (4, 3, 7)]
)
def test_how_many_micro_batches_sglang_has(
    pp_size: int, depth: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as its scheduler's own loop, where that is the one that runs."""
    from sglang.srt import runtime_context
    from sglang.srt.managers import scheduler_pp_mixin

    from sglang_pat.srt.pipeline import micro_batches

    parallel = SimpleNamespace(pp_size=pp_size, pp_async_batch_depth=depth)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    assert micro_batches() == expected
    if pp_size > 1:
        monkeypatch.setattr(scheduler_pp_mixin, "get_parallel", lambda: parallel)
        loop = SimpleNamespace(
            spec_algorithm=SimpleNamespace(is_none=lambda: True), device="cpu", device_module=None
        )
        scheduler_pp_mixin.SchedulerPPMixin.init_pp_loop_state(loop)
        assert loop.pp_loop_size == expected == len(loop.mbs)


@pytest.mark.parametrize("token", [5, SYSTEM + 5, SYSTEM + TOOL + 5])
def test_check_mode_names_the_wrong_slot(bed: Bed, token: int) -> None:
    plan = bed.plan()
    row = int(bed.batch.rows[3])
    right = int(bed.cache.table.req_to_token[row, token])
    bed.cache.table.req_to_token[row, token] = right + 1
    rid = bed.reqs[3].rid
    with pytest.raises(
        SlotMismatch, match=rf"{rid} .*slot {right + 1} at token {token}, .* slot {right}"
    ):
        bed.check(plan)
