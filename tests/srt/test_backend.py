# SPDX-License-Identifier: Apache-2.0
"""The backend over a base and an executor that record what is asked of them: which steps are
planned and with what, what the base prepares and serves, and what is counted. No server, no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import (
    CAPTURE,
    EAGER,
    HEAD_DIM,
    HEADS,
    LAYERS,
    QUERIES,
    TARGET,
    BackendBed,
    make_layer,
)
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context

from sglang_pat.planner import Planner
from sglang_pat.slots import SlotMismatch
from sglang_pat.srt.hook import after_init_new
from sglang_pat.srt.layers import Survey

PRE, IN, POST, UNKNOWN = SharedReadEnds


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)


# Which forwards the base prepares: those with a layer that it serves, and all until layers are
# known.


def test_replays_of_our_layers_need_no_metadata_of_the_base(bed: BackendBed) -> None:
    assert bed.step(capture=True) == CAPTURE
    assert bed.layer(0) == bed.layer(1) == []
    bed.capture(2)
    assert bed.step() == bed.step(padding=2) == []
    assert bed.step(capture=True) == CAPTURE  # a capture always, in case the base serves a layer
    assert bed.step(mode=ForwardMode.EXTEND) == ["out graph"]
    assert bed.step(mode=ForwardMode.EXTEND, graph=False) == EAGER
    assert bed.base_forwards == {"extend": 2} and not bed.fallbacks


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"window": 8}, "a sliding window"), ({"sinks": 1}, "arguments sinks")],
)
def test_the_base_is_prepared_for_a_layer_that_it_serves(
    bed: BackendBed, arguments: dict[str, Any], reason: str
) -> None:
    bed.step(capture=True)
    assert bed.layer(0) == []
    assert bed.layer(1, **arguments) == ["layer"]
    assert bed.step() == ["out graph"]
    assert bed.step() == ["out graph"]
    assert bed.base_layers == {reason: 3}  # in the capture and in both replays
    assert not bed.fallbacks  # what the layer is like is no failure of the step


def test_an_argument_that_is_none_is_none(bed: BackendBed) -> None:
    bed.capture()
    assert bed.layer(1, sinks=None) == []
    assert bed.step() == [] and not bed.base_layers


@pytest.mark.parametrize(
    ("reasons", "prepares"),
    [({0: "", 1: ""}, False), ({0: "", 1: "chunked attention (use_irope)"}, True)],
)
def test_a_survey_says_before_the_first_step_whether_the_base_is_needed(
    reasons: dict[int, str], prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = BackendBed(monkeypatch, Survey(reasons))
    bed.capture()
    assert bed.step(graph=False) == (EAGER if prepares else [])
    assert bed.step() == (["out graph"] if prepares else [])
    assert bed.layer(0) == []
    assert bed.layer(1) == (["layer"] if prepares else [])


def test_a_server_whose_last_layer_is_lost_to_the_base_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = BackendBed(monkeypatch, Survey({0: "", 1: ""}))
    bed.step(capture=True)
    bed.layer(0, sinks=1)
    assert not bed.serving
    bed.layer(1, sinks=1)
    assert bed.serving == [False]
    assert "serves nothing on this server: the last layer has arguments sinks" in caplog.text


def test_eager_steps_prepare_the_base_until_the_layers_are_known(bed: BackendBed) -> None:
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == []
    assert bed.step(graph=False) == []
    assert bed.layer(0) == []
    # A layer that was not known: the base is prepared at once, and beforehand from then on.
    assert bed.layer(1, window=8) == [*EAGER, "layer"]
    assert bed.layer(2, window=8) == ["layer"]
    assert bed.step(graph=False) == EAGER
    assert bed.layer(1, window=8) == ["layer"]


def test_without_a_layer_of_ours_nothing_is_planned_or_claimed(bed: BackendBed) -> None:
    bed.step(capture=True)
    assert bed.layer(0, window=8) == bed.layer(1, window=8) == ["layer"]
    plans = len(bed.executor.plans)
    assert bed.step() == ["out graph"]
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0, window=8) == ["layer"]
    assert len(bed.executor.plans) == plans and bed.backend._stats.decode_steps == 0
    assert bed.base_layers == {"a sliding window": 6}
    assert not bed.fallbacks


# Which plan the executor gets for a step, and when the snapshot is taken.


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
    assert 0 < stats.plan_seconds < stats.host_seconds


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


# A graph that has captured a layer of pat is never replayed without a plan for its batch.


def test_slots_that_the_gpu_has_no_memory_for_are_on_the_host(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.capture(2)
    bed.executor.room = 0
    assert bed.step(padding=2) == []
    assert bed.executor.on_host == 1
    assert bed.executor.plans[-1].num_shared_items > 0
    assert bed.fallbacks == {"no memory for the slots": 1}
    assert bed.backend._stats.packed_steps == 1
    assert f"a plan for {QUERIES} requests lists " in caplog.text
    assert "in the host's" in caplog.text and "1 MB is free" in caplog.text
    del bed.executor.room
    bed.step(padding=2)
    assert bed.executor.on_host == 1


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize("announced", [True, False])
def test_a_batch_that_cannot_be_planned_runs_the_plan_of_its_capture(
    bed: BackendBed, announced: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("cannot be planned")

    bed.capture(2)
    with monkeypatch.context() as patch:
        for name in ("plan", "plan_handles", "plan_again"):
            patch.setattr(Planner, name, fail)
        for _ in range(2):
            assert bed.step(padding=2, announced=announced) == []
            plan = bed.executor.plans[-1]
            lens = torch.cat([bed.lens, torch.ones(2, dtype=torch.int64)])
            assert plan.fits(lens.data_ptr(), len(lens)) and plan.num_shared_items == 0
            bed.lens += 100
        assert bed.step(graph=False) == EAGER
    assert bed.fallbacks["batch not plannable"] == 3
    assert bed.backend._stats.decode_steps == 0
    bed.step(padding=2)
    assert bed.executor.plans[-1].num_shared_items > 0


def test_a_graph_for_sequences_too_long_to_plan_is_the_bases(bed: BackendBed) -> None:
    table = torch.empty((QUERIES, 1 << 29), dtype=torch.int32, device="meta")
    bed.backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    assert bed.step(capture=True) == CAPTURE
    assert bed.layer(0) == ["layer"]
    assert bed.step() == ["out graph"]
    assert bed.fallbacks == {"batch not plannable": 2}  # in the capture and in the replay
    assert all(plan.num_shared_items == 0 for plan in bed.executor.plans)


def test_layers_that_are_lost_later_do_not_change_what_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = BackendBed(monkeypatch, Survey({0: ""}))
    bed.capture()
    bed.step(graph=False)
    assert bed.layer(0, sinks=1)[-1] == "layer"
    plans = len(bed.executor.plans)
    assert bed.step(graph=False) == EAGER and len(bed.executor.plans) == plans
    assert bed.step() == ["out graph"]
    assert len(bed.executor.plans) == plans + 1
    assert bed.executor.plans[-1].num_queries == QUERIES


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
    for _ in range(2):
        assert bed.step(graph=False, padding=TARGET.max_queries) == EAGER
        assert bed.layer(0) == ["layer"]
    assert bed.fallbacks == {"batch beyond the workspace": 2}
    (record,) = [record for record in caplog.records if "beyond the workspace" in record.message]
    assert record.levelname == "WARNING"
    room, given = TARGET.max_queries, QUERIES + TARGET.max_queries
    assert f"a batch of {given} requests, padding included, is beyond the {room}" in record.message
    # A batch that just fits is served.
    assert bed.step(graph=False, padding=room - QUERIES) == []
    assert bed.layer(0) == []


def test_an_eager_batch_without_memory_for_its_slots_is_left_to_the_base(
    bed: BackendBed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.capture()
    bed.executor.room = 0
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == ["layer"]
    assert bed.fallbacks == {"no memory for the slots": 1}
    (record,) = [record for record in caplog.records if "no memory" in record.message]
    assert f"a plan for {QUERIES} requests lists " in record.message
    assert "--mem-fraction-static" in record.message and "1 MB is free" in record.message
    del bed.executor.room
    assert bed.step(graph=False) == [] == bed.layer(0)


def test_an_eager_batch_that_cannot_be_planned_is_left_to_the_base(
    bed: BackendBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.capture()
    monkeypatch.setattr(bed.backend._steps, "plan", lambda *_: None)
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == ["layer"]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [({"capture": True}, CAPTURE), ({}, ["out graph"]), ({"graph": False}, EAGER)],
    ids=["capture", "replay", "eager"],
)
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
    bed: BackendBed,
    arguments: dict[str, Any],
    asked: list[str],
    fields: dict[str, Any],
    reason: str,
) -> None:
    """It comes between steps of ``pat``, and changes neither their plan nor their layers."""
    bed.step(capture=True)
    assert bed.layer(0) == bed.step(graph=False) == []
    before = len(bed.executor.plans), bed.executor.snapshots
    assert bed.step(**arguments, **fields) == asked
    assert bed.layer(0) == ["layer"]
    assert (len(bed.executor.plans), bed.executor.snapshots) == before
    intended = reason in ("extend", "draft_extend_v2")
    assert (bed.base_forwards if intended else bed.fallbacks) == {reason: 1}
    assert not (bed.fallbacks if intended else bed.base_forwards)
    assert bed.step(graph=False) == bed.layer(0) == []
    assert (bed.base_forwards if intended else bed.fallbacks) == {reason: 1}


def test_an_eager_batch_that_nobody_announced_is_left_to_the_base(bed: BackendBed) -> None:
    """Before the scheduler's first decode step it is a warm-up; later it counts as a fallback."""
    bed.step(capture=True)
    assert bed.layer(0) == []
    assert bed.step(graph=False, announced=False) == EAGER
    assert bed.base_forwards == {"warm_up": 1} and not bed.fallbacks
    assert bed.step(graph=False) == []
    plans = len(bed.executor.plans)
    assert bed.step(graph=False, announced=False) == EAGER
    assert bed.layer(0) == ["layer"]
    assert len(bed.executor.plans) == plans
    assert bed.fallbacks == {"no batch from the scheduler": 1}


