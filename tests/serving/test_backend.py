# SPDX-License-Identifier: Apache-2.0
"""What the backend asks of its base and of the executor, step by step: no server, no GPU."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.bench.host.live import LiveCache
from sglang_pat.config import PatConfig
from sglang_pat.planner import Plan
from sglang_pat.srt import backend
from sglang_pat.srt.hook import after_init_new
from sglang_pat.srt.survey import Survey
from sglang_pat.target import Target

QUERIES, HEADS, HEAD_DIM = 4, 2, 16
TARGET = Target.cpu(
    threads=2, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, max_queries=16
)
# What the base is asked for a capture and for an eager step.
CAPTURE = ["capture", "in graph"]
EAGER = ["eager", "out graph", "in graph"]


class Base:
    """A base that notes what is asked of it."""

    def __init__(self, runner: Any) -> None:
        self.calls: list[str] = []
        cache = torch.zeros(8, HEADS, HEAD_DIM)
        self.token_to_kv_pool = SimpleNamespace(
            device="cpu", get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache
        )
        self.req_to_token_pool = runner.req_to_token_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append("eager")
        # As the base class of SGLang does it.
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "out graph")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append("in graph")

    def forward_decode(self, q: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self.calls.append("layer")
        return q


class Executor:
    """Notes the plans, in place of a device."""

    target = TARGET

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.snapshots = 0

    def load(self, plan: Plan, num_rows: int) -> None:
        assert plan.num_queries <= num_rows
        self.plans.append(plan)

    def snapshot(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        assert self.plans[-1].num_queries <= len(rows) == len(seq_lens)
        self.snapshots += 1

    def decode(self, *_args: Any, **_kwargs: Any) -> None:
        pass


class Bed:
    """A backend over ``Base`` and a batch of four requests of one system prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, survey: Survey | None = None) -> None:
        self.cache = LiveCache("python", slots=4000, rows=QUERIES, context=512)
        self.runner = SimpleNamespace(device="cpu", req_to_token_pool=self.cache.table)
        self.executor = Executor()
        monkeypatch.setattr(backend, "make_executor", lambda *_: self.executor)
        self.serving: list[bool] = []  # what the reporter was told later
        reporter = SimpleNamespace(set_serving=self.serving.append)
        monkeypatch.setattr(backend, "start_reporter", lambda *_, **__: reporter)
        monkeypatch.setattr(backend, "micro_batches", lambda: 1)
        self.backend = backend.extend(Base)(self.runner, PatConfig(check=True), survey)
        rng = random.Random(0)
        system = [rng.randrange(1000) for _ in range(200)]
        self.reqs = [self.cache.admit([*system, 1000 + i]) for i in range(QUERIES)]
        self.live, self.lens = self.cache.batch(self.reqs)

    def step(
        self,
        *,
        graph: bool = True,
        padding: int = 0,
        capture: bool = False,
        mode: ForwardMode = ForwardMode.DECODE,
        idle: bool = False,
        announced: bool = True,
        spec_info: Any = None,
        encoder_lens: torch.Tensor | None = None,
    ) -> list[str]:
        """Announce a batch as the scheduler does and prepare it; what the base was asked."""
        actual = ForwardMode.IDLE if idle else mode
        if announced and not capture:
            scheduled = SimpleNamespace(
                reqs=self.reqs,
                tree_cache=self.cache.tree,
                req_pool_indices_cpu=self.live.rows,
            )
            after_init_new(SimpleNamespace(forward_mode=actual), object, scheduled, self.runner)
        lens = self.lens[:0] if idle else self.lens
        rows = self.live.rows[: len(lens)]
        lens = torch.cat([lens, torch.ones(padding, dtype=torch.int64)])
        batch = SimpleNamespace(
            forward_mode=mode,
            spec_info=spec_info,
            encoder_lens=encoder_lens,
            batch_size=len(lens),
            num_padding=padding,
            seq_lens=lens,
            seq_lens_cpu=lens,
            req_pool_indices=torch.cat([rows, torch.zeros(padding, dtype=torch.int64)]),
        )
        self.backend.calls.clear()
        if graph:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=capture)
            if capture:  # a replay runs what this launched
                self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        return list(self.backend.calls)

    def layer(self, layer_id: int = 0, window: int = -1, **kwargs: Any) -> list[str]:
        """Run a layer of the forward that was prepared; what the base was asked."""
        layer = SimpleNamespace(
            layer_id=layer_id,
            is_cross_attention=False,
            attn_type=SimpleNamespace(value="decoder"),
            sliding_window_size=window,
            xai_temperature_len=-1,
            use_irope=False,
            logit_cap=0.0,
            tp_q_head_num=HEADS,
            tp_k_head_num=HEADS,
            tp_v_head_num=HEADS,
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            scaling=1.0,
        )
        self.backend.calls.clear()
        q = torch.zeros(QUERIES, HEADS * HEAD_DIM)
        self.backend.forward_decode(q, None, None, layer, None, **kwargs)
        return list(self.backend.calls)

    @property
    def fallbacks(self) -> dict[str, int]:
        return dict(self.backend._stats.fallbacks)

    @property
    def base_layers(self) -> dict[str, int]:
        return dict(self.backend._stats.base_layers)

    @property
    def base_forwards(self) -> dict[str, int]:
        return dict(self.backend._stats.base_forwards)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def test_replays_of_our_layers_need_no_metadata_of_the_base(bed: Bed) -> None:
    assert bed.step(capture=True) == CAPTURE
    assert bed.layer(0) == bed.layer(1) == []
    assert bed.step(padding=2) == []
    assert bed.step(capture=True) == CAPTURE  # one that the base could serve, always
    assert bed.step(mode=ForwardMode.EXTEND) == ["out graph"]
    assert bed.step(mode=ForwardMode.EXTEND, graph=False) == EAGER
    assert bed.base_forwards == {"extend": 2} and not bed.fallbacks


