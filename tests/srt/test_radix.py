# SPDX-License-Identifier: Apache-2.0
"""What the radix view gives the planner, against SGLang's own paths, while the tree changes; and
how much of it is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.trees import Path, clipped, target
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.session.session_controller import Session

from benchmarks.host.live import CACHES, LiveCache, text
from sglang_pat import _C
from sglang_pat.plan_text import ranges
from sglang_pat.planner import Plan, Planner
from sglang_pat.slots import SlotMismatch
from sglang_pat.srt import radix
from sglang_pat.srt.radix import HANDLE, NO_NODE, RadixView, check_plan
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import NOT_READ, TOO_LONG, Stats

# Every shared node is an item of its own: the plan shows the tree.
TARGET = target(num_sms=1, cuts=("branches",))


def reads(plan: Plan) -> list[tuple[int, int, list[int]]]:
    """What a plan reads: from which token on, how many, and for which queries."""
    return sorted((each.begin, each.tokens, sorted(each.queries)) for each in ranges(plan))


class ViewBed:
    """A test bed: a real cache, and a view and a planner that follow it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.cache = LiveCache(kind, slots=40_000, rows=256, context=1024)
        self.planner = Planner(TARGET)
        self.view = RadixView(self.cache.tree)

    def path(self, req: Any) -> Path:
        """A request's path as SGLang tells it, or climbed where it has no call for that."""
        if req.lock is None:
            return []
        if self.kind != "classic":
            (path,) = self.cache.tree.tree_core.collect_path_info([req.lock.node])
            return [(node.node_id, node.path_start, node.path_end) for node in path]
        chain, node = [], req.lock.node
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        ends = np.cumsum([len(node.key) for node in reversed(chain)]).tolist()
        ids = [node.id for node in reversed(chain)]
        return list(zip(ids, [0, *ends[:-1]], ends, strict=True))

    def plan(self, reqs: list[Any]) -> Plan:
        batch, lens = self.cache.batch(reqs)
        handles = self.view.read_handles(reqs, batch.rows, 0, anew=True)
        return self.view.plan(self.planner, reqs, handles, lens.numpy())[0]

    def check(self, reqs: list[Any]) -> Plan:
        """A plan, which must be that of SGLang's own paths."""
        made = self.plan(reqs)
        paths = [clipped(self.path(req), req.kv.cache_protected_len) for req in reqs]
        lens = self.cache.batch(reqs)[1].numpy()
        expected = Planner(TARGET).plan(paths, lens)
        assert reads(made) == reads(expected)
        return made


@contextmanager
def changed(bed: ViewBed, reqs: list[Any], rng: random.Random) -> Iterator[None]:
    """Some requests without a lock, or that share less, to a node's edge or into it."""
    before = [(req, req.lock, req.kv.cache_protected_len) for req in reqs]
    for req in reqs:
        edges = [edge for node in bed.path(req) for edge in node[1:]]
        if edges and rng.random() < 0.5:
            req.kv.cache_protected_len = rng.choice([rng.choice(edges), rng.randrange(edges[-1])])
        if rng.random() < 0.1:
            req.lock = None
    yield
    for req, lock, protected in before:
        req.lock, req.kv.cache_protected_len = lock, protected


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(3))
def test_plans_follow_a_tree_that_changes_between_batches(kind: str, seed: int) -> None:
    """Requests come, leave the batch, come back and end; nodes are split and evicted."""
    rng, bed = random.Random(seed), ViewBed(kind)
    prompts: list[list[int]] = [[]]
    live: list[Any] = []
    reqs: list[Any] = []
    splits = shared = 0
    for _ in range(24):
        before = [len(bed.path(req)) for req in live]
        for _ in range(rng.randrange(1, 6)):
            start = rng.choice(prompts)
            prompts.append(start[: rng.randrange(len(start) + 1)] + text(rng, rng.randrange(2, 30)))
            live.append(bed.cache.admit(prompts[-1]))
        after = [len(bed.path(req)) for req in live[: len(before)]]
        splits += sum(a > b for a, b in zip(after, before, strict=True))
        if not reqs or rng.random() < 0.4:
            reqs = rng.sample(live, rng.randrange(1, len(live) + 1))
        for req in rng.sample(live, min(len(live), 3)):  # else most requests stay
            if req not in reqs:
                reqs.insert(rng.randrange(len(reqs) + 1), req)
            elif len(reqs) > 1:
                reqs.remove(req)
        shared += bed.check(reqs).num_shared_items
        with changed(bed, reqs, rng):
            bed.check(reqs)
        for req in [req for req in live if req not in reqs and rng.random() < 0.2]:
            live.remove(req)
            bed.cache.end(req, text(rng, rng.randrange(3)))
        bed.cache.tree.evict(EvictParams(num_tokens=rng.randrange(40)))
    assert splits and shared


