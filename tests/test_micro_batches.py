# SPDX-License-Identifier: Apache-2.0
"""One step planner for several micro-batches that take turns, as under pipeline parallelism. No
server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.steps import TARGET, StepBed, count_calls

from benchmarks.host.live import CACHES
from sglang_pat.planner import Plan
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS, check_plan
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> StepBed:
    return StepBed(request.param)


def plan_of(bed: StepBed, turn: tuple[LiveBatch, torch.Tensor]) -> Plan | None:
    batch, lens = turn
    return bed.steps.plan(batch, known(lens))


def take_turns(bed: StepBed, micro_batches: int) -> list[tuple[LiveBatch, torch.Tensor]]:
    """The bed's requests in so many micro-batches, as pipeline parallelism has them."""
    bed.steps = StepPlanner(TARGET, bed.stats, micro_batches)
    return [bed.cache.batch(bed.reqs[i::micro_batches]) for i in range(micro_batches)]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_that_take_turns_keep_their_plans(
    bed: StepBed, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count_calls(monkeypatch, "read_handles")
    turns = take_turns(bed, micro_batches)
    plans: list[Plan | None] = [None] * micro_batches
    for step in range(RECHECK_STEPS):
        for i, (batch, lens) in enumerate(turns):
            plan = bed.steps.plan(batch, known(lens))
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

    from sglang_pat.srt.step import micro_batches

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
