# SPDX-License-Identifier: Apache-2.0
"""A decode batch of one request is the base's, in graphs and without; two are ours again."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmarks.host.live import LiveCache
from sglang_pat.config import DEFAULT_MIN_BATCH, PatConfig
from sglang_pat.planner import Plan
from sglang_pat.srt import backend
from sglang_pat.srt.hook import after_init_new
from sglang_pat.srt.layers import Survey
from sglang_pat.srt.radix import SETTLE_STEPS
from sglang_pat.srt.step import StepPlanner
from sglang_pat.stats import Stats
from sglang_pat.target import Target

HEADS, HEAD_DIM, REQUESTS = 2, 16, 6
SYSTEM, OWN = 200, 30
TARGET = Target.cpu(
    threads=2, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, max_queries=16
)
OURS = Survey({0: "", 1: ""})
# What the base is asked for when the step is its own.
CAPTURE, REPLAY, EAGER = ["capture", "in graph"], ["out graph"], ["eager", "out graph", "in graph"]
HOW = {"capture": CAPTURE, "replay": REPLAY, "eager": EAGER}


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
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, _batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "out graph")

    def init_forward_metadata_in_graph(self, _batch: Any) -> None:
        self.calls.append("in graph")

    def forward_decode(self, q: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self.calls.append("layer")
        return q


class Executor:
    """Notes the plan that the layers run, in place of a device."""

    target = TARGET

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.snapshots = self.layers = 0

    def load(self, plan: Plan, num_rows: int, **_: Any) -> None:
        assert plan.num_queries <= num_rows
        self.plans.append(plan)

    def snapshot(self, *_: Any) -> None:
        self.snapshots += 1

    def decode(self, *_args: Any, **_kwargs: Any) -> None:
        self.layers += 1


class Bed:
    """A backend over ``Base``, on whose server every layer is ours, and requests of one prompt."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        survey: Survey = OURS,
        min_batch: int = DEFAULT_MIN_BATCH,
    ) -> None:
        self.cache = LiveCache("python", slots=4000, rows=REQUESTS, context=512)
        self.runner = SimpleNamespace(device="cpu", req_to_token_pool=self.cache.table)
        self.executor = Executor()
        monkeypatch.setattr(backend, "start_reporter", lambda *_, **__: None)
        monkeypatch.setattr(backend, "micro_batches", lambda: 1)
        config = PatConfig(check=True, min_batch=min_batch)
        self.backend = backend.extend(Base)(self.runner, config, self.executor, survey)
        self.stats: Stats = self.backend._stats
        rng = random.Random(0)
        self.system = [rng.randrange(1000) for _ in range(SYSTEM)]
        own = [[1000 + i] + [rng.randrange(1000) for _ in range(OWN)] for i in range(REQUESTS)]
        self.reqs = [self.cache.admit(self.system + text) for text in own]
        self.graphs: set[int] = set()  # rows of those that were captured

    def prepare(
        self,
        how: str,
        requests: int | list[Any],
        *,
        rows: int = 0,
        announced: bool = True,
        mode: ForwardMode = ForwardMode.DECODE,
    ) -> list[str]:
        """Prepare a batch of the first ``requests``, padded to ``rows``; what the base was asked.
        A batch has a new tensor of rows, as SGLang's have when they change."""
        reqs = self.reqs[:requests] if isinstance(requests, int) else requests
        if how == "replay":
            self.capture(max(rows, len(reqs)))
        live, lens = self.cache.batch(reqs)
        if announced and how != "capture":
            scheduled = SimpleNamespace(
                reqs=live.reqs,
                tree_cache=live.tree_cache,
                req_pool_indices_cpu=live.rows,
                forward_mode=mode,
                decoding_reqs=None,
            )
            after_init_new(None, object, scheduled, self.runner)
        padding = max(rows - len(reqs), 0)
        lens = torch.cat([lens, torch.ones(padding, dtype=torch.int64)])
        batch = SimpleNamespace(
            forward_mode=mode,
            spec_info=None,
            encoder_lens=None,
            batch_size=len(lens),
            num_padding=padding,
            seq_lens=lens,
            seq_lens_cpu=lens,
            req_pool_indices=torch.cat([live.rows, torch.zeros(padding, dtype=torch.int64)]),
        )
        self.backend.calls.clear()
        if how == "eager":
            self.backend.init_forward_metadata(batch)
        else:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=how == "capture")
            if how == "capture":
                self.backend.init_forward_metadata_in_graph(batch)
        return list(self.backend.calls)

    def capture(self, rows: int) -> None:
        """Capture the graph of so many rows with both layers, once, as SGLang does at its start."""
        if rows not in self.graphs:
            self.graphs.add(rows)
            before = list(self.executor.plans), Counter(self.stats.base_layers)
            self.prepare("capture", 1, rows=rows)
            self.layers()
            self.executor.plans, self.stats.base_layers = before
            self.executor.snapshots = self.executor.layers = 0

    def layers(self) -> list[str]:
        """Run both layers of the forward that was prepared; what the base was asked."""
        self.backend.calls.clear()
        layer = SimpleNamespace(
            tp_q_head_num=HEADS,
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            scaling=1.0,
            logit_cap=0.0,
        )
        q = torch.zeros(1, HEADS * HEAD_DIM)
        for layer.layer_id in range(2):
            self.backend.forward_decode(q, None, None, layer, None)
        return list(self.backend.calls)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


