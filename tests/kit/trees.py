# SPDX-License-Identifier: Apache-2.0
"""Random radix forests and what a correct plan has to satisfy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kit.pieces import DYNAMIC, check_pieces
from kit.plans import BRANCH, BRANCH_ROWS, DIRECT, DRAFTS, PACK, SINGLE, UNMASKED_LAST
from sglang_pat.explain.tree import Tree
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


BRANCHING = tuple(cut for cut in CUTS if cut not in WITHOUT_BRANCHES)
# Tokens that each tail of a plan may grow at least: in a branch, and in an item of its own.
BRANCH_GROWTH, GROWTH = 64, 128


def target(**overrides: Any) -> Target:
    values = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=1024)
    return Target.h200(**(values | overrides))


def packed_rows(of: Target) -> int:
    """Of a query and KV head."""
    return of.num_q_heads // of.num_kv_heads * of.draft_tokens


def batch_of(tree: Tree) -> Batch:
    return Batch(tree.paths, tree.seq_lens)


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


def owners(batch: Batch, query: int, length: int) -> np.ndarray:
    """[length] what each token of a query belongs to: its radix node, or the query itself."""
    owner = np.full(length, -1 - query, dtype=np.int64)
    for node_id, start, end in batch.paths[query]:
        owner[start:end] = node_id
    return owner


@dataclass(frozen=True)
class Range:
    """Tokens [start, start + length) of query ``reader`` that ``queries`` attend to."""

    reader: int
    start: int
    length: int
    queries: list[int]


def segments_of(plan: Plan, index: int) -> Any:
    """The segments that item ``index`` reads."""
    first, count = plan.item_segments[index].tolist()
    assert 0 <= first < first + count <= plan.num_segments
    return plan.segments[first : first + count]


def first_segments(plan: Plan) -> Any:
    """Of each item the first segment: of an item that is no branch all that it reads."""
    return plan.segments[plan.item_segments["first_segment"]]


def branches_of(plan: Plan) -> list[tuple[Any, Any]]:
    """The items that are branches, and the segments of each."""
    branches = np.flatnonzero(plan.items["kind"] == BRANCH)
    return [(plan.items[i], segments_of(plan, i)) for i in branches]


def ranges_of(plan: Plan, index: int, seq_lens: list[int]) -> list[Range]:
    """What an item reads: one range, or those of a branch's segments."""
    item = plan.items[index]
    members = plan.members["query"][item["member_offset"] :][: item["num_queries"]].tolist()
    ranges = []
    for query, start, length, room, first, count in segments_of(plan, index).tolist():
        queries = members[first : first + count]
        assert length == DYNAMIC or length == room > 0
        if length == DYNAMIC:
            assert queries == [query]
        tokens = seq_lens[query] - start if length == DYNAMIC else length
        assert start >= 0 and 0 <= tokens <= room
        ranges.append(Range(query, start, tokens, queries))
    return ranges


def ranges_of_query(made: Plan, query: int) -> list[tuple[int, int]]:
    """(start, length or DYNAMIC) of what the items of a plan without branches read for a query."""
    found = []
    for item, segment in zip(made.items, first_segments(made), strict=True):
        if query in made.members[item["member_offset"] :][: item["num_queries"]]["query"]:
            found.append((int(segment["kv_start"]), int(segment["kv_len"])))
    return sorted(found)


def check_branches(plan: Plan, made_for: Target, seq_lens: list[int]) -> None:
    """Shapes of branches and of their segments."""
    group = packed_rows(made_for)
    for item, segments in branches_of(plan):
        assert item["row_tile"] == BRANCH_ROWS
        assert item["num_queries"] * group <= BRANCH_ROWS
        assert 0 < len(segments) <= 256
        for s in segments:
            assert 0 <= s["first_member"] < s["first_member"] + s["num_queries"]
            assert s["first_member"] + s["num_queries"] <= item["num_queries"]
            if s["kv_len"] == DYNAMIC:
                assert s["num_queries"] == 1
                assert seq_lens[s["query"]] - s["kv_start"] <= s["room"]
            else:
                assert s["room"] == s["kv_len"]
        leading = 0  # KV tiles that all see
        for s in segments if item["order"] != UNMASKED_LAST else segments[::-1]:
            if s["kv_len"] == DYNAMIC or s["num_queries"] < item["num_queries"]:
                break
            leading += int(s["kv_len"])
        assert item["unmasked_tiles"] == leading // 64
    assert sum(len(segments) for _, segments in branches_of(plan)) <= made_for.max_segments
    assert plan.branch_tokens <= made_for.max_branch_tokens
    assert plan.branch_tokens % 64 == 0


