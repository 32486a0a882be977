# SPDX-License-Identifier: Apache-2.0
"""What the step planner makes of SGLang's own caches and requests: the plan of a step, when it is
kept, what is read for it, what it falls back to, and check mode. No server."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.steps import (
    OWN,
    QUERIES,
    SYSTEM,
    TARGET,
    TOOL,
    StepBed,
    count_calls,
    flush,
    retract,
    shared_tokens,
    sharing_queries,
)
from sglang.srt import runtime_context
from sglang.srt.managers import scheduler_pp_mixin
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from benchmarks.host.live import CACHES
from sglang_pat.planner import Plan
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS
from sglang_pat.srt.step import StepPlanner, known, micro_batches

SHARED = SYSTEM + 2 * TOOL  # tokens of the bed's requests that several share


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> StepBed:
    return StepBed(request.param)


def test_paths_of_the_live_tree_are_packed_and_a_plan_is_kept(bed: StepBed) -> None:
    plan = bed.plan()
    assert shared_tokens(plan) == SHARED
    bed.check(plan)
    assert bed.stats.kv_tokens_read == SHARED + QUERIES * (OWN + 1)
    assert bed.stats.kv_tokens_unpacked == QUERIES * (SYSTEM + TOOL + OWN + 1)
    for _ in range(3):
        bed.lens += 1
        assert bed.plan() is plan
    stats = bed.stats
    assert (stats.plans_made, stats.plans_reused, stats.packed_steps) == (1, 3, 4)
    assert not stats.fallbacks and not stats.private_requests


@pytest.mark.parametrize("what", ["row", "node", "protected"])
def test_a_request_that_changes_makes_a_new_plan(bed: StepBed, what: str) -> None:
    first = bed.plan()
    req = bed.reqs[3]
    if what == "row":
        req.kv.req_pool_idx = bed.batch.rows[3] = bed.batch.rows.max() + 1
    elif what == "node":
        req.lock = bed.cache.tree.lock(bed.reqs[1].lock.node)
    else:
        req.kv.cache_protected_len -= OWN + TOOL
    second = bed.plan()
    assert second is not first and bed.stats.plans_made == 2
    if what == "protected":
        assert 3 in sharing_queries(first, start=SYSTEM)
        assert 3 not in sharing_queries(second, start=SYSTEM)


def test_a_batch_of_the_same_shape_after_a_flush_makes_a_new_plan(bed: StepBed) -> None:
    """SGLang gives no node handle twice, so the plan of before the flush cannot be taken for one
    of the new batch."""

    def nodes() -> set[int]:
        return {getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs}

    first, before = bed.plan(), nodes()
    flush(bed.cache)
    bed.use([bed.admit(i // 4) for i in range(QUERIES)])
    assert not before & nodes()
    second = bed.plan()
    assert second is not first
    bed.check(second)


def test_released_requests_and_rows_beyond_them_are_private(bed: StepBed) -> None:
    bed.reqs[0].lock = None
    bed.reqs[1].kv.req_pool_idx = None
    bed.lens = torch.cat([bed.lens, torch.tensor([1, 1])])  # as padding and beams have it
    plan = bed.plan()
    assert sharing_queries(plan) == set(range(2, QUERIES))
    assert bed.stats.private_requests == {"no tree lock": 2, "row without a request": 2}
    bed.check(plan)


# What cannot be read or planned costs the sharing, not the server.


def test_a_node_that_is_gone_costs_the_sharing_only(
    bed: StepBed, caplog: pytest.LogCaptureFixture
) -> None:
    lock, gone = bed.reqs[2].lock, 1 << 40
    lock.node = SimpleNamespace(id=gone) if hasattr(lock.node, "id") else gone
    for protected in (5, 6):
        bed.reqs[0].kv.cache_protected_len = protected
        assert bed.plan().num_shared_items == 0
    assert bed.stats.fallbacks == {"sharing not usable": 2}
    assert caplog.text.count("sharing not usable") == 1
    assert bed.stats.kv_tokens_read == bed.stats.kv_tokens_unpacked


class ForeignCore:
    """A tree core of somebody else's, with its nodes as hidden as those of SGLang's."""

    @property
    def root_node(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("what", ["requests", "core", "cache"])
def test_what_cannot_be_read_costs_the_sharing_only(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = StepBed("rust")
    right = bed.batch
    if what == "requests":
        bed.batch = LiveBatch([object()] * QUERIES, bed.cache.tree, bed.batch.rows)
    elif what == "cache":
        bed.batch = replace(bed.batch, tree_cache=SimpleNamespace())
    with monkeypatch.context() as patch:
        if what == "core":
            patch.setattr(bed.cache.tree, "tree_core", ForeignCore())
        for _ in range(2):
            plan = bed.plan()
            assert plan.num_shared_items == 0
            if what == "core":
                bed.check(plan)
    if what == "cache":
        assert not bed.stats.fallbacks
        assert bed.stats.private_requests == {"unknown cache SimpleNamespace": QUERIES}
    else:
        assert bed.stats.fallbacks == {"requests not readable": 2}
    bed.batch = right
    assert shared_tokens(bed.plan()) == SHARED


# What is read. A batch that has not changed for more than ``SETTLE_STEPS`` decode steps is settled:
# it is not read again until it changes, a prefill runs, or ``RECHECK_STEPS`` steps have passed.


@pytest.mark.parametrize("how", ["outgrown", "changed", "prefill"])
def test_a_change_of_a_settled_request_is_seen_when_all_are_read_again(
    bed: StepBed, how: str
) -> None:
    """And not before, not even when a new plan is made for other reasons."""
    bed.settle()
    first = bed.plan()
    bed.reqs[3].kv.cache_protected_len -= OWN + TOOL
    if how == "outgrown":
        bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    elif how == "changed":
        bed.use(bed.reqs[1:])
    else:
        bed.batch = replace(bed.batch, others=1)
    second = bed.plan()
    assert (second is first) == (how == "prefill")
    assert shared_tokens(second) == SHARED
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert third.kv_tokens_read(0) > second.kv_tokens_read(0)


@pytest.mark.parametrize("settled", [True, False])
def test_a_plan_that_is_outgrown_keeps_its_paths(
    bed: StepBed, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, look_ups = count_calls(monkeypatch, "read_handles"), count_calls(monkeypatch, "plan")
    last = bed.settle() if settled else bed.plan()
    for _ in range(3):
        before = len(reads)
        bed.lens = torch.from_numpy(last.max_seq_lens + 1)
        plan = bed.plan()
        assert bed.steps.made and plan is not last and shared_tokens(plan) == SHARED
        assert plan.fits(bed.lens.data_ptr(), QUERIES)
        bed.check(plan)
        assert len(reads) == before + (not settled) and len(look_ups) == 1
        if not settled:  # a prefill came between
            bed.batch = replace(bed.batch, others=bed.batch.others + 1)
        last = bed.plan()


def test_paths_are_read_again_only_after_a_failure(bed: StepBed) -> None:
    first = bed.settle()
    bed.steps.private(known(bed.lens))  # has a working memory of its own
    bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    assert shared_tokens(bed.plan()) == SHARED
    grown, bed.lens = bed.lens, bed.lens - 250  # shorter than the paths
    assert shared_tokens(bed.plan()) == 0
    assert bed.stats.fallbacks == {"sharing not usable": 1}
    bed.lens = grown
    assert shared_tokens(bed.plan()) == SHARED


def test_a_request_that_comes_shares_with_the_settled_at_once(bed: StepBed) -> None:
    """Also where it splits a node of theirs: their paths are not remembered."""
    text = bed.system + bed.tools[0] + bed.text(400)
    bed.use([*bed.reqs, bed.cache.admit(text)])
    assert shared_tokens(bed.settle()) == SHARED
    bed.use([*bed.reqs, bed.cache.admit(text[:-100] + bed.text(OWN))])
    second = bed.plan()
    assert shared_tokens(second) == SHARED + 300
    bed.check(second)


@pytest.mark.parametrize("pause", ["flush", "prompt logprobs"])
@pytest.mark.parametrize("age", [0, RECHECK_STEPS - 10])
def test_requests_that_a_pause_gave_the_same_rows_share_as_they_stand_then(
    bed: StepBed, pause: str, age: int
) -> None:
    """Also before their prefill is processed, when each has slots of its own, and also where some
    would have been read again anyway."""
    bed.settle()
    for _ in range(age):
        bed.plan()
    rows, in_order = bed.batch.rows, sorted(bed.reqs, key=lambda req: req.kv.req_pool_idx)
    retract(bed.cache, in_order)
    if pause == "flush":
        flush(bed.cache)
    bed.cache.prefill(in_order, most=0)
    bed.use(bed.reqs)
    assert torch.equal(bed.batch.rows, rows)
    bed.check(bed.plan())
    bed.cache.process(bed.reqs)
    bed.batch = replace(bed.batch, others=1)
    for _ in range(SETTLE_STEPS + 1):
        plan = bed.plan()
        bed.check(plan)
    assert shared_tokens(plan) == SHARED and not bed.stats.fallbacks


@pytest.mark.parametrize("what", ["released", "gone"])
def test_a_settled_node_that_is_gone_costs_the_others_nothing(bed: StepBed, what: str) -> None:
    """Of the batch all is read anew, in the same step, if the tree does not know a node of it."""
    bed.settle()
    bed.plan()
    req = bed.reqs[3]
    lock, req.lock = req.lock, None
    if what == "gone":
        bed.cache.tree.unlock(lock)
        bed.cache.tree.evict(EvictParams(num_tokens=OWN))
    # Half of them are new: the tree is asked for the paths of all.
    bed.use([*bed.reqs[2:4], bed.admit(0), bed.admit(0)])
    plan = bed.plan()
    bed.check(plan)
    assert shared_tokens(plan) == SYSTEM + TOOL and not bed.stats.fallbacks


# Several micro-batches that take turns, as under pipeline parallelism.


class Turns:
    """The bed's requests in so many micro-batches."""

    def __init__(self, bed: StepBed, count: int) -> None:
        bed.steps = StepPlanner(TARGET, bed.stats, count)
        self.bed = bed
        self.batches = [bed.cache.batch(bed.reqs[i::count]) for i in range(count)]

    def plan(self, turn: int) -> Plan:
        batch, lens = self.batches[turn]
        plan = self.bed.steps.plan(batch, known(lens))
        assert plan is not None and plan.fits(lens.data_ptr(), len(lens))
        self.bed.check(plan, batch)
        return plan