def test_the_snapshot_is_captured_or_taken_once(bed: Bed) -> None:
    bed.step(capture=True)
    bed.layer(0)
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"window": 8}, "a sliding window"), ({"sinks": 1}, "arguments sinks")],
)
def test_a_layer_of_the_base_keeps_its_metadata(
    bed: Bed, arguments: dict[str, Any], reason: str
) -> None:
    bed.step(capture=True)
    assert bed.layer(0) == []
    assert bed.layer(1, **arguments) == ["layer"]
    assert bed.step() == ["out graph"]
    assert bed.step() == ["out graph"]
    assert bed.base_layers == {reason: 3}  # in the capture and in both replays
    assert not bed.fallbacks  # it is the layer's kind


@pytest.mark.parametrize(
    ("reasons", "prepares"),
    [({0: "", 1: ""}, False), ({0: "", 1: "chunked attention (use_irope)"}, True)],
)
def test_surveyed_layers_tell_before_the_first_step_whether_the_base_is_needed(
    reasons: dict[int, str], prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, Survey(reasons))
    assert bed.step(graph=False) == (EAGER if prepares else [])
    assert bed.step() == (["out graph"] if prepares else [])
    assert bed.layer(0) == []
    assert bed.layer(1) == (["layer"] if prepares else [])


def test_layers_that_all_turn_out_to_be_the_bases_are_said_to_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed(monkeypatch, Survey({0: "", 1: ""}))
    bed.step(capture=True)
    bed.layer(0, sinks=1)
    assert not bed.serving
    bed.layer(1, sinks=1)
    assert bed.serving == [False]
    assert "serves nothing on this server: the last layer has arguments sinks" in caplog.text


def test_eager_steps_prepare_the_base_until_the_layers_are_known(bed: Bed) -> None:
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0) == []
    assert bed.step(graph=False) == []
    assert bed.layer(0) == []
    # One that had not come by: the base is prepared then and there, and from then on beforehand.
    assert bed.layer(1, window=8) == [*EAGER, "layer"]
    assert bed.layer(2, window=8) == ["layer"]
    assert bed.step(graph=False) == EAGER
    assert bed.layer(1, window=8) == ["layer"]


@pytest.mark.parametrize("pool", [QUERIES, 64])
def test_an_eager_batch_beyond_the_workspace_is_the_bases(
    bed: Bed, caplog: pytest.LogCaptureFixture, pool: int
) -> None:
    """One of data parallel attention's padding, or of a pool that the budget has no room for."""
    bed.runner.req_to_token_pool.size = pool
    bed.step(capture=True)
    bed.layer(0)
    for _ in range(2):
        assert bed.step(graph=False, padding=TARGET.max_queries) == EAGER
        assert bed.layer(0) == ["layer"]
    assert bed.fallbacks == {"batch beyond the workspace": 2}
    (record,) = [record for record in caplog.records if "beyond the workspace" in record.message]
    assert record.levelname == "WARNING"
    room, given = TARGET.max_queries, QUERIES + TARGET.max_queries
    assert f"a batch of {given} requests is beyond the {room} that the" in record.message
    assert ("raise SGLANG_PAT_WORKSPACE_MB" in record.message) == (pool > room)
    # The next one that fits is served, and so is one of exactly as many.
    assert bed.step(graph=False, padding=room - QUERIES) == []
    assert bed.layer(0) == []


