# SPDX-License-Identifier: Apache-2.0
"""Branches on the CPU: as the planner makes them and by hand, against attention by definition."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.cases import by_hand, case, execute, grown
from kit.cpu import check_any as check
from kit.pieces import DYNAMIC, Branch, Piece, branched, forest, paths_of, prefix
from kit.trees import Batch, batch_of, batches, branches_of, check_plan, ranges_of, target

from sglang_pat import _C
from sglang_pat.explain.tree import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Plan, plan
from sglang_pat.target import Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GROUPS = [1, 2, 4, 5, 7, 8, 16]


def content(made: Plan) -> bytes:
    return ctypes.string_at(made.data_ptr, made.nbytes)


def cpu(heads: tuple[int, int], head_dim: int = 64, **overrides: Any) -> Target:
    values: dict[str, Any] = {"threads": 4, "max_queries": 64, "branching": "always"}
    values |= {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    return Target.cpu(**(values | overrides))


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_random_forests(isa: str, dtype: torch.dtype, group: int) -> None:
    """Of planned branches, at the lengths of the plan and with tails as long as it allows."""
    for seed in range(6):
        rng = np.random.default_rng(100 * group + seed)
        pieces = forest(rng, int(rng.integers(2, 30)))
        inputs = case(pieces, (2 * group, 2), 64, seed=seed, logit_cap=(0.0, 5.0)[seed % 2])
        inputs = inputs.to(dtype)
        made_for = cpu(
            inputs.heads,
            branch_rows=((64,), (32,), (16, 64))[seed % 3],
            branch_limits=((2**31 - 1,), (64,), (20, 512))[seed // 2],
        )
        paths, lens = paths_of(pieces, len(inputs.q)), inputs.seq_lens.tolist()
        made = plan(paths, lens, made_for)
        check_plan(made, Batch(paths, lens), made_for, lens)
        assert made.branch_tokens > 0
        check(inputs, made, isa=isa)
        longest = made.max_seq_lens.tolist()
        check(grown(inputs, longest, seed), made, isa=isa)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(GROUPS), st.integers(0, 3))
def test_any_batch(batch: Batch, group: int, limits: int) -> None:
    """Radix paths of any form: queries that end in nodes, clipped paths, no nodes at all."""
    made_for = cpu((group, 1), branch_limits=((2**31 - 1,), (64,), (512,), (1,))[limits])
    made = plan(batch.paths, batch.seq_lens, made_for)
    check_plan(made, batch, made_for, batch.seq_lens)
    check_plan(made, batch, made_for, made.max_seq_lens.tolist())


def test_the_order_of_the_batch_does_not_count() -> None:
    """Which of a node's queries make a branch: of nine, one of which has another tail."""
    made_for = target(branching="always", branch_rows=(32,), branch_limits=(2**31 - 1,))
    results = []
    for place in range(9):
        batch = Batch([[(1, 0, 700)]] * 9, [704 if i == place else 700 for i in range(9)])
        made = plan(batch.paths, batch.seq_lens, made_for)
        assert len(branches_of(made)) == 2
        items = [ranges_of(made, index, batch.seq_lens) for index in range(made.num_items)]
        results.append(sorted([(r.length, len(r.queries)) for r in item] for item in items))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("most", [1, 3, 4])
def test_hand_made_branches(isa: str, group: int, most: int) -> None:
    """Every second one has its tails first."""
    for seed in range(3):
        pieces = forest(np.random.default_rng(seed), 17)
        inputs = by_hand(pieces, (2 * group, 2), most=most, seed=seed)
        firsts = [part.tails_first for part in inputs.pieces]  # type: ignore[union-attr]
        assert firsts[:4] == [False, True, False, True]
        check(inputs, inputs.plan(), isa=isa)


def test_branches_beside_other_items() -> None:
    """A query of both a branch and other items: the branch's partial is its last."""
    pieces = prefix(20, 200)
    inputs = case(pieces, (4, 1))
    mixed: list[Piece | Branch] = [pieces[0], *branched(pieces[1:], 8)]
    check(replace(inputs, pieces=mixed), replace(inputs, pieces=mixed).plan())


def test_order_and_masks_change_little() -> None:
    """Tails first or last, in branches or not: the same attention."""
    pieces = prefix(8, 130)
    inputs = case(pieces, (8, 2))
    plain, _ = execute(inputs)
    for tails_first in (False, True):
        part = Branch(tuple(pieces), tails_first)
        assert part.seen_by_all == 2
        one = replace(inputs, pieces=[part])
        torch.testing.assert_close(execute(one)[0], plain, rtol=1e-5, atol=1e-5)


def test_empty_tails() -> None:
    """Beside a prefix they are neutral; a branch without tokens gives zeros and -inf."""
    inputs = by_hand(prefix(5, 40), (4, 1), tails=(0,))
    check(inputs, inputs.plan())
    tails = [Piece((i,), 0, DYNAMIC) for i in range(5)]
    alone = by_hand(tails, (4, 1), tails=(0,))
    out, lse = execute(alone)
    assert not out.any() and torch.all(lse.isneginf())


