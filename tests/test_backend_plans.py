# SPDX-License-Identifier: Apache-2.0
"""Which plan the backend gives its executor for a step, and when the snapshot is taken: with
padding, on idle ranks, and for batches that the scheduler has not announced. No server, no GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import QUERIES, BackendBed
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.slots import SlotMismatch


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)


def test_the_snapshot_is_captured_or_taken_once(bed: BackendBed) -> None:
    bed.capture()
    assert bed.executor.snapshots == 1
    bed.step()  # the replay of the graph repeats it
    assert bed.executor.snapshots == 1
    bed.step(graph=False)
    bed.layer(0)
    assert bed.executor.snapshots == 2
    bed.layer(1, window=8)  # prepares the base
    bed.step(graph=False)  # as does this, now that a layer is the base's
    assert bed.executor.snapshots == 3
    bed.step(mode=ForwardMode.EXTEND, graph=False)
    assert bed.executor.snapshots == 3


def test_padding_is_not_planned_and_steady_steps_keep_their_plan(bed: BackendBed) -> None:
    bed.capture(0, 3, 1)
    for padding in (0, 3, 1):
        bed.step(padding=padding)
    assert len({id(plan) for plan in bed.executor.plans[3:]}) == 1
    assert bed.executor.plans[-1].num_queries == QUERIES
    assert bed.executor.plans[-1].num_shared_items > 0
    stats = bed.backend._stats
    assert (stats.decode_steps, stats.plans_made, stats.plans_reused) == (3, 1, 2)
    assert 0 < stats.plan_ns < stats.host_ns


def test_rows_that_pad_an_eager_batch_are_private(bed: BackendBed) -> None:
    """Data parallel attention without a graph pads all ranks' batches to one size."""
    bed.step(graph=False, padding=3)
    (plan,) = bed.executor.plans
    assert plan.num_queries == QUERIES + 3
    shared = plan.items[plan.items["num_queries"] > 1]
    assert shared["num_queries"].tolist() == [QUERIES]
    assert bed.backend._stats.private_requests == {"row without a request": 3}


def test_an_idle_rank_replays_an_empty_plan(bed: BackendBed) -> None:
    """Data parallel attention: a rank without requests replays with the others."""
    bed.capture()
    for _ in range(2):
        assert bed.step(idle=True, padding=4) == []
    first, second = bed.executor.plans[1:]
    assert first is second  # nothing to copy to the device
    assert first.num_queries == first.num_items == 0
    assert bed.fallbacks == {} and bed.backend._stats.decode_steps == 0
    bed.step()
    assert bed.executor.plans[-1].num_queries == QUERIES


@pytest.mark.parametrize("layers", [[0], [0, 1]], ids=["ours", "one the base's"])
def test_a_replay_that_nobody_announced_shares_nothing(bed: BackendBed, layers: list[int]) -> None:
    """The graph runs our layers in any case, so they get a plan in which each query reads alone."""
    bed.step(capture=True)
    for layer in layers:
        bed.layer(layer, window=8 if layer else -1)
    bed.capture(2)
    asked = [] if layers == [0] else ["out graph"]
    assert bed.step() == asked
    assert bed.executor.plans[-1].num_shared_items > 0
    assert bed.step(announced=False, padding=2) == asked
    plan = bed.executor.plans[-1]
    assert (plan.num_queries, plan.num_shared_items) == (QUERIES, 0)
    assert bed.fallbacks["graph without a batch from the scheduler"] == 1
    assert bed.layer(0) == []


def test_a_batch_that_the_base_served_is_not_planned_later(bed: BackendBed) -> None:
    bed.capture()
    bed.step(spec_info=object())
    bed.step(announced=False)
    assert bed.executor.plans[-1].num_shared_items == 0
    assert bed.fallbacks["graph without a batch from the scheduler"] == 1


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.IDLE], ids=["extend", "idle"])
def test_a_batch_that_never_ran_is_not_planned_later(bed: BackendBed, mode: ForwardMode) -> None:
    """What the scheduler announces next takes its place."""
    bed.capture()
    bed.announce(ForwardMode.DECODE)
    bed.announce(mode)
    bed.step(announced=False)
    assert bed.executor.plans[-1].num_shared_items == 0
    assert bed.fallbacks == {"graph without a batch from the scheduler": 1}


@pytest.mark.parametrize("graph", [True, False])
def test_check_mode_compares_slots_in_every_step(
    graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in (True, False):
        bed = BackendBed(monkeypatch, check=check)
        bed.capture()
        bed.executor.plans.clear()
        bed.step(graph=graph)
        bed.cache.table.req_to_token[bed.live.rows[2], 7] += 1
        with pytest.raises(SlotMismatch, match="at token 7") if check else nullcontext():
            bed.step(graph=graph)  # with the plan of the step before
        assert bed.executor.plans[0] is bed.executor.plans[1]
