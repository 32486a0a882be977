# SPDX-License-Identifier: Apache-2.0
"""Random radix forests and what a correct plan has to satisfy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kit.pieces import DYNAMIC, check_pieces
from kit.plans import BRANCH, BRANCH_ROWS, COMMON_LAST, DIRECT, DRAFTS, PACK, SINGLE, UNMASKED_LAST
from sglang_pat.planner import Plan
from sglang_pat.target import CUTS, POLICIES, WITHOUT_BRANCHES, Target

Path = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Batch:
    paths: list[Path]
    seq_lens: list[int]

    def permuted(self, order: list[int]) -> Batch:
        return Batch([self.paths[i] for i in order], [self.seq_lens[i] for i in order])

    def drafted(self, draft_tokens: int) -> Batch:
        """With so many draft tokens behind every query's own."""
        return Batch(self.paths, [length + draft_tokens for length in self.seq_lens])


def clipped(path: Path, limit: int) -> Path:
    """What of a path lies before token ``limit``."""
    return [(node, start, min(end, limit)) for node, start, end in path if start < limit]


def target(**overrides: Any) -> Target:
    values = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=1024)
    return Target.h200(**(values | overrides))


def packed_rows(of: Target) -> int:
    """Of a query and KV head."""
    return of.num_q_heads // of.num_kv_heads * of.draft_tokens


