# SPDX-License-Identifier: Apache-2.0
"""Plans from SGLang's unified prefix cache with its Mamba component: paths of full K/V are read
whatever happens to the states. No server, no GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.hybrid import CHUNK, STRATEGIES, HybridCache
from kit.trees import target

from sglang_pat.planner import Plan, Planner
from sglang_pat.srt.radix import check_plan
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats

TARGET = target(num_sms=1, cuts=("branches",))
CORES = ("rust", "python")
SYSTEM = 100  # tokens that requests share; not a multiple of CHUNK
BRANCH = SYSTEM // CHUNK * CHUNK  # as far as a state can be shared
ROUNDS = 14


@pytest.fixture(params=[(core, kind) for core in CORES for kind in STRATEGIES], ids="-".join)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HybridCache:
    core, strategy = request.param
    return HybridCache(
        monkeypatch, core, strategy, slots=20_000, rows=8 * ROUNDS, context=1024, states=80
    )


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1 << 15) for _ in range(length)]


def plan_of(cache: HybridCache, reqs: list[Any], steps: StepPlanner | None = None) -> Plan:
    """The plan of a decode step of requests, compared with SGLang's own paths and slots."""
    steps = steps or StepPlanner(TARGET, Stats())
    batch, lens = cache.batch(reqs)
    made = steps.plan(batch, known(lens))
    assert made is not None and not steps._stats.fallbacks
    check_plan(made, reqs, steps.view, cache.table.req_to_token, batch.rows)
    limits = [req.kv.cache_protected_len if req.lock else 0 for req in reqs]
    paths = [cache.path(req) if req.lock else [] for req in reqs]
    expected = Planner(TARGET).plan(paths, lens.numpy(), limits)
    for part in ("items", "members", "queries", "min_seq_lens", "max_seq_lens"):
        assert np.array_equal(getattr(made, part), getattr(expected, part)), part
    return made


def shared_tokens(plan: Plan, queries: int) -> int:
    """Tokens that so many queries share."""
    segments = plan.segments
    return int(segments["kv_len"][segments["num_queries"] == queries].sum())


def test_a_prefix_is_shared_as_far_as_the_tree_holds_it(cache: HybridCache) -> None:
    """With the extra buffer the request that comes second leaves a state where it branches off,
    rounded down to ``CHUNK``, and holds the tree up to there; the later ones share more."""
    system = text(0, SYSTEM)
    reqs = [cache.admit([*system, *text(1 + i, 30 + 7 * i)]) for i in range(4)]
    made = plan_of(cache, reqs)
    assert shared_tokens(made, 4) == (BRANCH if cache.buffered else SYSTEM)
    assert shared_tokens(made, 3) == (SYSTEM - BRANCH if cache.buffered else 0)
    held = [req.kv.cache_protected_len for req in reqs]
    whole = [len(req.full_untruncated_fill_ids) for req in reqs]
    assert held == ([128, BRANCH, BRANCH + 48, BRANCH + 48] if cache.buffered else whole)


def test_a_short_question_shares_all_that_it_matched(cache: HybridCache) -> None:
    """With the extra buffer a prefill of less than ``CHUNK`` leaves no state and nothing in the
    tree: the request goes on holding what it matched."""
    system = text(0, BRANCH)
    cache.release(cache.admit([*system, 1]))
    reqs = [cache.admit([*system, *text(1 + i, CHUNK - 1)]) for i in range(3)]
    assert shared_tokens(plan_of(cache, reqs), 3) == BRANCH
    for req in reqs:
        assert req.kv.cache_protected_len == BRANCH + (0 if cache.buffered else CHUNK - 1)


