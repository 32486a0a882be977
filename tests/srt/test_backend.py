# SPDX-License-Identifier: Apache-2.0
"""The backend over a base and an executor that record what is asked of them: which steps are
planned and with what, what the base prepares and serves, and what is counted. No server, no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import ASKED, QUERIES, TARGET, BackendBed
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.planner import Planner
from sglang_pat.slots import SlotMismatch

OURS = {0: "", 1: ""}
PRE, IN, POST, UNKNOWN = SharedReadEnds
CAPTURE, REPLAY, EAGER = ASKED.values()


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)


# Which forwards the base prepares: those with a layer that it serves, and all until layers are
# known.


def test_replays_of_our_layers_need_no_metadata_of_the_base(bed: BackendBed) -> None:
    assert bed.step("capture") == CAPTURE
    assert bed.layer(0) == bed.layer(1, sinks=None) == []
    bed.capture(2)
    assert bed.step() == bed.step(padding=2) == []
    assert bed.step("capture") == CAPTURE  # a capture always, in case the base serves a layer
    assert bed.step(mode=ForwardMode.EXTEND) == REPLAY
    assert bed.step("eager", mode=ForwardMode.EXTEND) == EAGER
    assert bed.stats.base_forwards == {"extend": 2}
    assert not bed.stats.fallbacks and not bed.stats.base_layers


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"window": 8}, "a sliding window"),
        ({"aux": 1}, "arguments aux"),
        # Parts of queries are for latents alone.
        ({"q_rope": torch.zeros(1), "k_rope": torch.zeros(1)}, "arguments k_rope, q_rope"),
    ],
)
def test_the_base_is_prepared_for_a_layer_that_it_serves(
    bed: BackendBed, arguments: dict[str, Any], reason: str
) -> None:
    bed.step("capture")
    assert bed.layer(0) == []
    assert bed.layer(1, **arguments) == ["layer"]
    assert bed.step() == bed.step() == REPLAY
    assert bed.stats.base_layers == {reason: 3}  # in the capture and in both replays
    assert not bed.stats.fallbacks  # what the layer is like is no failure of the step


def test_a_server_whose_last_layer_is_lost_to_the_base_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was captured stays so: every replay gets a plan."""
    bed = BackendBed(monkeypatch, OURS)
    bed.capture()
    bed.layer(0, aux=1)
    assert not bed.serving
    bed.layer(1, aux=1)
    assert bed.serving == [False]
    plans = len(bed.executor.plans)
    assert bed.step("eager") == EAGER and len(bed.executor.plans) == plans
    assert bed.step() == REPLAY
    assert len(bed.executor.plans) == plans + 1 and bed.plan.num_queries == QUERIES


def test_eager_steps_prepare_the_base_until_the_layers_are_known(bed: BackendBed) -> None:
    assert bed.step("eager") == EAGER and bed.layer(0) == []
    assert bed.step("eager") == bed.layer(0) == []
    # A layer that was not known: the base is prepared at once, and beforehand from then on.
    assert bed.layer(1, window=8) == [*EAGER, "layer"]
    assert bed.layer(2, window=8) == ["layer"]
    assert bed.step("eager") == EAGER and bed.layer(1, window=8) == ["layer"]


def test_without_a_layer_of_ours_nothing_is_planned_or_claimed(bed: BackendBed) -> None:
    bed.step("capture")
    assert bed.layer(0, window=8) == bed.layer(1, window=8) == ["layer"]
    plans = len(bed.executor.plans)
    assert bed.step() == REPLAY and bed.step("eager") == EAGER
    assert bed.layer(0, window=8) == ["layer"]
    bed.use(bed.all[:1])  # counts as the others do
    bed.step("eager")
    assert len(bed.executor.plans) == plans and bed.stats.decode_steps == 0
    assert bed.stats.base_layers == {"a sliding window": 8}
    assert not bed.stats.fallbacks and not bed.stats.base_forwards


# Which plan the executor gets for a step, and when the snapshot is taken.


def test_the_snapshot_is_captured_or_taken_once(bed: BackendBed) -> None:
    bed.capture()
    bed.step()  # the replay of the graph repeats it
    assert len(bed.executor.snapshots) == 1
    bed.step("eager")
    bed.layer(0)
    assert len(bed.executor.snapshots) == 2
    bed.layer(1, window=8)  # prepares the base
    bed.step("eager")  # as does this, now that a layer is the base's
    bed.step("eager", mode=ForwardMode.EXTEND)
    assert len(bed.executor.snapshots) == 3


