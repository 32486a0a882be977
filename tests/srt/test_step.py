# SPDX-License-Identifier: Apache-2.0
"""What the step planner makes of SGLang's own caches and requests: the plan of a step, when it is
kept, what is read for it, what it falls back to, and check mode. No server."""

from __future__ import annotations

import logging
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
    shared_tokens,
    sharing_queries,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from benchmarks.host.live import CACHES
from sglang_pat.planner import Plan
from sglang_pat.slots import SlotMismatch
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS, check_plan
from sglang_pat.srt.step import StepClock, StepPlanner, known, micro_batches
from sglang_pat.stats import Stats


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> StepBed:
    return StepBed(request.param)


def test_paths_of_the_live_tree_are_packed(bed: StepBed) -> None:
    plan = bed.plan()
    assert shared_tokens(plan) == SYSTEM + 2 * TOOL
    bed.check(plan)
    private = QUERIES * (OWN + 1)
    assert bed.stats.kv_tokens_read == SYSTEM + 2 * TOOL + private
    assert bed.stats.kv_tokens_unpacked == QUERIES * (SYSTEM + TOOL + OWN + 1)
    assert (bed.stats.decode_steps, bed.stats.packed_steps) == (1, 1)
    assert not bed.stats.fallbacks and not bed.stats.private_requests


def test_a_plan_is_reused_while_tails_grow(bed: StepBed) -> None:
    first = bed.plan()
    for _ in range(3):
        bed.lens += 1
        assert bed.plan() is first
    assert (bed.stats.plans_made, bed.stats.plans_reused) == (1, 3)


def test_steady_steps_make_few_plans() -> None:
    bed = StepBed("rust", queries=64)
    for _ in range(256):
        bed.plan()
        bed.lens += 1
    assert bed.stats.plans_made <= 8
    assert bed.stats.plans_made + bed.stats.plans_reused == bed.stats.decode_steps == 256


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
    assert second is not first
    assert bed.stats.plans_made == 2
    if what == "protected":
        assert 3 in sharing_queries(first, start=SYSTEM)
        assert 3 not in sharing_queries(second, start=SYSTEM)