def test_a_step_before_the_prefill_is_processed_shares_what_was_matched(
    cache: HybridCache,
) -> None:
    """As under overlap scheduling: the rows hold K/V of their own until the checkpoint."""
    system = text(0, SYSTEM)
    steps = StepPlanner(TARGET, Stats())
    reqs = [cache.prefill([*system, *text(1 + i, 40)]) for i in range(3)]
    assert plan_of(cache, reqs, steps).num_shared_items == 0
    for req in reqs:
        cache.checkpoint(req)
    assert shared_tokens(plan_of(cache, reqs), 3) == SYSTEM
    again = cache.prefill([*system, *text(9, 40)])
    assert 0 <= again.prefix_len <= BRANCH
    assert shared_tokens(plan_of(cache, [*reqs, again], steps), 4) == again.prefix_len


def test_a_second_turn_starts_from_the_state_of_the_first(cache: HybridCache) -> None:
    system = text(0, SYSTEM)
    first = [*system, *text(1, 60)]
    cache.release(cache.admit(first))
    other = cache.admit([*system, *text(2, 60)])
    turn = cache.prefill([*first, *text(3, 50)])
    assert turn.prefix_len == (len(first) // CHUNK * CHUNK if cache.buffered else len(first))
    assert turn.kv.mamba_cow_src_index is not None  # its state is the tree's
    cache.checkpoint(turn)
    made = plan_of(cache, [turn, cache.admit([*first, *text(4, 50)]), other])
    common = BRANCH if cache.buffered else SYSTEM  # as far as `other` holds
    assert shared_tokens(made, 3) == common
    assert shared_tokens(made, 2) == len(first) - common


def test_states_are_evicted_under_a_running_request(cache: HybridCache) -> None:
    """A prefix of which only the states are gone is prefilled anew, and is shared again."""
    system = text(0, SYSTEM)
    steps = StepPlanner(TARGET, Stats())
    reqs = [cache.admit([*system, *text(1 + i, 40)]) for i in range(2)]
    for i in range(3):
        cache.release(cache.admit([*system, *text(10 + i, 40)]))
    before = [cache.path(req) for req in reqs], shared_tokens(plan_of(cache, reqs, steps), 2)
    free = cache.table.mamba_allocator.available_size()
    cache.evict(states=80)
    assert cache.table.mamba_allocator.available_size() > free
    reqs[0].lock, lock = None, reqs[0].lock  # so that the batch is read anew
    plan_of(cache, reqs, steps)
    reqs[0].lock = lock
    after = [cache.path(req) for req in reqs], shared_tokens(plan_of(cache, reqs, steps), 2)
    assert after == before
    cold = cache.prefill([*system, *text(20, 40)])
    # The only state left on its way is that of the request which branched off, and runs.
    assert cold.prefix_len == (BRANCH if cache.buffered else 0)
    cache.checkpoint(cold)
    common = BRANCH if cache.buffered else SYSTEM
    assert shared_tokens(plan_of(cache, [*reqs, cold], steps), 3) == common


@pytest.mark.parametrize("seed", range(2))
def test_plans_follow_splits_and_evictions(cache: HybridCache, seed: int) -> None:
    """Requests come, end and are evicted; paths are remembered from step to step."""
    rng = random.Random(seed)
    steps = StepPlanner(TARGET, Stats())
    prompts: list[list[int]] = [[]]
    reqs: list[Any] = []
    splits = shared = 0
    for turn in range(ROUNDS):
        before = [len(cache.path(req)) for req in reqs]
        for _ in range(3):
            start = rng.choice(prompts)
            own = [rng.randrange(1 << 15) for _ in range(rng.randrange(2, 50))]
            prompts.append([*start[: rng.randrange(len(start) + 1)], *own][:400])
            reqs.append(cache.admit(prompts[-1]))
        after = [len(cache.path(req)) for req in reqs[: len(before)]]
        splits += sum(a > b for a, b in zip(after, before, strict=True))
        shared += plan_of(cache, reqs, steps).num_shared_items
        while len(reqs) > 8:
            cache.release(reqs.pop(rng.randrange(len(reqs))))
        if turn % 3 == 2:
            cache.evict(tokens=rng.randrange(300), states=rng.randrange(12))
        plan_of(cache, reqs, steps)
    assert splits > 0 and shared > 0
