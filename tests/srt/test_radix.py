# SPDX-License-Identifier: Apache-2.0
"""What the radix view gives the planner, against SGLang's own paths, while the tree changes."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.trees import Path, target
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.session.session_controller import Session

from benchmarks.host.live import CACHES, LiveCache
from sglang_pat.planner import Plan, Planner
from sglang_pat.slots import SlotMismatch
from sglang_pat.srt.radix import NO_NODE, RadixView, check_plan
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats

TARGET = target(num_sms=1, cuts=("branches",))
ROUNDS = 12


def path_of(cache: LiveCache, kind: str, req: Any) -> Path:
    """A request's path as SGLang tells it, or climbed where it has no call for that."""
    if req.lock is None:
        return []
    if kind != "classic":
        (path,) = cache.tree.tree_core.collect_path_info([req.lock.node])
        return [(node.node_id, node.path_start, node.path_end) for node in path]
    chain, node = [], req.lock.node
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    ends = np.cumsum([len(node.key) for node in reversed(chain)]).tolist()
    ids = [node.id for node in reversed(chain)]
    return list(zip(ids, [0, *ends[:-1]], ends, strict=True))


def plan(planner: Planner, view: RadixView, reqs: list[Any], batch: Any, lens: Any) -> Plan:
    handles = view.read_handles(reqs, batch.rows, len(reqs), 0, anew=True)
    return view.plan(planner, reqs, handles, lens.numpy())[0]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(3))