@st.composite
def batches(draw: st.DrawFn, max_nodes: int = 14, max_queries: int = 24) -> Batch:
    """A forest of up to ``max_nodes`` radix nodes and queries that end anywhere in it; some paths
    are clipped inside their last node, as a protected length does."""
    nodes: list[Path] = [[]]
    for node_id in draw(st.permutations(range(100, 100 + draw(st.integers(0, max_nodes))))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        start = parent[-1][2] if parent else 0
        length = draw(st.one_of(st.integers(1, 4), st.integers(5, 90), st.just(700)))
        nodes.append([*parent, (node_id, start, start + length)])
    paths, seq_lens = [], []
    for _ in range(draw(st.integers(0, max_queries))):
        path = list(nodes[draw(st.integers(0, len(nodes) - 1))])
        if path and draw(st.integers(0, 4)) == 0:
            node_id, start, end = path[-1]
            path[-1] = (node_id, start, draw(st.integers(start + 1, end)))
        end = path[-1][2] if path else 0
        paths.append(path)
        seq_lens.append(end + draw(st.one_of(st.integers(0, 3), st.integers(4, 400))))
    return Batch(paths, seq_lens)


def targets() -> st.SearchStrategy[Target]:
    """Targets of all rules, cuts and heads with room for every plan of ``batches()``."""
    return st.builds(
        target,
        max_items=st.just(1 << 18),
        max_partials=st.just(1 << 18),
        num_q_heads=st.sampled_from([8, 16, 40, 64]),
        policy=st.sampled_from(POLICIES),
        cuts=st.sampled_from([CUTS, *((cut,) for cut in CUTS), WITHOUT_BRANCHES, ()]),
        hopper=st.booleans(),
        items_per_sm=st.sampled_from([1, 2]),
        partial_bytes=st.sampled_from([2, 4]),
        num_sms=st.sampled_from([1, 2, 132]),
        row_tiles=st.sampled_from([(16,), (16, 32, 64, 128)]),
    )


@dataclass(frozen=True)
class Range:
    """Tokens [start, start + length) of query ``reader`` that ``queries`` attend to, from ``at`` on
    in the list; ``tail``: as many as its sequence has from there on."""

    reader: int
    start: int
    length: int
    queries: list[int]
    tail: bool
    at: int


def content(plan: Plan) -> bytes:
    return ctypes.string_at(plan.data_ptr, plan.nbytes)


def segments_of(plan: Plan, index: int) -> Any:
    """The segments that item ``index`` reads."""
    first, count = plan.item_segments[index].tolist()
    assert 0 <= first < first + count <= plan.num_segments
    return plan.segments[first : first + count]


def first_segments(plan: Plan) -> Any:
    """Of each item the first segment: of an item that is no branch all that it reads."""
    return plan.segments[plan.item_segments["first_segment"]]


def members_of(plan: Plan, index: int) -> Any:
    item = plan.items[index]
    return plan.members[item["member_offset"] :][: item["num_queries"]]


def ranges_of(plan: Plan, index: int, seq_lens: list[int]) -> list[Range]:
    """What an item reads: one range, or those of a branch's segments."""
    members = members_of(plan, index)["query"].tolist()
    ranges, at = [], int(plan.items["list_start"][index])
    for query, start, length, room, first, count in segments_of(plan, index).tolist():
        assert 0 <= first < first + count <= len(members)
        queries, tail = members[first : first + count], length == DYNAMIC
        assert queries == [query] if tail else length == room > 0 and query in queries
        tokens = seq_lens[query] - start if tail else length
        assert start >= 0 and 0 <= tokens <= room
        ranges.append(Range(query, start, tokens, queries, tail, at))
        at += tokens
    return ranges


def ranges_of_query(made: Plan, query: int) -> list[tuple[int, int]]:
    """(start, length or DYNAMIC) of what the items of a plan without branches read for a query."""
    segments = first_segments(made)[["kv_start", "kv_len"]]
    reads = [query in members_of(made, index)["query"] for index in range(made.num_items)]
    return sorted(segments[reads].tolist())


def check_item(plan: Plan, index: int, made_for: Target, ranges: list[Range]) -> None:
    """An item's tile holds its rows, and its kind is what its members say, and that of a piece with
    draft tokens; a branch has no masks for the tiles that all of its queries attend to."""
    item, members, group = plan.items[index], members_of(plan, index), packed_rows(made_for)
    queries = members["query"].tolist()
    assert 0 < len(queries) == len(set(queries)) == item["num_queries"] and item["tokens"] == 0
    assert set(queries) == {query for part in ranges for query in part.queries}
    assert len(queries) * group <= item["row_tile"]
    if item["kind"] == BRANCH:
        assert item["row_tile"] == BRANCH_ROWS and len(ranges) <= 256
        assert item["list_start"] % 64 == 0
        ordered = ranges if item["order"] != UNMASKED_LAST else ranges[::-1]
        by_all = takewhile(lambda part: not part.tail and part.queries == queries, ordered)
        assert item["unmasked_tiles"] == sum(part.length for part in by_all) // 64
        single = False
    else:
        assert item["row_tile"] in made_for.row_tiles
        assert len(ranges) == 1 and ranges[0].queries == queries
        drafts = ranges[0].tail and made_for.draft_tokens > 1
        assert item["kind"] == (PACK if len(queries) > 1 else DRAFTS if drafts else SINGLE)
        single = len(queries) == 1
    assert (item["query"], item["partial"]) == (members[0].item() if single else (-1, 0))


def check_listed(plan: Plan, parts: list[Range], batch: Batch, seq_lens: list[int]) -> None:
    """As the snapshot and the forward do on a GPU: after all segments have been copied to the list,
    each item finds there what its queries hold, token by token: so they share it. Nothing else is
    written there; row tiles of one piece have one place."""
    held = []  # of each query what its tokens belong to, a node or itself, as if slots
    for query, (path, length) in enumerate(zip(batch.paths, seq_lens, strict=True)):
        owner = np.full(length, -1 - query, dtype=np.int64)
        for node_id, start, end in path:
            owner[start:end] = node_id
        held.append(owner * 2**32 + np.arange(length))
    listed = np.full(plan.list_tokens, -(2**62))
    for part in parts:
        slots = held[part.reader][part.start : part.start + part.length]
        there = listed[part.at : part.at + part.length]
        assert np.all((there == slots) | (there == -(2**62)))
        there[:] = slots
    for part in parts:
        for query in part.queries:
            slots = held[query][part.start : part.start + part.length]
            assert np.array_equal(listed[part.at : part.at + part.length], slots)
    rooms = {}
    for index, item in enumerate(plan.items):
        room = int(segments_of(plan, index)["room"].sum())
        rooms[int(item["list_start"])] = -(-room // 64) * 64 if item["kind"] == BRANCH else room
        assert (item["list_start"] < plan.branch_tokens) == (item["kind"] == BRANCH)
    assert sum(rooms.values()) == plan.list_tokens


def check_plan(plan: Plan, batch: Batch, made_for: Target, seq_lens: list[int]) -> None:
    """Every token of every query lies in exactly one of its items, or of its segments of one, whose
    members all share it; draft tokens but the first are in tails; partial slots are consecutive,
    ordered by position, that of a branch last, and used once."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in seq_lens]
    splits: list[list[tuple[bool, int, int]]] = [[] for _ in seq_lens]
    ranges = [ranges_of(plan, index, seq_lens) for index in range(plan.num_items)]
    parts = [part for of_item in ranges for part in of_item]
    masked = made_for.draft_tokens - 1
    for index, of_item in enumerate(ranges):
        check_item(plan, index, made_for, of_item)
        is_branch, first = bool(plan.items["kind"][index] == BRANCH), min(p.start for p in of_item)
        for query, partial in members_of(plan, index).tolist():
            splits[query].append((is_branch, first, partial))
    for part in parts:
        assert not part.tail or part.length >= masked
        for query in part.queries:
            pieces[query].append((part.start, part.length))
            assert part.tail or part.start + part.length <= seq_lens[query] - masked
    check_pieces(pieces, seq_lens)
    check_listed(plan, parts, batch, seq_lens)
    check_splits(plan, splits)
    common_tiles(plan)
    assert sum(part.length for part in parts) == plan.kv_tokens_read(sum(seq_lens))
    spans = plan.item_segments.tolist()
    read = [at for first, count in spans for at in range(first, first + count)]
    assert sorted(read) == list(range(plan.num_segments)) == list(range(len(plan.segments)))
    in_branches = plan.item_segments["num_segments"][plan.items["kind"] == BRANCH].sum()
    assert in_branches <= made_for.max_segments
    assert plan.branch_tokens <= made_for.max_branch_tokens and plan.branch_tokens % 64 == 0
    assert (plan.num_items, plan.num_members) == (len(plan.items), len(plan.members))
    assert plan.num_members == plan.items["num_queries"].sum()
    shares = [any(len(part.queries) > 1 for part in of_item) for of_item in ranges]
    assert plan.num_shared_items == sum(shares)


def check_splits(plan: Plan, splits: list[list[tuple[bool, int, int]]]) -> None:
    """Partial slots of all queries. ``splits``: of each query whether the item is a branch, where
    it starts and its slot, for every item that the query is a member of."""
    used = []
    for of_query, (offset, count) in zip(splits, plan.queries.tolist(), strict=True):
        partials = [partial for _, _, partial in sorted(of_query)]
        assert sum(is_branch for is_branch, _, _ in of_query) <= 1
        assert partials == ([DIRECT] if count == 1 else list(range(offset, offset + count)))
        used += partials if count > 1 else []
    assert sorted(used) == list(range(plan.num_partials))


def common_tiles(plan: Plan) -> list[int]:
    """KV tiles that each pair of branches begins with, negative if its halves begin with their
    other tokens; checks that both have them, and that no other items have any."""
    first, found = plan.num_wide_items, []
    end = first + plan.num_paired_items
    assert plan.num_paired_items % 2 == 0 and plan.num_paired_items <= plan.num_heavy_items
    assert not plan.items["common_tiles"][:first].any()
    assert not plan.items["common_tiles"][end:].any()
    for index in range(first, end, 2):
        one, other = plan.items[index], plan.items[index + 1]
        assert one["kind"] == other["kind"] == BRANCH and one["order"] == other["order"]
        tiles = int(one["common_tiles"])
        assert tiles == other["common_tiles"] > 0
        assert tiles <= min(one["unmasked_tiles"], other["unmasked_tiles"])
        both = [segments_of(plan, at)[["kv_start", "kv_len"]].tolist() for at in (index, index + 1)]
        same = takewhile(lambda two: two[0] == two[1] and two[0][1] > 0, zip(*both, strict=False))
        assert 64 * tiles <= sum(length for (_, length), _ in same)
        found.append(-tiles if one["order"] == COMMON_LAST else tiles)
    return found