def test_padding_is_not_planned_and_steady_steps_keep_their_plan(bed: BackendBed) -> None:
    bed.capture(0, 3, 1)
    for padding in (0, 3, 1):
        bed.step(padding=padding)
    assert len({id(plan) for plan in bed.executor.plans[3:]}) == 1
    assert bed.plan.num_queries == QUERIES and bed.plan.num_shared_items > 0
    stats = bed.stats
    assert (stats.decode_steps, stats.plans_made, stats.plans_reused) == (3, 1, 2)
    assert 0 < stats.plan_seconds < stats.host_seconds


def test_rows_that_pad_an_eager_batch_are_private(bed: BackendBed) -> None:
    """Data parallel attention without a graph pads all ranks' batches to one size."""
    bed.step("eager", padding=3)
    assert bed.plan.num_queries == QUERIES + 3
    queries = bed.plan.items["num_queries"]
    assert queries[queries > 1].tolist() == [QUERIES]
    assert bed.stats.private_requests == {"row without a request": 3}


def test_an_idle_rank_replays_an_empty_plan(bed: BackendBed) -> None:
    """Data parallel attention: a rank without requests replays with the others."""
    bed.capture()
    for _ in range(2):
        assert bed.step(idle=True, padding=4) == []
    first, second = bed.executor.plans[1:]
    assert first is second  # nothing to copy to the device
    assert first.num_queries == first.num_items == 0
    assert not bed.stats.fallbacks and bed.stats.decode_steps == 0
    bed.step()
    assert bed.plan.num_queries == QUERIES


@pytest.mark.parametrize("instead", ["", "served by the base", "extend", "idle"])
def test_a_replay_that_nobody_announced_shares_nothing(bed: BackendBed, instead: str) -> None:
    """The graph runs our layers in any case, so they get a plan in which each query reads alone:
    not that of a batch that the base served, or that the scheduler announced another after."""
    bed.capture(0, 2)
    assert bed.step() == [] and bed.plan.num_shared_items > 0
    if instead == "served by the base":
        bed.step(spec_info=object())
    elif instead:
        bed.announce(ForwardMode.DECODE)
        bed.announce(ForwardMode[instead.upper()])
    assert bed.step(announced=False, padding=2) == []
    assert (bed.plan.num_queries, bed.plan.num_shared_items) == (QUERIES, 0)
    assert bed.stats.fallbacks["graph without a batch from the scheduler"] == 1
    assert bed.layer(0) == []


