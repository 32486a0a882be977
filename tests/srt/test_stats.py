# SPDX-License-Identifier: Apache-2.0
"""What is counted, and what a server's log says about its sharing: its first packed step, or why
there is none."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sglang_pat import stats as counting
from sglang_pat.planner import Plan, plan
from sglang_pat.stats import Stats
from sglang_pat.target import Target

SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "max_queries": 64}
TARGET = Target.cpu(threads=2, **SHAPE)
BRANCHING = Target.h200(**SHAPE, cuts=("branches",))
STEPS = 10


@pytest.fixture
def log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(counting, "STEPS_WITHOUT_SHARING", STEPS)
    caplog.set_level(logging.INFO, logger="sglang_pat")
    return caplog


def crowd(*groups: tuple[int, int], own: int = 20, target: Target = TARGET) -> tuple[Plan, int]:
    """A plan of groups of requests, (tokens in common, requests) each, and its K/V tokens."""
    paths, lens = [], []
    for node, (shared, queries) in enumerate(groups):
        lens += [shared + own] * queries
        paths += [[(node, 0, shared)] if shared else []] * queries
    return plan(paths, np.array(lens), target), sum(lens)


def run(stats: Stats, made: tuple[Plan, int], steps: int = 1) -> None:
    for step in range(steps):
        stats.step(*made, made=step == 0)


@pytest.mark.parametrize("target", [TARGET, BRANCHING], ids=["packs", "branches"])
def test_the_first_packed_step_is_announced_once(
    log: pytest.LogCaptureFixture, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that fails costs the message only."""
    packed, total = crowd((911, 12), (0, 1), target=target)
    stats, alone = Stats(), crowd((0, 3))
    run(stats, alone, steps=STEPS - 1)
    assert not log.messages
    run(stats, (packed, total), steps=3 * STEPS)
    (message,) = log.messages
    ratio = total / packed.kv_tokens_read(total)
    assert 4 < ratio < 10  # two branches read the prefix twice
    assert f"12 requests share 911 tokens: {ratio:.1f} x fewer K/V reads" in message
    assert "of 13 requests" in message
    run(stats, alone, steps=3 * STEPS)
    assert len(log.messages) == 1
    assert (stats.decode_steps, stats.packed_steps) == (7 * STEPS - 1, 3 * STEPS)
    assert stats.branched_steps == (3 * STEPS if target is BRANCHING else 0)
    assert (stats.plans_made, stats.plans_reused) == (3, 7 * STEPS - 4)
    run(Stats(), crowd((300, 4), (1000, 2), (100, 6), (0, 1)))
    assert "12 requests share 100 to 1000 tokens each: " in log.messages[-1]
    monkeypatch.setattr(counting, "describe_packed_step", None)
    run(stats := Stats(), crowd((200, 3)), steps=3)
    assert len(log.messages) == 3 and stats.packed_steps == 3


def test_plans_without_room_for_their_partials_are_counted_and_announced_once(
    log: pytest.LogCaptureFixture,
) -> None:
    stats = Stats()
    run(stats, crowd((900, 12)))
    assert stats.degraded_plans == 0
    log.clear()
    cramped = crowd((900, 12), target=replace(TARGET, max_partials=6))
    for made in (True, False, True):
        stats.step(*cramped, made=made)
    assert stats.degraded_plans == 2 == stats.snapshot()["degraded_plans"]
    (message,) = log.messages
    for part in ("12 requests", "(of 6)", "raise SGLANG_PAT_WORKSPACE_MB"):
        assert part in message


SEVERAL = [3] * (STEPS - 1) + [-1] * 3 * STEPS + [3] * 3 * STEPS


