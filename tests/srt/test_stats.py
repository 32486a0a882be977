# SPDX-License-Identifier: Apache-2.0
"""What a server's log says about its sharing: its first packed step, or why there is none."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from sglang_pat import stats as counting
from sglang_pat.planner import Plan, plan
from sglang_pat.stats import Stats
from sglang_pat.target import Target

Paths = list[list[tuple[int, int, int]]]
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "max_queries": 64}
TARGET = Target.cpu(threads=2, **SHAPE)
BRANCHING = Target.h200(**SHAPE, cuts=("branches",))
STEPS = 10


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "STEPS_WITHOUT_SHARING", STEPS)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    return caplog


def make(paths: Paths, lens: list[int], target: Target = TARGET) -> Plan:
    return plan(paths, np.array(lens), target)


def run(stats: Stats, made: Plan, total: int, steps: int = 1) -> None:
    for step in range(steps):
        stats.step(made, total, made=step == 0)


def crowd(shared: int, queries: int, own: int) -> tuple[Plan, int]:
    """A plan of ``queries`` requests with ``shared`` tokens in common, and its K/V tokens."""
    lens = [shared + own] * queries
    paths = [[(1, 0, shared), (2 + query, shared, shared + own)] for query in range(queries)]
    return make(paths if shared else [path[1:] for path in paths], lens), sum(lens)


@pytest.mark.parametrize("target", [TARGET, BRANCHING], ids=["packs", "branches"])
def test_the_first_packed_step_is_announced_once(
    log: pytest.LogCaptureFixture, target: Target
) -> None:
    lens = [911 + 10] * 12 + [500]
    paths: Paths = [[(1, 0, 911), (2 + query, 911, 921)] for query in range(12)]
    packed = make([*paths, [(50, 0, 500)]], lens, target)
    stats = Stats()
    run(stats, *crowd(0, queries=3, own=20), steps=STEPS - 1)
    assert not log.messages
    run(stats, packed, sum(lens), steps=3 * STEPS)
    (message,) = log.messages
    ratio = sum(lens) / packed.kv_tokens_read(sum(lens))
    assert 4 < ratio < 8  # two branches read the prefix twice
    assert f"12 requests share 911 tokens: {ratio:.1f} x fewer K/V reads" in message
    assert "of 13 requests" in message
    run(stats, *crowd(0, queries=3, own=20), steps=3 * STEPS)
    assert len(log.messages) == 1
    assert (stats.decode_steps, stats.packed_steps) == (7 * STEPS - 1, 3 * STEPS)
    assert stats.branched_steps == (3 * STEPS if target is BRANCHING else 0)
    assert (stats.plans_made, stats.plans_reused) == (3, 7 * STEPS - 4)


def test_plans_without_room_for_their_partials_are_counted_and_announced_once(
    log: pytest.LogCaptureFixture,
) -> None:
    lens, paths = [1000] * 12, [[(1, 0, 900)]] * 12
    whole = make(paths, lens)
    cramped = make(paths, lens, replace(TARGET, max_partials=6))
    stats = Stats()
    stats.step(whole, sum(lens), made=True)
    assert not cramped.num_shared_items and stats.degraded_plans == 0
    log.clear()
    for made in (True, False, True):
        stats.step(cramped, sum(lens), made=made)
    assert stats.degraded_plans == 2 == stats.snapshot()["degraded_plans"]
    (message,) = log.messages
    assert "a plan for 12 requests was made without packs: " in message
    assert "(of 6)" in message and "raise SGLANG_PAT_WORKSPACE_MB" in message


def test_a_message_that_fails_costs_the_message_only(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no words")

    monkeypatch.setattr(counting, "describe_packed_step", fail)
    stats = Stats()
    run(stats, *crowd(200, queries=3, own=20), steps=3)
    assert log.messages == ["sglang_pat: cannot tell what is shared: RuntimeError('no words')"]
    assert stats.packed_steps == 3


def test_groups_that_share_differently_are_announced_together(
    log: pytest.LogCaptureFixture,
) -> None:
    paths: Paths = [[(9, 0, 60)]]
    lens = [67]
    for node, (shared, queries) in enumerate([(300, 4), (1000, 2), (100, 6)]):
        for query in range(queries):
            paths.append([(node, 0, shared), (100 + 10 * node + query, shared, shared + 7)])
            lens.append(shared + 7)
    run(Stats(), make(paths, lens), sum(lens))
    assert "12 requests share 100 to 1000 tokens each: " in log.messages[0]
    assert "of 13 requests" in log.messages[0]


@pytest.mark.parametrize(
    ("private", "fallback", "expected"),
    [
        ({}, "", "prompts differ in their first tokens"),
        ({"radix cache disabled": 3}, "", "without --disable-radix-cache"),
        ({"unknown cache FooCache": 3}, "", "The likely reason: unknown cache FooCache"),
        ({"nothing cached yet": 3}, "", "--page-size"),
        ({"no tree lock": 1, "nothing cached yet": 2}, "", "--page-size"),
        ({"nothing cached yet": 1}, "", "prompts differ in their first tokens"),
        ({"nothing cached yet": 3}, "sharing not usable", "could not read SGLang's radix cache"),
    ],
)
def test_many_steps_without_sharing_are_explained_once(
    log: pytest.LogCaptureFixture, private: dict[str, int], fallback: str, expected: str
) -> None:
    """``private``: how many of the plan's three requests had no path."""
    stats = Stats()
    stats.private(private)
    if fallback:
        stats.fall_back(fallback)
        log.clear()
    made, total = crowd(0, queries=3, own=20)
    run(stats, made, total, steps=STEPS - 1)
    assert not log.messages
    for _ in range(3 * STEPS):
        stats.step(made, total, made=False)
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert f"{STEPS} decode steps had several requests" in record.getMessage()
    assert expected in record.getMessage()


