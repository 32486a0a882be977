# SPDX-License-Identifier: Apache-2.0
"""Paths that are remembered share what the live tree shares, and most are not asked for again."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pat.bench.host.live import LiveCache
from sglang_pat.srt.paths import REREAD_AFTER, KnownPaths, Path, remember

NODE, START, END, CHILDREN = 0, 2, 3, 5


class Tree:
    """Live requests in the compiled tree core, and what is asked of it."""

    def __init__(self) -> None:
        self.cache = LiveCache("rust", slots=60_000, rows=400, context=512)
        self.reqs: list[Any] = []
        self.asked: list[int] = []
        self.known = KnownPaths(self.query, (NODE, START, END), CHILDREN)

    def query(self, nodes: Any) -> list[Path]:
        self.asked.append(len(nodes))
        return self.read(nodes)

    def read(self, nodes: Any) -> list[Path]:
        found: list[Path] = self.cache.tree.tree_core._binding.collect_path_info(list(nodes))
        return found

    def admit(self, tokens: list[int]) -> None:
        self.reqs.append(self.cache.admit(tokens))

    def end(self, req: Any, output: list[int]) -> None:
        """A request ends: its output goes into the tree, and nothing of it is locked."""
        self.reqs.remove(req)
        tokens = req.full_untruncated_fill_ids
        tokens.extend(output)
        slots = self.cache.allocator.alloc(len(output))
        row = req.kv.req_pool_idx
        self.cache.table.write((row, slice(len(tokens) - len(output), len(tokens))), slots)
        req.finished_reason = FINISH_LENGTH(length=0)
        self.cache.tree.checkpoint(req, up_to=len(tokens))
        self.cache.tree.unlock(req.lock)

    def match(self, tokens: list[int]) -> None:
        """A request that waits: nothing but a match, which may split a node."""
        req = self.reqs[0]
        key = RadixKey(type(req.full_untruncated_fill_ids)("q", tokens), None)
        self.cache.tree.match_prefix(MatchPrefixParams(key=key))

    @property
    def nodes(self) -> list[int]:
        return [req.lock.node for req in self.reqs]


def shared(paths: list[Path]) -> list[int]:
    """Tokens that each pair of paths shares by its nodes."""
    spans = [{(node[NODE], node[START], node[END]) for node in path} for path in paths]
    return [
        sum(end - start for _, start, end in one & other)
        for one, other in itertools.combinations(spans, 2)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_shared_is_what_the_tree_says(seed: int) -> None:
    """Requests come, end and wait over few token ids, so that nodes split at every length."""
    rng = random.Random(seed)
    tree = Tree()

    def text(length: int) -> list[int]:
        return [rng.randrange(3) for _ in range(length)]

    prompts = [text(60) for _ in range(3)]
    for _ in range(16):
        tree.admit(rng.choice(prompts)[: rng.randrange(10, 60)] + text(12))
    splits = saved = 0
    for _ in range(150):
        before = [len(path) for path in tree.read(tree.nodes)]
        prompt = rng.choice(prompts)[: rng.randrange(1, 60)]
        event = rng.random()
        if event < 0.3:
            tree.match(prompt)
        elif event < 0.6 and len(tree.reqs) > 8:
            tree.end(rng.choice(tree.reqs), text(8))
        elif event < 0.8:
            tree.admit(list(rng.choice(tree.reqs).full_untruncated_fill_ids)[:-1] + text(3))
        else:
            tree.admit(prompt + text(rng.choice((1, 12))))
        after = tree.read(tree.nodes)
        splits += sum(len(path) for path in after[: len(before)]) > sum(before)
        asked = len(tree.asked)
        assert shared(tree.known.look_up(tree.nodes)) == shared(after)
        saved += sum(tree.asked[asked:]) < len(tree.nodes)
    assert splits > 20 and saved > 20


def test_only_new_leaves_are_asked_for() -> None:
    tree = Tree()
    system = list(range(50))
    for own in range(8):
        tree.admit([*system, 100 + own, 1])
    tree.known.look_up(tree.nodes)
    tree.known.look_up(tree.nodes[1:])
    assert tree.asked == [8]
    tree.admit([*system, 200, 1])
    tree.admit([*system, 100, 1, 7, 7])  # below another's leaf
    paths = tree.known.look_up(tree.nodes)
    assert tree.asked == [8, 2]
    assert shared(paths) == shared(tree.read(tree.nodes)) and len(paths[-1]) == 3
    tree.known.look_up(tree.nodes)
    assert tree.asked == [8, 2]


def test_a_split_on_a_new_path_has_all_read_again() -> None:
    tree = Tree()
    for own in range(8):
        tree.admit([*range(50), 100 + own])
    tree.known.look_up(tree.nodes)
    tree.admit([*range(30), 7])
    assert tree.known.look_up(tree.nodes) == tree.read(tree.nodes)
    tree.admit(list(range(20)))  # ends where it splits: a leaf of its own, but with children
    assert tree.known.look_up(tree.nodes) == tree.read(tree.nodes)
    assert tree.asked == [8, 1, 9, 1, 10]


def test_all_is_read_again_from_time_to_time() -> None:
    tree = Tree()
    for own in range(4):
        tree.admit([1, 2, 3, 100 + own])
    for _ in range(2 * REREAD_AFTER):
        tree.known.look_up(tree.nodes)
    assert tree.asked == [4, 4, 4]


def test_a_node_that_is_gone_raises_and_the_next_look_up_is_right() -> None:
    tree = Tree()
    for own in range(4):
        tree.admit([1, 2, 3, 100 + own])
    tree.known.look_up(tree.nodes)
    with pytest.raises(KeyError):
        tree.known.look_up([*tree.nodes, 1 << 40])
    assert tree.known.look_up(tree.nodes) == tree.read(tree.nodes)


def test_there_is_no_memory_where_children_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.unified_cache import unified_tree_core_interface as interface

    def query(nodes: Any) -> list[Path]:
        return []

    assert remember(query, (0, 2, 3)) != query
    fields = interface.TreePathNodeInfo.__struct_fields__[:-1]
    older = type("TreePathNodeInfo", (), {"__struct_fields__": fields})
    monkeypatch.setattr(interface, "TreePathNodeInfo", older)
    assert remember(query, (0, 2, 3)) == query