@pytest.mark.parametrize(
    ("steps", "private", "fallback", "expected"),
    [
        (SEVERAL, {}, "", "prompts differ in their first tokens"),
        (SEVERAL, {"radix cache disabled": 3}, "", "without --disable-radix-cache"),
        (SEVERAL, {"no tree lock": 1, "nothing cached yet": 2}, "", "--page-size"),
        (SEVERAL, {"nothing cached yet": 1}, "", "prompts differ in their first tokens"),
        (SEVERAL, {"nothing cached yet": 3}, "sharing not usable", "not read SGLang's radix cache"),
        ([1] * 2 * STEPS, {}, "", "each of 10 decode steps had one request"),
        ([-1] * 3 * STEPS, {}, "", "each of 10 decode steps had one request"),
        # Where they are several, an option keeps them from pat.
        ([-1, -3, -2] * STEPS, {}, "", "lower SGLANG_PAT_MIN_BATCH"),
    ],
)
def test_many_steps_without_sharing_are_explained_once(
    log: pytest.LogCaptureFixture,
    steps: list[int],
    private: dict[str, int],
    fallback: str,
    expected: str,
) -> None:
    """``steps``: requests of each, negative where the base runs it for being too few, which counts
    for nothing beside steps of several. ``private``: of the plan's three, those without a path."""
    stats = Stats()
    stats.private_requests.update(private)
    if fallback:
        stats.fall_back(fallback)
        log.clear()
    for index, requests in enumerate(steps):
        if requests < 0:
            stats.small_batch(-requests)
        else:
            stats.step(*crowd((0, requests)), made=not index)
    (record,) = log.records
    said = record.getMessage()
    assert expected in said and f"{STEPS} decode steps had" in said
    assert record.levelno == (logging.INFO if "had one request" in said else logging.WARNING)
    assert stats.base_forwards["small_batch"] == sum(requests < 0 for requests in steps)
    run(stats, crowd((200, 4)))
    stats.small_batch(1)
    assert len(log.records) == 2 and "4 requests share 200 tokens" in log.messages[-1]


def test_passes_of_the_base_are_intended_or_fallbacks(log: pytest.LogCaptureFixture) -> None:
    """Each reason is said once. A new mode in a new SGLang is looked at before it is counted."""
    stats = Stats()
    for _ in range(2):
        stats.small_batch(0)  # before the scheduler asks for a decode, a warm-up
        stats.warm_up()
        stats.small_batch(1)
        for mode in ("EXTEND", "IDLE", "MIXED"):
            stats.other_forward(mode)
        stats.base_layer("a sliding window")
    intended = {"warm_up": 2, "small_batch": 2, "idle": 3, "extend": 2}
    assert stats.base_forwards == intended and stats.steps_asked_for == 2
    assert stats.fallbacks == {"mixed": 2, "no batch from the scheduler": 1}
    assert stats.base_layers == {"a sliding window": 2}
    levels = [record.levelno for record in log.records]
    assert levels == [logging.WARNING, logging.INFO, logging.WARNING]
    assert "--enable-mixed-chunk" in log.messages[0]
    modes = pytest.importorskip("sglang.srt.model_executor.forward_batch_info").ForwardMode
    for mode in {one.name for one in modes} - {"MIXED", "TARGET_VERIFY", "DLLM_EXTEND", "DECODE"}:
        stats.other_forward(mode)
    assert stats.fallbacks == {"mixed": 2, "no batch from the scheduler": 1}


def test_what_plans_cost_is_counted_and_summed_up() -> None:
    stats = Stats()
    assert stats.summary().startswith("0 decode steps on pat")
    run(stats, crowd((200, 4), own=50), steps=2)
    stats.host_time(30_000, made=True, hidden=True)
    stats.host_time(50_000, made=True, hidden=False)
    stats.host_time(20_000, made=False, hidden=False)  # a step that kept its plan exposes none
    counted = stats.snapshot()
    assert counted["hidden_plans"] == 1
    assert counted["exposed_seconds"] == pytest.approx(50e-6)
    assert counted["plan_seconds"] == pytest.approx(80e-6)
    assert "800 K/V tokens read instead of 2000 (60.0% saved)" in stats.summary()
