# SPDX-License-Identifier: Apache-2.0
"""A decode batch of one request is the base's, in graphs and without; two are ours again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import CAPTURE, EAGER, SYSTEM, TARGET, BackendBed
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.srt import backend
from sglang_pat.srt.layers import Survey
from sglang_pat.srt.radix import SETTLE_STEPS
from sglang_pat.srt.step import StepPlanner

OURS = Survey({0: "", 1: ""})
# What the base is asked for when the step is its own.
HOW = {"capture": CAPTURE, "replay": ["out graph"], "eager": EAGER}


class Bed(BackendBed):
    """A test bed on whose server every layer is ours, with the graphs that SGLang captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, survey: Survey = OURS, **options: Any):
        super().__init__(monkeypatch, survey, **options)
        self.all = list(self.reqs)
        self.graphs: set[int] = set()

    @property
    def stats(self) -> Any:
        return self.backend._stats

    def prepare(self, how: str, requests: int | list[Any], rows: int = 0, **options: Any) -> Any:
        """Prepare a batch of the first ``requests``, padded to ``rows``; what the base was asked.
        A batch has a new tensor of rows, as SGLang's have when they change."""
        reqs = self.all[:requests] if isinstance(requests, int) else requests
        rows = max(rows, len(reqs))
        if how == "replay" and rows not in self.graphs:
            self.graphs.add(rows)
            before = list(self.executor.plans), self.base_layers
            self.prepare("capture", reqs, rows)
            self.layers()
            self.executor.plans[:], counted = before
            self.stats.base_layers.clear()
            self.stats.base_layers.update(counted)
        self.reqs = reqs
        self.live, self.lens = self.cache.batch(reqs)
        graph, capture = how != "eager", how == "capture"
        return self.step(graph=graph, capture=capture, padding=rows - len(reqs), **options)

    def layers(self) -> list[str]:
        return [*self.layer(0), *self.layer(1)]


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
    assert not bed.executor.plans and not bed.executor.snapshots
    assert bed.stats.decode_steps == bed.stats.host_seconds == bed.stats.plans_made == 0
    # A capture is no step.
    assert bed.base_forwards == ({} if how == "capture" else {"small_batch": 1})
    assert not bed.fallbacks and not bed.base_layers


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
    assert bed.prepare(how, 1, rows=4) == [] and bed.layers() == []
    assert bed.executor.plans[-1].num_queries == (1 if how == "replay" else 4)
    assert bed.stats.decode_steps == 1 and not bed.base_forwards and not bed.fallbacks


@pytest.mark.parametrize("how", ["replay", "eager"])
def test_two_one_two_runs_no_stale_plan(bed: Bed, how: str) -> None:
    first, second, third = bed.all[:3]
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
    assert stats.packed_steps == 4 and bed.base_forwards == {"small_batch": 4}


def test_a_request_that_left_and_came_back_between_single_steps_is_read_again(bed: Bed) -> None:
    """Retracted in a step of two, which so became one of one, and prefilled again into its row."""
    pair = bed.all[:2]
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
    assert bed.base_forwards == {"warm_up": 1}
    bed.prepare(how, 1)
    assert bed.prepare(how, 1, announced=False) == HOW[how]
    assert bed.base_forwards == {"warm_up": 1, "small_batch": 1, "idle": 1}
    assert not bed.fallbacks


def test_other_forwards_of_one_row_keep_their_names(bed: Bed) -> None:
    bed.prepare("eager", 1, mode=ForwardMode.EXTEND)
    bed.prepare("eager", 1, mode=ForwardMode.MIXED)
    assert bed.base_forwards == {"extend": 1} and bed.fallbacks == {"mixed": 1}


def test_without_a_layer_of_ours_steps_of_one_count_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(monkeypatch, Survey({0: "a sliding window", 1: "a sliding window"}))
    for requests in (1, 2):
        bed.prepare("replay", requests)
    assert bed.base_layers == {"a sliding window": 4} and not bed.base_forwards


def test_an_eager_batch_beyond_the_workspace_is_counted(bed: Bed) -> None:
    bed.prepare("eager", 2, rows=TARGET.max_queries + 1)
    assert bed.fallbacks == {"batch beyond the workspace": 1}