@pytest.mark.parametrize("how", HOW)
def test_one_request_costs_nothing_of_ours(
    bed: Bed, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan, no lengths on the host, no snapshot, no clock: the step is the stock server's."""

    def fail(*_: Any) -> None:
        raise AssertionError("host work for a step of the base")

    monkeypatch.setattr(StepPlanner, "plan", fail)
    monkeypatch.setattr(StepPlanner, "private", fail)
    monkeypatch.setattr(backend, "lengths_of", fail)
    assert bed.prepare(how, 1) == HOW[how]
    assert bed.layers() == ["layer", "layer"]
    assert not bed.executor.plans and not bed.executor.snapshots and not bed.executor.layers
    assert bed.stats.decode_steps == bed.stats.host_ns == bed.stats.plans_made == 0
    # A capture is no step.
    assert bed.stats.base_forwards == ({} if how == "capture" else {"small_batch": 1})
    assert not bed.stats.fallbacks and not bed.stats.base_layers


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("min_batch", [1, 2, 4])
@pytest.mark.parametrize("requests", [1, 2, 3, 4])
def test_the_threshold_decides_alike_in_capture_replay_and_eager(
    monkeypatch: pytest.MonkeyPatch, how: str, min_batch: int, requests: int
) -> None:
    bed = Bed(monkeypatch, min_batch=min_batch)
    asked = bed.prepare(how, requests)
    if requests < min_batch:
        assert asked == HOW[how] and bed.layers() == ["layer", "layer"]
        assert not bed.executor.plans
    else:
        assert asked == (CAPTURE if how == "capture" else []) and bed.layers() == []
        assert bed.executor.plans[-1].num_queries == requests
    assert bed.stats.decode_steps == (requests >= min_batch and how != "capture")


@pytest.mark.parametrize("how", ["replay", "eager"])
def test_rows_decide_not_requests(bed: Bed, how: str) -> None:
    """A graph of four rows was captured with our kernels, whatever it is replayed for."""
    bed.prepare("capture", 4)
    assert bed.prepare(how, 1, rows=4) == [] and bed.layers() == []
    assert bed.executor.plans[-1].num_queries == (1 if how == "replay" else 4)
    assert bed.stats.decode_steps == 1 and not bed.stats.base_forwards and not bed.stats.fallbacks


@pytest.mark.parametrize("how", ["replay", "eager"])
def test_two_one_two_runs_no_stale_plan(bed: Bed, how: str) -> None:
    first, second, third = bed.reqs[:3]
    assert bed.prepare(how, [first, second]) == [] and bed.layers() == []
    before = bed.executor.plans[-1]
    assert bed.prepare(how, [first]) == HOW[how] and bed.layers() == ["layer", "layer"]
    assert len(bed.executor.plans) == 1
    # The same two: their plan is taken again, and loaded again.
    assert bed.prepare(how, [first, second]) == [] and bed.layers() == []
    assert len(bed.executor.plans) == 2 and bed.executor.plans[-1] is before
    assert bed.prepare(how, [first]) == HOW[how]
    # Another pair, and the same in another order.
    for pair in ([first, third], [third, first]):
        bed.prepare(how, pair)
        plan = bed.executor.plans[-1]
        assert plan is not before and plan.num_queries == 2 and plan.num_shared_items > 0
        before = plan
        bed.prepare(how, [first])
    stats = bed.stats
    assert (stats.decode_steps, stats.plans_made, stats.plans_reused) == (4, 3, 1)
    assert stats.packed_steps == 4 and stats.base_forwards == {"small_batch": 4}


def test_a_request_that_left_and_came_back_between_single_steps_is_read_again(bed: Bed) -> None:
    """Retracted in a step of two, which so became one of one, and prefilled again into its row."""
    pair = bed.reqs[:2]
    for _ in range(SETTLE_STEPS + 3):
        bed.prepare("replay", pair)
    assert bed.executor.plans[-1].kv_tokens_read(0) == -SYSTEM
    bed.cache.retract(pair[1:])
    bed.prepare("replay", pair[:1])
    bed.cache.prefill(pair[1:], most=SYSTEM - 50)
    bed.prepare("replay", pair)
    assert bed.executor.plans[-1].kv_tokens_read(0) == 50 - SYSTEM


@pytest.mark.parametrize("how", ["replay", "eager"])
def test_a_batch_of_one_that_nobody_announced(bed: Bed, how: str) -> None:
    """A warm-up's, and later an idle rank's of data parallel attention."""
    assert bed.prepare(how, 1, announced=False) == HOW[how]
    assert bed.stats.base_forwards == {"warm_up": 1}
    bed.prepare(how, 1)
    assert bed.prepare(how, 1, announced=False) == HOW[how]
    assert bed.stats.base_forwards == {"warm_up": 1, "small_batch": 1, "idle": 1}
    assert not bed.stats.fallbacks


def test_other_forwards_of_one_row_keep_their_names(bed: Bed) -> None:
    bed.prepare("eager", 1, mode=ForwardMode.EXTEND)
    bed.prepare("eager", 1, mode=ForwardMode.MIXED)
    assert bed.stats.base_forwards == {"extend": 1} and bed.stats.fallbacks == {"mixed": 1}


def test_without_a_layer_of_ours_steps_of_one_count_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(monkeypatch, Survey({0: "a sliding window", 1: "a sliding window"}))
    for requests in (1, 2):
        bed.prepare("replay", requests)
    assert bed.stats.base_layers == {"a sliding window": 4} and not bed.stats.base_forwards


def test_an_eager_batch_beyond_the_workspace_is_counted(bed: Bed) -> None:
    bed.prepare("eager", 2, rows=TARGET.max_queries + 1)
    assert bed.stats.fallbacks == {"batch beyond the workspace": 1}