def test_an_eager_batch_that_cannot_be_planned_is_the_bases(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.step(capture=True)
    bed.layer(0)
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
def test_what_is_no_plain_decode_batch_is_the_bases(
    bed: Bed, arguments: dict[str, Any], asked: list[str], fields: dict[str, Any], reason: str
) -> None:
    """Between steps that ``pat`` serves, whose plan and layers it leaves alone."""
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


def test_an_eager_batch_that_nobody_announced_is_the_bases(bed: Bed) -> None:
    """A warm-up's before the scheduler's first decode step; later ones are not meant to be."""
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


@pytest.mark.parametrize("layers", [[], [0], [0, 1]], ids=["unknown", "ours", "one the base's"])
def test_a_replay_that_nobody_announced_shares_nothing(bed: Bed, layers: list[int]) -> None:
    """The graph runs our layers in any case, so they get a plan, of private requests."""
    bed.step(capture=True)
    for layer in layers:
        bed.layer(layer, window=8 if layer else -1)
    asked = [] if layers == [0] else ["out graph"]
    assert bed.step() == asked
    assert bed.executor.plans[-1].num_shared_items > 0
    assert bed.step(announced=False, padding=2) == asked
    plan = bed.executor.plans[-1]
    assert (plan.num_queries, plan.num_shared_items) == (QUERIES, 0)
    assert bed.fallbacks["graph without a batch from the scheduler"] == 1
    assert bed.layer(0) == []


def test_a_batch_that_was_not_for_us_is_not_kept(bed: Bed) -> None:
    bed.step(capture=True)
    bed.layer(0)
    bed.step(spec_info=object())
    bed.step(announced=False)
    assert bed.executor.plans[-1].num_shared_items == 0
    assert bed.fallbacks["graph without a batch from the scheduler"] == 1


def test_without_a_layer_of_ours_nothing_is_planned_or_claimed(bed: Bed) -> None:
    bed.step(capture=True)
    assert bed.layer(0, window=8) == bed.layer(1, window=8) == ["layer"]
    plans = len(bed.executor.plans)
    assert bed.step() == ["out graph"]
    assert bed.step(graph=False) == EAGER
    assert bed.layer(0, window=8) == ["layer"]
    assert len(bed.executor.plans) == plans and bed.backend._stats.decode_steps == 0
    assert bed.base_layers == {"a sliding window": 6}
    assert not bed.fallbacks


def test_padding_is_not_planned_and_steady_steps_keep_their_plan(bed: Bed) -> None:
    bed.step(capture=True)
    bed.layer(0)
    for padding in (0, 3, 1):
        bed.step(padding=padding)
    assert len({id(plan) for plan in bed.executor.plans[1:]}) == 1
    assert bed.executor.plans[-1].num_queries == QUERIES
    assert bed.executor.plans[-1].num_shared_items > 0
    stats = bed.backend._stats
    assert (stats.decode_steps, stats.plans_made, stats.plans_reused) == (3, 1, 2)
    assert 0 < stats.plan_ns < stats.host_ns


def test_rows_that_pad_an_eager_batch_are_private(bed: Bed) -> None:
    """Data parallel attention without a graph pads all ranks' batches to one size."""
    bed.step(graph=False, padding=3)
    (plan,) = bed.executor.plans
    assert plan.num_queries == QUERIES + 3
    shared = plan.items[plan.items["num_queries"] > 1]
    assert shared["num_queries"].tolist() == [QUERIES]
    assert bed.backend._stats.private_requests == {"row without a request": 3}


def test_an_idle_rank_replays_an_empty_plan(bed: Bed) -> None:
    """Data parallel attention: a rank without requests replays with the others."""
    bed.step(capture=True)
    bed.layer(0)
    for _ in range(2):
        assert bed.step(idle=True, padding=4) == []
    first, second = bed.executor.plans[1:]
    assert first is second  # nothing to copy to the device
    assert first.num_queries == first.num_items == 0
    assert bed.fallbacks == {} and bed.backend._stats.decode_steps == 0
    bed.step()
    assert bed.executor.plans[-1].num_queries == QUERIES


def test_an_older_batch_is_never_planned(bed: Bed) -> None:
    bed.step(capture=True)
    bed.layer(0)
    bed.step(idle=True, padding=4)
    after_init_new(SimpleNamespace(forward_mode=ForwardMode.EXTEND), object, None, bed.runner)
    bed.step(capture=True)
    assert bed.executor.plans[-1].num_shared_items == 0