# What data parallel attention makes prefills counts as what the scheduler meant: SGLang's own
# batches, without a server, as that takes GPUs. tests/serving/test_tokens.py has mixed steps.


def scheduled(bed: BackendBed, requests: int) -> ScheduleBatch:
    """A decode step of the first requests of the bed; without any, that of an idle rank."""
    batch = ScheduleBatch(bed.reqs[:requests], bed.cache.table, tree_cache=bed.cache.tree)
    batch.forward_mode = ForwardMode.DECODE if requests else ForwardMode.IDLE
    batch.seq_lens = batch.seq_lens_cpu = bed.lens[:requests]
    batch.req_pool_indices = batch.req_pool_indices_cpu = bed.live.rows[:requests]
    batch.input_ids = batch.out_cache_loc = torch.zeros(requests, dtype=torch.int64)
    return batch


def prepare(bed: BackendBed, batch: ScheduleBatch, *, graph: bool) -> None:
    """Hand it to the backend as a prefill that another rank's made it: a decode step before
    ``init_new`` if all ranks replay a prefill graph, and if one is idle, by padding, after it."""
    runner = MagicMock(device="cpu", lora_manager=None)
    runner.model_config.model_is_mrope = runner.ngram_embedding_manager.enabled = False
    with get_context().override_server_args(device="cpu"):
        forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    after_init_new(forward, ForwardBatch, batch, bed.runner)
    forward.forward_mode = ForwardMode.EXTEND  # as prepare_mlp_sync_batch, which takes a GPU
    if graph:
        bed.backend.init_forward_metadata_out_graph(forward)
    else:
        bed.backend.init_forward_metadata(forward)