def shared_of(plan: Plan | None) -> list[list[int]]:
    """The queries of each item that several share."""
    assert plan is not None
    return [one.queries for one in ranges(plan) if len(one.queries) > 1]


@pytest.mark.parametrize("kind", CACHES)
def test_deep_paths_are_read_by_several_plans(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan reads more than so many nodes and the rest of a path; those that are left share
    nothing yet, and the next steps read on although the batch stays the same. The requests of a
    path that is longer share nothing, and neither keep others from being read nor plans from
    lasting; what of the path is known already does not count."""
    rng, bed = random.Random(1), ViewBed(kind)
    monkeypatch.setattr(radix, "MOST_READ", 30)

    def deep(nodes: int) -> list[int]:
        prompt = text(rng, 2)
        for _ in range(nodes):  # a node for each beginning
            prompt += text(rng, 3)
            bed.cache.admit(prompt)
        return prompt

    reqs = [bed.cache.admit(prompt) for prompt in [deep(25) for _ in range(4)] for _ in range(2)]
    batch, lens = bed.cache.batch(reqs)
    steps = StepPlanner(TARGET, stats := Stats())
    for made, shared in ((True, 4), (True, 8), (False, 8)):
        plan = steps.plan(batch, known(lens))
        assert steps.made is made and len({q for some in shared_of(plan) for q in some}) == shared
    assert stats.private_requests == {NOT_READ: 4} and not stats.fallbacks
    bed.check(reqs)

    prompt, own = deep(50), text(rng, 9)
    middle = bed.cache.admit(prompt[:80])
    reqs = [bed.cache.admit(tokens) for tokens in (prompt, prompt, own, own)]
    steps = StepPlanner(TARGET, stats := Stats())
    batch, lens = bed.cache.batch(reqs)
    for made in (True, True, False):
        plan = steps.plan(batch, known(lens))
        assert steps.made is made
    assert shared_of(plan) == [[2, 3]] and not stats.fallbacks
    # The first plan had read enough with the first of the two.
    assert stats.private_requests == {TOO_LONG: 3, NOT_READ: 3}
    for some in ([middle, *reqs[2:]], [middle, *reqs]):
        batch, lens = bed.cache.batch(some)
        plan = steps.plan(batch, known(lens))
    assert max(map(len, shared_of(plan))) == 3


class CountingCore:
    """SGLang's compiled tree core; counts the nodes that it is asked for. ``knows``: whether it
    says a node's parent, as it does while the node's K/V are on the device."""

    def __init__(self, bed: ViewBed, *, knows: bool = True) -> None:
        self._core, self._knows = bed.cache.tree.tree_core._binding, knows
        self.parents = self.lengths = 0
        bed.view._paths = _C.RadixPaths.of_tree_core(self, radix.MOST_READ)

    def get_node_key_lengths(self, ids: list[int]) -> Any:
        self.lengths += len(ids)
        return self._core.get_node_key_lengths(ids)

    def validate_buffer_backup(self, node: int, length: int) -> Any:
        self.parents += 1
        return self._core.validate_buffer_backup(node, length) if self._knows else None

    def collect_path_info(self, ids: list[int]) -> Any:
        paths = self._core.collect_path_info(ids)
        self.parents += sum(map(len, paths))
        return paths


def test_only_what_is_new_is_read() -> None:
    """Also where requests stand deep: a request that comes costs its own nodes alone."""
    bed, rng = ViewBed("rust"), random.Random(0)
    core = CountingCore(bed)
    talks = [text(rng, 50)] * 8
    for _ in range(20):
        talks = [bed.cache.end(bed.cache.admit(talk + text(rng, 3)), [7] * 5) for talk in talks]
    reqs = [bed.cache.admit([*talk, 1, 2]) for talk in talks]

    def parents_read(batch: list[Any]) -> int:
        core.parents = 0
        bed.check(batch)
        return core.parents

    depth = len(bed.path(reqs[0]))
    assert depth >= 40 and parents_read(reqs) < 1.2 * 8 * depth
    reqs, left = reqs[1:], reqs[0]
    assert parents_read(reqs) == 0
    core.lengths = 0
    below = bed.cache.admit([*talks[2], 1, 2, 3, 4])  # below another's leaf
    assert parents_read([*reqs, below]) == 1
    beside = bed.cache.admit([*talks[3], 1, 9, 9])
    # The new leaf, the new node of the split and what it was split from.
    assert parents_read([*reqs, beside]) == 3
    assert parents_read([*reqs, beside, left]) < 1.3 * depth
    assert core.lengths < 4 + depth + 3 * len(talks)


def test_a_node_without_k_v_on_the_device_is_read_from_its_path() -> None:
    bed = ViewBed("rust")
    CountingCore(bed, knows=False)
    bed.check([bed.cache.admit([1, 2, 3, own, own]) for own in range(10, 14)])


def node(up: object, **attributes: object) -> SimpleNamespace:
    return SimpleNamespace(parent=up, **attributes)


ROOT = node(None, id=0, key=())


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (object(), AttributeError, "parent"),
        (node(object(), id=9, key=(1,)), AttributeError, "id"),
        (node(node(None, id="x"), id=9, key=(1,)), TypeError, "attribute id is"),
        (node(ROOT, id=9), AttributeError, "key"),
        (node(ROOT, id=9, key=None), TypeError, "has no len"),
    ],
)
def test_a_bad_node_raises_and_all_is_read_anew(leaf: Any, error: Any, message: str) -> None:
    paths, planner = _C.RadixPaths.of_nodes("id", "parent", "key", radix.MOST_READ), Planner(TARGET)
    good = node(node(ROOT, id=1, key=(1, 2, 3, 4, 5)), id=2, key=(6, 7))

    def plan(*leaves: Any) -> Plan:
        handles = np.array([(getattr(each, "id", 8), 7, 0) for each in leaves], HANDLE).tobytes()
        lens = np.full(len(leaves), 9)
        return planner.plan_from_handles(handles, lens, paths, lambda query, _: leaves[query])

    for _ in range(2):
        with pytest.raises(error, match=message):
            plan(good, leaf, leaf)
    assert plan(good, good).num_shared_items > 0
    for length in (1, 2, 5):  # nodes in a circle
        chain = [node(None, id=20, key=(1,))]
        for i in range(1, length):
            chain.append(node(chain[-1], id=20 + i, key=(1,)))
        chain[0].parent = chain[-1]
        with pytest.raises(ValueError, match=r"node 2\d is among its own ancestors"):
            plan(chain[-1])


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_read_of_requests(kind: str) -> None:
    """Those without a node or a row of their own are counted, and rows of another form are refused:
    they are read at their address."""
    cache = LiveCache(kind, slots=1000, rows=5, context=64)
    reqs = [cache.admit([1, 2, 3, 4, own]) for own in range(5)]
    view = RadixView(cache.tree)
    rows = cache.batch(reqs)[0].rows
    reqs[1].lock = None
    reqs[2].kv.cache_protected_len = 0
    reqs[4].kv.req_pool_idx = None
    handles = view.read_handles(reqs, rows, 0, anew=True)
    table = np.frombuffer(handles, HANDLE)
    assert table["table_row"].tolist() == rows.tolist()
    assert (table["node"] == NO_NODE).tolist() == [False, True, False, False, True]
    assert table["tokens"].tolist() == [5, 5, 0, 5, 0]
    planner, lens = Planner(TARGET), np.full(7, 9, np.int64)
    _, private = view.plan(planner, reqs, handles, lens)
    assert private == {"no tree lock": 2, "nothing cached yet": 1}
    shared = [bool(path) for path in planner.last_paths()]
    assert shared == [True, False, False, True, False, False, False]
    with pytest.raises(ValueError, match="5 requests in a batch of 3 rows"):
        view.plan(planner, reqs, handles, lens[:3])
    for other in (rows.int(), rows.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match="must be contiguous int64 on the CPU"):
            view.read_handles(reqs, other, 0, anew=True)
    with pytest.raises(ValueError, match="5 requests in a batch of 3 rows"):
        view.read_handles(reqs, rows[:3], 0, anew=True)


@pytest.mark.parametrize("kind", ["rust", "python"])
def test_turns_of_streaming_sessions_have_the_path_of_their_session(kind: str) -> None:
    """A session of SGLang's and a request of one system prompt share it, in the first turn and
    later; check mode compares a turn's row with the tree."""
    cache, rng = LiveCache(kind, slots=4000, rows=8, context=512), random.Random(1)
    system, session = text(rng, 100), Session(1000, session_id="it", streaming=True)
    tokens, user = list(system), text(rng, 20)
    steps, slots = StepPlanner(TARGET, stats := Stats()), cache.table.req_to_token
    for _ in range(3):
        tokens += text(rng, 15)
        reqs = [cache.admit(tokens, session), cache.admit(system + user)]
        assert reqs[0].lock is None and reqs[1].lock is not None
        batch, lens = cache.batch(reqs)
        plan = steps.plan(batch, known(lens))
        assert plan is not None and not stats.private_requests and not stats.fallbacks
        check_plan(plan, reqs, steps.view, slots, batch.rows)
        assert [sorted(queries) for queries in shared_of(plan)] == [[0, 1]]
        # Beyond the first turn's prompt the row is the session's own.
        assert reqs[0].kv.cache_protected_len == len(system) + 15
        slots[batch.rows[0], len(system) + 7] += 1
        with pytest.raises(SlotMismatch, match="at token 107, the radix tree holds slot"):
            check_plan(plan, reqs, steps.view, slots, batch.rows)
        slots[batch.rows[0], len(system) + 7] -= 1
        reqs[0].finished_reason = FINISH_LENGTH(length=0)
        assert cache.tree.claim_kv_row(reqs[0])  # as the scheduler releases it
        assert not steps.view.lock_of(reqs[0])