def test_plans_follow_a_tree_that_splits_between_steps(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    cache = LiveCache(kind, slots=40_000, rows=8 * ROUNDS, context=1024)
    view, planner = RadixView(cache.tree), Planner(TARGET)
    prompts: list[list[int]] = [[]]
    reqs: list[Any] = []
    splits = 0
    for _ in range(ROUNDS):
        before = [len(path_of(cache, kind, req)) for req in reqs]
        for _ in range(4):
            known = rng.choice(prompts)
            own = [rng.randrange(1 << 15) for _ in range(rng.randrange(2, 30))]
            prompts.append([*known[: rng.randrange(len(known) + 1)], *own])
            reqs.append(cache.admit(prompts[-1]))
        after = [len(path_of(cache, kind, req)) for req in reqs[: len(before)]]
        splits += sum(a > b for a, b in zip(after, before, strict=True))
        if rng.random() < 0.3:
            rng.choice(reqs).lock = None
        some = rng.choice(reqs)
        some.kv.cache_protected_len = rng.randrange(some.kv.cache_protected_len + 1)
        batch, lens = cache.batch(reqs)
        made = plan(planner, view, reqs, batch, lens)
        paths = [path_of(cache, kind, req) for req in reqs]
        limits = [req.kv.cache_protected_len for req in reqs]
        expected = planner.plan(paths, lens.numpy(), limits)
        for part in ("items", "members", "queries", "min_seq_lens", "max_seq_lens"):
            assert np.array_equal(getattr(made, part), getattr(expected, part)), part
        assert made.num_shared_items > 0
    assert splits > 0


@pytest.mark.parametrize("kind", CACHES)
def test_requests_without_a_node_are_counted(kind: str) -> None:
    cache = LiveCache(kind, slots=1000, rows=4, context=64)
    reqs = [cache.admit([1, 2, 3, 4, own]) for own in range(4)]
    reqs[1].lock = None
    reqs[2].kv.cache_protected_len = 0
    view = RadixView(cache.tree)
    batch, _ = cache.batch(reqs)
    handles = view.read_handles(reqs, batch.rows, 6, 0, anew=True)
    assert handles.table["table_row"].tolist() == batch.rows.tolist()
    assert (handles.table["node"] == NO_NODE).tolist() == [False, True, False, False]
    assert handles.table["tokens"].tolist() == [req.kv.cache_protected_len for req in reqs]
    planner, lens = Planner(TARGET), np.full(6, 9, np.int64)
    _, private = view.plan(planner, reqs, handles, lens)
    assert json.dumps(private) == '{"no tree lock": 1, "nothing cached yet": 1}'
    shared = [bool(path) for path in planner.last_paths()]
    assert shared == [True, False, False, True, False, False]
    with pytest.raises(ValueError, match="4 requests in a batch of 3 rows"):
        view.plan(planner, reqs, handles, lens[:3])


@pytest.mark.parametrize("kind", CACHES)
def test_rows_of_another_form_are_refused(kind: str) -> None:
    """They are read at their address."""
    cache = LiveCache(kind, slots=1000, rows=4, context=64)
    reqs = [cache.admit([1, 2, own]) for own in range(4)]
    rows = cache.batch(reqs)[0].rows
    view = RadixView(cache.tree)
    for other in (rows.int(), rows.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match="must be contiguous int64 on the CPU"):
            view.read_handles(reqs, other, 4, 0, anew=True)
    with pytest.raises(ValueError, match="4 requests in a batch of 3 rows"):
        view.read_handles(reqs, rows[:3], 4, 0, anew=True)


class Conversation:
    """A streaming session of SGLang's over a live cache."""

    def __init__(self, cache: LiveCache, name: str) -> None:
        self.cache = cache
        self.session = Session(1000, session_id=name, streaming=True)
        self.tokens: list[int] = []

    def turn(self, tokens: list[int]) -> Any:
        self.tokens += tokens
        return self.cache.admit(self.tokens, self.session)

    def finish(self, req: Any) -> None:
        """The end of a turn, as the scheduler releases it."""
        req.finished_reason = FINISH_LENGTH(length=0)
        assert self.cache.tree.claim_kv_row(req)


@pytest.mark.parametrize("kind", ["rust", "python"])
def test_turns_of_streaming_sessions_have_the_path_of_their_session(kind: str) -> None:
    """Two sessions and a request of one system prompt share it, in the first turn and later."""
    rng = random.Random(1)

    def text(length: int) -> list[int]:
        return [rng.randrange(1 << 15) for _ in range(length)]

    cache = LiveCache(kind, slots=4000, rows=8, context=512)
    system, user = text(100), text(20)
    first, second = Conversation(cache, "first"), Conversation(cache, "second")
    steps = StepPlanner(TARGET, Stats())
    for turn in range(3):
        added = [text(15), text(25)] if turn else [system + text(15), system + text(25)]
        reqs = [first.turn(added[0]), cache.admit(system + user), second.turn(added[1])]
        assert reqs[0].lock is None and reqs[1].lock is not None
        batch, lens = cache.batch(reqs)
        plan = steps.plan(batch, known(lens))
        assert plan is not None
        check_plan(plan, reqs, steps.view, cache.table.req_to_token, batch.rows)
        shared = plan.segments[plan.segments["num_queries"] > 1]
        assert shared["kv_len"].sum() == len(system) and shared["num_queries"].max() == 3
        assert not steps._stats.private_requests and not steps._stats.fallbacks
        # Beyond the first turn's prompt the row is the session's own.
        assert reqs[0].kv.cache_protected_len == len(system) + 15
        assert len(first.tokens) == len(system) + 15 * (turn + 1)
        for talk, req in ((first, reqs[0]), (second, reqs[2])):
            talk.finish(req)
        assert not steps.view.lock_of(reqs[0])


@pytest.mark.parametrize("kind", ["rust", "python"])
def test_check_mode_compares_a_turns_row_with_the_tree(kind: str) -> None:
    cache = LiveCache(kind, slots=1000, rows=4, context=128)
    talk = Conversation(cache, "only")
    prompt = list(range(50))
    talk.finish(talk.turn(prompt))
    req = talk.turn([51, 52])
    batch, lens = cache.batch([req])
    steps = StepPlanner(TARGET, Stats())
    plan = steps.plan(batch, known(lens))
    assert plan is not None
    check_plan(plan, [req], steps.view, cache.table.req_to_token, batch.rows)
    cache.table.req_to_token[int(batch.rows[0]), 7] += 1
    with pytest.raises(SlotMismatch, match="at token 7, the radix tree holds slot"):
        check_plan(plan, [req], steps.view, cache.table.req_to_token, batch.rows)