@pytest.mark.parametrize("graph", [False, True])
def test_prefills_made_of_decode_steps(bed: BackendBed, graph: bool) -> None:
    converted = scheduled(bed, requests=4)
    converted.convert_decode_to_extend()
    for batch in (converted, scheduled(bed, requests=4)):
        prepare(bed, batch, graph=graph)
    assert bed.fallbacks == {"decode": 2} and not bed.base_forwards
    prepare(bed, scheduled(bed, requests=0), graph=graph)
    assert bed.base_forwards == {"idle": 1}
    # Nor does a forward without a batch count as the one before it.
    bed.step(graph=graph, mode=ForwardMode.EXTEND, announced=False)
    assert bed.fallbacks == {"decode": 2} and bed.base_forwards == {"idle": 1, "extend": 1}


# What is done for a layer that pat serves: its K/V are written to SGLang's pool, then it attends.

SLOTS = torch.tensor([7, 3, 5, 1])  # where the new tokens go


class LayerBed(BackendBed):
    """A test bed of one forward, with ``events``: what its layers did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.events: list[tuple[Any, ...]] = []
        pool, decode = self.backend.token_to_kv_pool, self.executor.decode
        pool.set_kv_buffer = lambda *given: self.events.append(("write", *given))

        def attend(*tensors: torch.Tensor, **options: float) -> None:
            self.events.append(("attend", *tensors, options))
            decode(*tensors, **options)

        monkeypatch.setattr(self.executor, "decode", attend)
        self.step(graph=False)
        self.q = torch.randn(QUERIES, HEADS * HEAD_DIM)
        self.k, self.v = torch.randn(2, QUERIES, HEADS, HEAD_DIM)

    def forward(self, layer: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        batch = SimpleNamespace(out_cache_loc=SLOTS, out_cache_loc_is_physical=True)
        out: torch.Tensor = self.backend.forward_decode(self.q, k, v, layer, batch, **options)
        return out


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> LayerBed:
    return LayerBed(monkeypatch)


@pytest.mark.parametrize("layer_id", range(LAYERS))
def test_a_layer_writes_its_kv_and_then_attends(layers: LayerBed, layer_id: int) -> None:
    layer = make_layer(layer_id)
    out = layers.forward(layer, layers.k, layers.v)
    (write, *written), (attend, q, k_cache, v_cache, _, options) = layers.events
    assert (write, attend) == ("write", "attend")
    assert written[0] is layer and written[1].loc is SLOTS and written[1].physical
    assert written[2] is layers.k and written[3] is layers.v
    assert written[4:] == [layer.k_scale, layer.v_scale]
    pool = layers.backend.token_to_kv_pool
    assert k_cache.data_ptr() == pool.get_key_buffer(layer_id).data_ptr()
    assert v_cache.data_ptr() == pool.get_value_buffer(layer_id).data_ptr()
    assert torch.equal(q, layers.q.view(QUERIES, HEADS, HEAD_DIM))
    rest = {"k_scale": 1.0, "v_scale": 1.0}  # those of the layer count in fp8_e4m3 only
    assert options == {"scale": layer.scaling, "logit_cap": layer.logit_cap} | rest
    assert torch.equal(out, layers.q), "what the executor wrote, one row a query"


def test_kv_that_is_in_the_pool_is_not_written_again(layers: LayerBed) -> None:
    """As in layers that share their K/V with another one, or that write it themselves."""
    layers.forward(make_layer(0), layers.k, layers.v, save_kv_cache=False)
    layers.forward(make_layer(1), None, None)
    assert [event[0] for event in layers.events] == ["attend", "attend"]


def test_a_layer_of_the_base_does_neither(layers: LayerBed) -> None:
    assert layers.forward(make_layer(0, window=8), layers.k, layers.v) is layers.q
    assert layers.events == []