def check_list(plan: Plan) -> None:
    """Every segment belongs to one item, and every piece has a place of its own in the list: the
    branches first, each at a multiple of 64 tokens, then the others without gaps. Row tiles of one
    piece have one place."""
    read: list[int] = []
    branches: set[tuple[int, int]] = set()
    pieces: dict[tuple[int, int], tuple[int, int]] = {}
    for index, item in enumerate(plan.items):
        first, count = plan.item_segments[index].tolist()
        read += range(first, first + count)
        segments = segments_of(plan, index)
        place = int(item["list_start"]), int(item["list_start"] + segments["room"].sum())
        if item["kind"] == BRANCH:
            assert place[0] % 64 == 0 and place not in branches
            branches.add(place)
        else:
            start, length = int(segments["kv_start"][0]), int(segments["kv_len"][0])
            assert count == 1 and pieces.setdefault(place, (start, length)) == (start, length)
            assert segments["num_queries"][0] == item["num_queries"]
            assert segments["first_member"][0] == 0
        assert item["tokens"] == 0  # written by the snapshot
    assert sorted(read) == list(range(plan.num_segments)) == list(range(len(plan.segments)))
    for (_, end), (start, _) in pairwise([(0, 0), *sorted(branches), (plan.branch_tokens, 0)]):
        assert end <= start
    ends = [(0, plan.branch_tokens), *sorted(pieces), (plan.list_tokens, 0)]
    assert all(end == start for (_, end), (start, _) in pairwise(ends))


def check_listed(plan: Plan, token_owner: list[Any], seq_lens: list[int]) -> None:
    """As the snapshot and the forward do on a GPU: after all segments have been copied to the list,
    each item finds there what its queries hold, token by token. ``token_owner``: of each query what
    its tokens belong to, see ``owners``."""
    held = [owner * 2**32 + np.arange(len(owner)) for owner in token_owner]  # as if slots
    listed = np.full(plan.list_tokens, -(2**62))
    for index, item in enumerate(plan.items):
        at = int(item["list_start"])
        for part in ranges_of(plan, index, seq_lens):
            place = slice(at, at + part.length)
            slots = held[part.reader][part.start : part.start + part.length]
            assert np.all((listed[place] == slots) | (listed[place] == -(2**62)))
            listed[place] = slots
            at += part.length
    for index, item in enumerate(plan.items):
        at = int(item["list_start"])
        for part in ranges_of(plan, index, seq_lens):
            for query in part.queries:
                slots = held[query][part.start : part.start + part.length]
                assert np.array_equal(listed[at : at + part.length], slots)
            at += part.length


def check_fields(item: Any, members: Any, is_tail: bool, made_for: Target) -> None:
    """An item's tile holds its rows, and its kind is what its members say, and that of a piece with
    draft tokens."""
    if item["kind"] != BRANCH:
        group = packed_rows(made_for)
        assert item["num_queries"] * group <= item["row_tile"]
        assert item["row_tile"] in made_for.row_tiles
        drafts = is_tail and made_for.draft_tokens > 1
        assert item["kind"] == (PACK if item["num_queries"] > 1 else DRAFTS if drafts else SINGLE)
    single = item["kind"] in (SINGLE, DRAFTS)
    assert (item["query"], item["partial"]) == (members[0].item() if single else (-1, 0))


def check_plan(plan: Plan, batch: Batch, made_for: Target, seq_lens: list[int]) -> None:
    """Every token of every query lies in exactly one of its items, or of its segments of one, whose
    members all share it; partial slots are consecutive, ordered by position, that of a branch last,
    and used once."""
    items, members = plan.items, plan.members
    token_owner = [owners(batch, query, length) for query, length in enumerate(seq_lens)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in seq_lens]
    splits: list[list[tuple[bool, int, int]]] = [[] for _ in seq_lens]
    read, num_shared = 0, 0
    check_branches(plan, made_for, seq_lens)
    check_list(plan)
    check_listed(plan, token_owner, seq_lens)
    for index, item in enumerate(items):
        of_item = members[item["member_offset"] :][: item["num_queries"]]
        assert len(of_item) == item["num_queries"] > 0
        assert len(set(of_item["query"].tolist())) == len(of_item)
        is_branch = bool(item["kind"] == BRANCH)
        is_tail = segments_of(plan, index)[0]["kv_len"] == DYNAMIC
        check_fields(item, of_item, bool(is_tail), made_for)
        ranges = ranges_of(plan, index, seq_lens)
        num_shared += any(len(part.queries) > 1 for part in ranges)
        for part in ranges:
            read += part.length
            end = part.start + part.length
            shared = token_owner[part.reader][part.start : end]
            assert len(shared) == part.length and part.reader in part.queries
            for query in part.queries:
                pieces[query].append((part.start, part.length))
                assert np.array_equal(token_owner[query][part.start : end], shared)
        seen = {query for part in ranges for query in part.queries}
        assert seen == set(of_item["query"].tolist())
        for query, partial in of_item:
            splits[query].append((is_branch, min(p.start for p in ranges), int(partial)))
    assert read == plan.kv_tokens_read(sum(seq_lens))
    check_pieces(pieces, seq_lens)
    check_splits(plan, splits)
    assert plan.num_items == len(items) and plan.num_members == items["num_queries"].sum()
    assert plan.num_shared_items == num_shared


def check_splits(plan: Plan, splits: list[list[tuple[bool, int, int]]]) -> None:
    """Partial slots of all queries. ``splits``: of each query whether the item is a branch, where
    it starts and its slot, for every item that the query is a member of."""
    queries = plan.queries
    assert Counter(len(s) for s in splits) == Counter(queries["num_splits"].tolist())
    used = []
    for query, of_query in enumerate(splits):
        offset, count = queries[query]
        partials = [partial for _, _, partial in sorted(of_query)]
        assert len(partials) == count
        assert sum(is_branch for is_branch, _, _ in of_query) <= 1
        assert partials == ([DIRECT] if count == 1 else list(range(offset, offset + count)))
        used += partials if count > 1 else []
    assert sorted(used) == list(range(plan.num_partials))