def test_a_batch_of_the_same_shape_after_a_flush_makes_a_new_plan(bed: StepBed) -> None:
    """SGLang gives no node handle twice, so the plan of before the flush cannot be taken for one
    of the new batch."""
    first = bed.plan()
    nodes = [getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs]
    bed.cache.flush()
    bed.reqs = [bed.admit(i // 4) for i in range(QUERIES)]
    assert not set(nodes) & {getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs}
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
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


def test_a_node_that_is_gone_costs_the_sharing_only(
    bed: StepBed, caplog: pytest.LogCaptureFixture
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


def test_requests_that_cannot_be_read_cost_the_sharing_only(bed: StepBed) -> None:
    bed.batch = LiveBatch([object()] * QUERIES, bed.cache.tree, bed.batch.rows)
    assert bed.plan().num_shared_items == 0
    assert bed.stats.fallbacks == {"requests not readable": 1}


def test_a_core_that_cannot_be_looked_into_costs_the_sharing_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Foreign:
        """A tree core of somebody else's, with its nodes as hidden as those of SGLang's."""

        @property
        def root_node(self) -> None:
            raise NotImplementedError

    bed = StepBed("rust")
    with monkeypatch.context() as patch:
        patch.setattr(bed.cache.tree, "tree_core", Foreign())
        for _ in range(2):
            plan = bed.plan()
            bed.check(plan)
            assert plan.num_shared_items == 0
    assert bed.stats.fallbacks == {"requests not readable": 2}
    assert shared_tokens(bed.plan()) == SYSTEM + 2 * TOOL


def test_a_batch_beyond_the_target_is_left_to_the_base(bed: StepBed) -> None:
    many = TARGET.max_queries + 1
    lens = torch.ones(many, dtype=torch.int64)
    assert bed.steps.plan(bed.batch, known(lens)) is None
    assert bed.stats.fallbacks["batch not plannable"] == 1
    assert bed.stats.decode_steps == 0


def test_a_private_plan_is_kept_while_it_fits(bed: StepBed) -> None:
    lens = bed.lens.clone()
    first = bed.steps.private(known(lens))
    assert first.num_shared_items == 0
    assert bed.steps.private(known(lens + 1)) is first
    longer = lens + 10_000
    second = bed.steps.private(known(longer))
    assert second is not first and second.fits(longer.data_ptr(), len(longer))
    assert bed.steps.private(known(longer[:3])).num_queries == 3
    assert bed.stats.decode_steps == 0


def test_the_log_says_once_where_prefixes_are_looked_for(
    bed: StepBed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    bed.plan()
    kind = bed.steps.view.kind
    bed.plan()
    bed.batch = replace(bed.batch, tree_cache=object())
    bed.plan()
    found, unknown = (text for text in caplog.messages if "looks for shared prefixes" in text)
    assert kind and found.endswith(f"in SGLang's radix cache ({kind})")
    assert unknown.endswith("nowhere: unknown cache object")


@pytest.mark.parametrize("token", [5, SYSTEM + 5, SYSTEM + TOOL + 5])
def test_check_mode_names_the_wrong_slot(bed: StepBed, token: int) -> None:
    plan = bed.plan()
    row = int(bed.batch.rows[3])
    right = int(bed.cache.table.req_to_token[row, token])
    bed.cache.table.req_to_token[row, token] = right + 1
    rid = bed.reqs[3].rid
    with pytest.raises(
        SlotMismatch, match=rf"{rid} .*slot {right + 1} at token {token}, .* slot {right}"
    ):
        bed.check(plan)


# What is read. A batch that has not changed for more than ``SETTLE_STEPS`` decode steps is settled:
# it is not read again until it changes, a prefill runs, or ``RECHECK_STEPS`` steps have passed.


def test_a_settled_batch_is_not_read(bed: StepBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a prefill runs, the batch changes, or ``RECHECK_STEPS`` steps have passed."""
    reads = count_calls(monkeypatch, "read_handles")
    first = bed.settle()
    before = len(reads)
    bed.reqs[3].kv.cache_protected_len -= OWN + TOOL
    assert bed.plan() is first and len(reads) == before
    bed.batch = replace(bed.batch, others=1)  # a prefill
    bed.plan()
    assert len(reads) == before + 1
    bed.settle()
    before = len(reads)
    bed.batch = replace(bed.batch, reqs=bed.reqs[::-1], rows=bed.batch.rows.flip(0))
    second = bed.plan()
    assert second is not first and len(reads) == before + 1
    bed.settle()
    before = len(reads)
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert len(reads) == before + 1
    assert third is not second and third.kv_tokens_read(0) > first.kv_tokens_read(0)


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
    bed: StepBed, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, look_ups = count_calls(monkeypatch, "read_handles"), count_calls(monkeypatch, "plan")
    first = bed.settle() if settled else bed.plan()
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


def test_paths_are_read_again_only_after_a_failure(
    bed: StepBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_ups = count_calls(monkeypatch, "plan")
    first = bed.settle()
    bed.steps.private(known(bed.lens))  # has a working memory of its own
    bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    assert shared_tokens(bed.plan()) == shared_tokens(first)
    assert len(look_ups) == 1
    grown, bed.lens = bed.lens, bed.lens - 250  # shorter than the paths
    assert shared_tokens(bed.plan()) == 0
    assert bed.stats.fallbacks == {"sharing not usable": 1}
    bed.lens = grown
    assert shared_tokens(bed.plan()) == shared_tokens(first)
    assert len(look_ups) == 2


def test_a_request_that_comes_shares_with_the_settled_at_once(bed: StepBed) -> None:
    """Also where it splits a node of theirs: their paths are not remembered."""
    text = bed.system + bed.tools[0] + bed.text(400)
    bed.reqs.append(bed.cache.admit(text))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    assert shared_tokens(bed.settle()) == SYSTEM + 2 * TOOL
    bed.reqs.append(bed.cache.admit(text[:-100] + bed.text(OWN)))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    second = bed.plan()
    assert shared_tokens(second) == SYSTEM + 2 * TOOL + 300
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
    bed.cache.retract(in_order)
    if pause == "flush":
        bed.cache.flush()
    bed.cache.prefill(in_order, most=0)
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    assert torch.equal(bed.batch.rows, rows)
    bed.check(bed.plan())
    bed.cache.process(bed.reqs)
    bed.batch = replace(bed.batch, others=1)
    for _ in range(SETTLE_STEPS + 1):
        plan = bed.plan()
        bed.check(plan)
    assert shared_tokens(plan) == SYSTEM + 2 * TOOL
    assert not bed.stats.fallbacks


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
    bed.batch, bed.lens = bed.cache.batch([*bed.reqs[2:4], bed.admit(0), bed.admit(0)])
    plan = bed.plan()
    bed.check(plan)
    assert shared_tokens(plan) == SYSTEM + TOOL
    assert not bed.stats.fallbacks


# Several micro-batches that take turns, as under pipeline parallelism.


def plan_of(bed: StepBed, turn: tuple[LiveBatch, torch.Tensor]) -> Plan | None:
    batch, lens = turn
    return bed.steps.plan(batch, known(lens))


def take_turns(bed: StepBed, count: int) -> list[tuple[LiveBatch, torch.Tensor]]:
    """The bed's requests in so many micro-batches, as pipeline parallelism has them."""
    bed.steps = StepPlanner(TARGET, bed.stats, count)
    return [bed.cache.batch(bed.reqs[i::count]) for i in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_that_take_turns_keep_their_plans(
    bed: StepBed, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count_calls(monkeypatch, "read_handles")
    turns = take_turns(bed, count)
    plans: list[Plan | None] = [None] * count
    for step in range(RECHECK_STEPS):
        for i, (batch, lens) in enumerate(turns):
            plan = bed.steps.plan(batch, known(lens))
            assert plan is not None and bed.steps.made == (step == 0)
            assert plans[i] is None or plan is plans[i]
            plans[i] = plan
            table = bed.cache.table.req_to_token
            check_plan(plan, batch.reqs, bed.steps.view, table, batch.rows)
            lens += step % 2
    assert len({id(plan) for plan in plans}) == count
    assert bed.stats.plans_made == count
    assert bed.stats.plans_reused == count * (RECHECK_STEPS - 1)
    # Each is read until it has settled, as one batch alone would be.
    assert len(reads) == count * (SETTLE_STEPS + 1)


def test_a_micro_batch_that_changes_leaves_the_others_their_plans(bed: StepBed) -> None:
    turns = take_turns(bed, 2)
    for _ in range(SETTLE_STEPS + 2):
        first, second = (bed.steps.plan(batch, known(lens)) for batch, lens in turns)
    turns[0] = bed.cache.batch(bed.reqs[2::2])  # one of its requests is done
    changed = plan_of(bed, turns[0])
    assert bed.steps.made and changed is not first
    assert plan_of(bed, turns[1]) is second
    assert plan_of(bed, turns[0]) is changed
    assert bed.stats.plans_made == 3


def test_an_outgrown_plan_is_made_from_the_paths_of_its_own_micro_batch(bed: StepBed) -> None:
    turns = take_turns(bed, 2)
    for _ in range(SETTLE_STEPS + 2):
        for batch, lens in turns:
            plan = bed.steps.plan(batch, known(lens))
    assert plan is not None
    batch, lens = turns[0]
    lens += 600  # beyond what its plan holds for
    again = bed.steps.plan(batch, known(lens))
    assert bed.steps.made and again is not None and again.num_queries == len(batch.reqs)
    assert again.fits(lens.data_ptr(), len(lens))
    check_plan(again, batch.reqs, bed.steps.view, bed.cache.table.req_to_token, batch.rows)
    assert plan_of(bed, turns[1]) is plan


def test_micro_batches_may_have_caches_of_their_own(bed: StepBed) -> None:
    """What check mode compares with is the cache of the batch that was planned last."""
    other = StepBed("python")
    turns = take_turns(bed, 2)
    turns[1] = (other.batch, other.lens)
    for batch, lens in turns * 2:
        plan = bed.steps.plan(batch, known(lens))
        assert plan is not None and bed.steps.view.tree_cache is batch.tree_cache
    assert bed.stats.plans_made == 2


def test_zero_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batches is 0, must be 1 or more"):
        StepPlanner(TARGET, Stats(), 0)


@pytest.mark.parametrize(
    ("pp_size", "depth", "expected"), [(1, 0, 1), (1, 2, 1), (2, 0, 2), (4, 3, 7)]
)
def test_there_are_as_many_micro_batches_as_sglangs_scheduler_loop_has(
    pp_size: int, depth: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop for pipeline parallelism, that is: with one stage SGLang runs another loop, and has
    one batch."""
    from sglang.srt import runtime_context
    from sglang.srt.managers import scheduler_pp_mixin

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


# Whether a new plan was hidden behind the GPU: asked of an event, counted, shown.


class FakeEvent:
    """An event of a GPU whose earlier work lasts until ``done`` is set."""

    done = False
    records = 0

    def record(self) -> None:
        type(self).records += 1

    def query(self) -> bool:
        assert self.records, "asked before it was recorded"
        return self.done


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    fake = type("Event", (FakeEvent,), {})
    monkeypatch.setattr(torch.cuda, "Event", fake)
    return fake


def test_a_preparation_is_hidden_while_the_gpu_is_busy(event: type[FakeEvent]) -> None:
    clock = StepClock(on_gpu=True)
    clock.start()
    assert event.records == 1
    assert clock.is_hidden()
    event.done = True
    assert not clock.is_hidden()
    assert clock.elapsed_ns() > 0


def test_nothing_is_hidden_without_a_gpu(event: type[FakeEvent]) -> None:
    clock = StepClock(on_gpu=False)
    clock.start()
    assert not clock.is_hidden()
    assert not event.records


def test_hidden_plans_are_not_exposed() -> None:
    stats = Stats()
    stats.plans_made = 2
    stats.host_time(300, made=True, hidden=True)
    stats.host_time(500, made=True, hidden=False)
    stats.host_time(70, made=False, hidden=False)  # a step that kept its plan exposes none
    counted = stats.snapshot()
    assert counted["hidden_plans"] == 1
    assert counted["exposed_seconds"] == pytest.approx(500e-9)
    assert counted["plan_seconds"] == pytest.approx(800e-9)
    assert "1 of 2 plans hidden behind the GPU" in stats.summary()