@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_that_take_turns_keep_their_plans(
    bed: StepBed, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count_calls(monkeypatch, "read_handles")
    turns = Turns(bed, count)
    plans = [turns.plan(turn) for turn in range(count)]
    for step in range(RECHECK_STEPS - 2):
        assert all(turns.plan(turn) is plan for turn, plan in enumerate(plans))
        for _, lens in turns.batches:
            lens += step % 2
    # Also where some are left out, as while they prefill.
    assert all(turns.plan(turn) is plans[turn] for turn in reversed(range(count)))
    assert len({id(plan) for plan in plans}) == count == bed.stats.plans_made
    assert bed.stats.plans_reused == count * (RECHECK_STEPS - 1)
    # Each is read until it has settled, as one batch alone would be.
    assert len(reads) == count * (SETTLE_STEPS + 1)


@pytest.mark.parametrize(
    ("pp_size", "depth", "expected"), [(1, 0, 1), (1, 2, 1), (2, 0, 2), (4, 3, 7)]
)
def test_there_are_as_many_micro_batches_as_sglangs_loop_for_pipeline_parallelism_has(
    pp_size: int, depth: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one stage SGLang runs another loop, and has one batch."""
    parallel = SimpleNamespace(pp_size=pp_size, pp_async_batch_depth=depth)
    for module in (runtime_context, scheduler_pp_mixin):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    assert micro_batches() == expected
    if pp_size > 1:
        spec = SimpleNamespace(is_none=lambda: True)
        loop = SimpleNamespace(spec_algorithm=spec, device="cpu", device_module=None)
        scheduler_pp_mixin.SchedulerPPMixin.init_pp_loop_state(loop)
        assert len(loop.mbs) == expected
