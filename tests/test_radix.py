# SPDX-License-Identifier: Apache-2.0
"""What the radix view gives the planner, against SGLang's own paths, while the tree changes."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit_trees import Path, target

from sglang_pat.bench.live import CACHES, LiveCache
from sglang_pat.planning import Plan, Planner
from sglang_pat.radix import RadixView

TARGET = target(units=1, policy="naive")
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
    handles = view.read_handles(reqs, batch.rows, 0, anew=True)
    found, limits, _ = view.look_up(reqs, handles, len(reqs))
    return view.plan(planner, found, lens.numpy(), limits)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(3))
def test_plans_follow_a_tree_that_splits_between_steps(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    cache = LiveCache(kind, slots=40_000, rows=8 * ROUNDS, context=1024)
    view, planner = RadixView(cache.tree), Planner(TARGET)
    assert (view.reader is None) == (kind == "rust")
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
    handles = view.read_handles(reqs, batch.rows, 0, anew=True)
    found, limits, private = view.look_up(reqs, handles, 6)
    assert [one is None for one in found] == [False, True, False, False, True, True]
    protected = [req.kv.cache_protected_len for req in reqs]
    assert protected[3] > 0 and limits.tolist() == [*protected, 0, 0]
    assert json.dumps(private) == '{"no tree lock": 1, "nothing cached yet": 1}'
    with pytest.raises(ValueError, match="4 requests in a batch of 3 rows"):
        view.look_up(reqs, handles, 3)


@pytest.mark.parametrize("kind", CACHES)
def test_rows_of_another_form_are_refused(kind: str) -> None:
    """They are read at their address."""
    cache = LiveCache(kind, slots=1000, rows=4, context=64)
    reqs = [cache.admit([1, 2, own]) for own in range(4)]
    rows = cache.batch(reqs)[0].rows
    view = RadixView(cache.tree)
    for other in (rows.int(), rows.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match="must be contiguous int64 on the CPU"):
            view.read_handles(reqs, other, 0, anew=True)
    with pytest.raises(ValueError, match="4 requests in a batch of 3 rows"):
        view.read_handles(reqs, rows[:3], 0, anew=True)