def test_threads_and_runs_give_equal_bits() -> None:
    inputs = by_hand(forest(np.random.default_rng(3), 24), (8, 2), head_dim=128)
    expected = execute(inputs, threads=1)
    for threads in (1, 2, 3, 7) * 3:
        for got, want in zip(execute(inputs, threads=threads), expected, strict=True):
            assert torch.equal(got, want)


def test_a_swapped_slot_is_seen() -> None:
    inputs = by_hand(prefix(4, 300), (8, 2), tails=(30,))
    for token in (7, 310):  # shared, and of query 3 alone
        table = inputs.table.clone()
        table[inputs.rows, token] = table[inputs.rows, token + 1]
        out, _ = execute(replace(inputs, table=table))
        truth, _ = inputs.truth()
        assert (out.double() - truth).norm() > 1e-4 * truth.norm()


TREE = batch_of(Tree((1, 256), (256, 32)))


def test_ops_run_planned_branches() -> None:
    inputs = case(prefix(16, 100), (8, 2), tails=(5,))
    paths, lens = paths_of(prefix(16, 100), 16), inputs.seq_lens.tolist()
    made = plan(paths, lens, cpu(inputs.heads, branch_rows=(64,)))
    assert made.num_items == 1 and made.num_segments == 17 and made.num_partials == 0
    arguments = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    out = decode(*arguments, made, scale=inputs.scale)
    torch.testing.assert_close(out.double(), inputs.truth()[0], rtol=1e-4, atol=1e-5)


def needs(made: Plan) -> dict[str, int]:
    """Room that the branches of a plan take, by the field of a target that bounds it."""
    segments = sum(len(segments) for _, segments in branches_of(made))
    return {"max_segments": segments, "max_branch_tokens": made.branch_tokens}


@pytest.mark.parametrize("branching", ["always", "cost"])
def test_branches_beyond_the_buffers_are_not_made(branching: str) -> None:
    """Without rules for smaller ones a plan is then as if there were none, and not degraded."""
    common: dict[str, Any] = {"branching": branching}
    made = plan(TREE.paths, TREE.seq_lens, target(**common))
    assert branches_of(made)
    never = plan(TREE.paths, TREE.seq_lens, target(branching="never"))
    for name, needed in needs(made).items():
        fits = plan(TREE.paths, TREE.seq_lens, target(**common, **{name: needed}))
        assert content(fits) == content(made)
        less = plan(TREE.paths, TREE.seq_lens, target(**common, **{name: needed - 1}))
        assert less.degraded == "" and needs(less)[name] < needed
        assert branching == "cost" or content(less) == content(never)


def test_branches_of_too_many_segments_are_not_made() -> None:
    """A chain of nodes each of which one query leaves, and 64 queries: 63 nodes and 64 tails."""

    def chain(depth: int, copies: int) -> Batch:
        nodes = [(i, 3 * i, 3 * i + 3) for i in range(depth)]
        paths = [nodes[: 1 + i] for i in range(depth) for _ in range(copies)]
        return Batch(paths, [path[-1][2] + 5 for path in paths])

    made_for = target(num_q_heads=8, branching="always", branch_rows=(64,))
    small = chain(32, 2)
    made = plan(small.paths, small.seq_lens, made_for)
    assert [len(segments) for _, segments in branches_of(made)] == [32 + 64]
    check_plan(made, small, made_for, small.seq_lens)
    # Nodes of queries beyond one branch are above it: 200 of these and a branch's own are too many.
    large = chain(300, 1)
    made = plan(large.paths, large.seq_lens, made_for)
    assert not branches_of(made) and made.branch_tokens == 0
    check_plan(made, large, made_for, large.seq_lens)


def modelled(**options: Any) -> Target:
    """For three query heads a KV head: such plans are the cost model's, none is simulated."""
    return target(num_q_heads=24, **options)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_never_gives_none(batch: Batch) -> None:
    made = plan(batch.paths, batch.seq_lens, modelled(branching="never"))
    assert not branches_of(made) and made.branch_tokens == 0
    other = plan(batch.paths, batch.seq_lens, modelled(branching="cost"))
    nothing_shared = other.num_shared_items == 0 and made.num_shared_items > 0
    assert branches_of(other) or nothing_shared or content(other) == content(made)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=64))
def test_batches_that_share_nothing_have_none(seq_lens: list[int]) -> None:
    made = {
        branching: content(plan([[]] * len(seq_lens), seq_lens, modelled(branching=branching)))
        for branching in ("cost", "always", "never")
    }
    assert made["cost"] == made["never"] == made["always"]
    assert not branches_of(plan([[]] * len(seq_lens), seq_lens, target()))