@pytest.mark.parametrize("how", ["replay", "eager"])
@pytest.mark.parametrize("check", [True, False])
def test_check_mode_compares_slots_in_every_step(
    how: str, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = BackendBed(monkeypatch, check=check)
    bed.capture()
    bed.step(how)
    bed.cache.table.req_to_token[bed.live.rows[2], 7] += 1
    with pytest.raises(SlotMismatch, match="at token 7") if check else nullcontext():
        bed.step(how)
    assert bed.executor.plans[1] is bed.executor.plans[2]


# A graph that has captured a layer of pat is never replayed without a plan for its batch.


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize("announced", [True, False])
def test_a_batch_that_cannot_be_planned_runs_the_plan_of_its_capture(
    bed: BackendBed, announced: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("cannot be planned")

    bed.capture(2)
    with monkeypatch.context() as patch:
        for name in ("plan", "plan_from_handles", "plan_again"):
            patch.setattr(Planner, name, fail)
        bed.executor.plans.clear()
        for count in (1, 2):
            assert bed.step(padding=2, announced=announced) == []
            assert len(bed.executor.plans) == count
            lens = torch.cat([bed.lens, torch.ones(2, dtype=torch.int64)])
            assert bed.plan.fits(lens.data_ptr(), len(lens)) and bed.plan.num_shared_items == 0
            bed.lens += 100
        assert bed.step("eager") == EAGER and bed.layer(0) == ["layer"]
    assert bed.stats.fallbacks["batch not plannable"] == 3
    assert bed.stats.decode_steps == 0
    bed.step(padding=2)
    assert bed.plan.num_shared_items > 0


def test_a_graph_for_sequences_too_long_to_plan_is_the_bases(bed: BackendBed) -> None:
    table = torch.empty((QUERIES, 1 << 29), dtype=torch.int32, device="meta")
    bed.backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    assert bed.step("capture") == CAPTURE and bed.layer(0) == ["layer"]
    assert bed.step() == REPLAY
    assert bed.stats.fallbacks == {"batch not plannable": 2}  # in the capture and in the replay
    assert all(plan.num_shared_items == 0 for plan in bed.executor.plans)


def test_a_batch_without_memory_for_its_slots(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a graph it is the base's; a replay has the list in the host's memory."""
    bed.capture(2)
    bed.executor.room = 0
    assert bed.step("eager") == EAGER and bed.layer(0) == ["layer"]
    assert bed.step(padding=2) == [] and bed.executor.on_host == 1
    assert bed.plan.num_shared_items > 0 and bed.stats.packed_steps == 2
    assert bed.stats.fallbacks == {"no memory for the slots": 2}
    for part in (f"{QUERIES} requests", "1 MB is free", "--mem-fraction-static"):
        assert part in caplog.text
    del bed.executor.room
    assert bed.step("eager") == bed.layer(0) == bed.step(padding=2) == []
    assert bed.executor.on_host == 1


@pytest.mark.parametrize(
    ("mode", "of_base", "expected"),
    [
        (ForwardMode.DECODE, PRE, IN),
        (ForwardMode.TARGET_VERIFY, PRE, IN),
        (ForwardMode.DECODE, POST, POST),
        (ForwardMode.TARGET_VERIFY, UNKNOWN, UNKNOWN),
        (ForwardMode.EXTEND, PRE, PRE),
    ],
)
def test_rows_are_not_written_to_before_the_snapshot(
    bed: BackendBed, mode: ForwardMode, of_base: SharedReadEnds, expected: SharedReadEnds
) -> None:
    bed.backend.read_ends = of_base
    assert bed.backend.shared_read_ends(mode) is expected


# Which batches are the base's, and what they are counted as.


def test_an_eager_batch_beyond_the_workspace_is_left_to_the_base(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    """The padding of data parallel attention makes it too large."""
    bed.capture()
    room = TARGET.max_queries
    for _ in range(2):
        assert bed.step("eager", padding=room) == EAGER and bed.layer(0) == ["layer"]
    assert bed.stats.fallbacks == {"batch beyond the workspace": 2}
    assert caplog.text.count(f" {QUERIES + room} requests, padding included, is beyond the") == 1
    assert bed.step("eager", padding=room - QUERIES) == bed.layer(0) == []  # one that just fits


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": ForwardMode.EXTEND}, "extend"),
        ({"mode": ForwardMode.MIXED}, "mixed"),
        ({"mode": ForwardMode.TARGET_VERIFY}, "target_verify"),
        ({"mode": ForwardMode.DRAFT_EXTEND_V2}, "draft_extend_v2"),
        ({"spec_info": object()}, "speculative decoding"),
        ({"encoder_lens": torch.ones(QUERIES)}, "encoder lengths in the batch"),
    ],
)
def test_a_batch_that_is_no_plain_decode_is_left_to_the_base(
    bed: BackendBed, how: str, fields: dict[str, Any], reason: str
) -> None:
    """It comes between steps of ``pat``, and changes neither their plan nor their layers."""
    bed.step("capture")
    assert bed.layer(0) == bed.step("eager") == []
    before = len(bed.executor.plans), len(bed.executor.snapshots)
    assert bed.step(how, **fields) == ASKED[how] and bed.layer(0) == ["layer"]
    assert (len(bed.executor.plans), len(bed.executor.snapshots)) == before
    assert bed.step("eager") == bed.layer(0) == []
    counts = [bed.stats.fallbacks, bed.stats.base_forwards]
    if reason in ("extend", "draft_extend_v2"):
        counts.reverse()
    assert counts == [{reason: 1}, {}]


def test_an_eager_batch_that_nobody_announced_is_left_to_the_base(bed: BackendBed) -> None:
    """Before the scheduler's first decode step it is a warm-up; later it counts as a fallback, or
    with one row as an idle rank's of data parallel attention."""
    bed.step("capture")
    assert bed.layer(0) == []
    assert bed.step("eager", announced=False) == EAGER
    assert bed.stats.base_forwards == {"warm_up": 1} and not bed.stats.fallbacks
    assert bed.step("eager") == []
    plans = len(bed.executor.plans)
    assert bed.step("eager", announced=False) == EAGER and bed.layer(0) == ["layer"]
    assert len(bed.executor.plans) == plans
    bed.use(bed.all[:1])
    assert bed.step("eager", announced=False) == EAGER
    assert bed.stats.fallbacks == {"no batch from the scheduler": 1}
    assert bed.stats.base_forwards == {"warm_up": 1, "idle": 1}


@pytest.mark.parametrize("how", ["replay", "eager"])
def test_prefills_made_of_decode_steps_count_as_the_scheduler_meant_them(
    bed: BackendBed, how: str
) -> None:
    """Data parallel attention makes a decode step a prefill: before ``init_new`` if all ranks
    replay a prefill graph, and an idle rank's by padding, after it."""
    extend = {"mode": ForwardMode.EXTEND}
    for mode, decoding_reqs in (
        (ForwardMode.EXTEND, bed.reqs),  # as ScheduleBatch.convert_decode_to_extend
        (ForwardMode.DECODE, None),
        (ForwardMode.IDLE, None),
    ):
        bed.announce(mode, decoding_reqs)
        bed.step(how, announced=False, **extend)
    assert bed.stats.fallbacks == {"decode": 2} and bed.stats.base_forwards == {"idle": 1}
    # Nor does a forward without a batch count as the one before it.
    bed.step(how, announced=False, **extend)
    assert bed.stats.fallbacks == {"decode": 2}
    assert bed.stats.base_forwards == {"idle": 1, "extend": 1}


# Batches of fewer rows than ``min_batch``, by default of one: the base's, in graphs and without.


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize("min_batch", [1, 2, 4])
def test_the_threshold_decides_alike_in_capture_replay_and_eager(
    monkeypatch: pytest.MonkeyPatch, how: str, min_batch: int
) -> None:
    """By the rows of a batch, padding included. Of a step of the base nothing is planned, read or
    timed."""
    for requests, padding in ((1, 0), (2, 0), (3, 0), (4, 0), (1, 3)):
        bed = BackendBed(monkeypatch, OURS, min_batch=min_batch)
        bed.use(bed.all[:requests])
        if how == "replay":
            bed.capture(padding)
            bed.executor.plans.clear()
            bed.executor.snapshots.clear()
        asked, stats, steps = bed.step(how, padding=padding), bed.stats, how != "capture"
        if requests + padding < min_batch:
            assert asked == ASKED[how] and bed.layer(0) == ["layer"]
            assert not bed.executor.plans and not bed.executor.snapshots
            assert stats.host_seconds == stats.plans_made == stats.decode_steps == 0
            # A capture is no step.
            assert stats.base_forwards == ({"small_batch": 1} if steps else {})
        else:
            assert asked == ([] if steps else CAPTURE) and bed.layer(0) == []
            assert bed.plan.num_queries == requests + (0 if how == "replay" else padding)
            assert stats.decode_steps == steps and not stats.base_forwards
        assert not stats.fallbacks and not stats.base_layers


@pytest.mark.parametrize("how", ["replay", "eager"])
def test_two_one_two_runs_no_stale_plan(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    bed = BackendBed(monkeypatch, OURS)
    first, second, third = bed.all[:3]
    for reqs in ([first], [first, second]):
        bed.use(reqs)
        bed.step("capture")
        bed.layer(0)
    assert bed.step(how) == []
    before = bed.plan
    # The same two: their plan is taken again, and loaded again. Then another pair, and the same in
    # another order.
    for pair in ([first, second], [first, third], [third, first]):
        bed.use([first])
        assert bed.step(how) == ASKED[how] and bed.layer(0) == ["layer"]
        bed.use(pair)
        assert bed.step(how) == bed.layer(0) == []
        assert (bed.plan is before) is (second in pair) and bed.plan.num_shared_items > 0
        before = bed.plan
    stats = bed.stats
    assert (stats.decode_steps, stats.plans_made, stats.plans_reused) == (4, 3, 1)
    assert stats.packed_steps == 4 and stats.base_forwards == {"small_batch": 3}