ALONE, FEW = "each of 10 decode steps had a single request", "had at most 3 requests"


@pytest.mark.parametrize(
    ("planned", "small", "level", "expected"),
    [
        ([1] * 2 * STEPS, [], logging.INFO, ALONE),
        ([], [1] * 3 * STEPS, logging.INFO, ALONE),
        ([], [1, 3, 2] * STEPS, logging.WARNING, FEW),
    ],
)
def test_steps_of_few_requests_are_explained_once(
    log: pytest.LogCaptureFixture,
    planned: list[int],
    small: list[int],
    level: int,
    expected: str,
) -> None:
    """``planned``: requests of the steps with a plan; ``small``: of those that the base runs."""
    stats = Stats()
    for requests in small:
        stats.small_batch(requests)
    for requests in planned:
        run(stats, *crowd(0, queries=requests, own=20))
    (record,) = log.records
    assert record.levelno == level and expected in record.getMessage()
    assert stats.base_forwards["small_batch"] == len(small)
    run(stats, *crowd(200, queries=4, own=20))
    assert len(log.records) == 2 and "4 requests share 200 tokens" in log.messages[-1]
    stats.small_batch(1)
    assert len(log.records) == 2


def test_small_steps_do_not_count_as_steps_of_several(log: pytest.LogCaptureFixture) -> None:
    stats = Stats()
    run(stats, *crowd(0, queries=2, own=20))
    for _ in range(3 * STEPS):
        stats.small_batch(1)
    assert not log.messages  # there was a step of several, so a single request does not explain it
    run(stats, *crowd(0, queries=2, own=20), steps=STEPS - 1)
    assert f"{STEPS} decode steps had several requests" in log.messages[0]


def test_passes_of_the_base_are_intended_or_fallbacks(log: pytest.LogCaptureFixture) -> None:
    stats = Stats()
    stats.small_batch(0)
    stats.warm_up()
    assert stats.base_forwards == {"warm_up": 2} and stats.steps_asked_for == 0
    stats.small_batch(1)
    stats.small_batch(0)
    for mode in ("EXTEND", "IDLE", "EXTEND", "DRAFT_EXTEND_V2"):
        stats.other_forward(mode)
    intended = {"warm_up": 2, "small_batch": 1, "idle": 2, "extend": 2, "draft_extend_v2": 1}
    assert stats.base_forwards == intended and not stats.fallbacks and not log.messages
    for reason in ("a sliding window", "arguments sinks", "a sliding window"):
        stats.base_layer(reason)
    assert stats.base_layers == {"a sliding window": 2, "arguments sinks": 1}
    assert log.messages == [
        "sglang_pat: layers with a sliding window run on SGLang's attention",
        "sglang_pat: layers with arguments sinks run on SGLang's attention",
    ]
    log.clear()
    stats.other_forward("MIXED")
    stats.other_forward("MIXED")
    stats.warm_up()  # the scheduler decodes, so this is none
    assert stats.fallbacks == {"mixed": 2, "no batch from the scheduler": 1}
    assert [record.levelno for record in log.records] == [logging.WARNING] * 2
    assert "(mixed): --enable-mixed-chunk" in log.messages[0]


def test_the_summary_is_for_users() -> None:
    stats = Stats()
    run(stats, *crowd(200, queries=4, own=50), steps=2)
    stats.host_seconds = 5e-5
    line = (
        "2 decode steps on pat, in 2 of which requests shared K/V reads; 800 K/V tokens read "
        "instead of 2000 (60.0% saved); 25.0 us of host time a step, a new plan in 50.0%, "
        "0 of 1 plans hidden behind the GPU"
    )
    assert stats.summary() == line
    stats.other_forward("EXTEND")
    stats.base_layer("a sliding window")
    stats.fall_back("mixed")
    assert stats.summary() == (
        f"{line}; on SGLang's attention as intended: 1 x extend; layers that are SGLang's by their "
        "kind: 1 x a sliding window; not served by pat as it should have been: 1 x mixed"
    )
    assert Stats().summary().startswith("0 decode steps on pat")


def test_every_mode_of_sglangs_is_intended_or_not() -> None:
    """A new one in a new SGLang is looked at before it is counted."""
    modes = pytest.importorskip("sglang.srt.model_executor.forward_batch_info").ForwardMode
    unintended = {"MIXED", "TARGET_VERIFY", "DLLM_EXTEND"}
    stats = Stats()
    for mode in modes:
        if mode.name not in unintended | {"DECODE"}:
            stats.other_forward(mode.name)
    assert not stats.fallbacks
