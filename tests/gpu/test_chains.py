# SPDX-License-Identifier: Apache-2.0
"""Queries of several draft tokens on the GPU: the causal mask of a chain, and those of trees, in
every kind of unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import Case, by_hand, random_trees
from kit.device import (
    POISON,
    DevicePlan,
    case_of_tree,
    check,
    execute,
    on_device,
    target_of,
    wide,
)
from kit.drafts import drafted, drafted_forest, skip_unless_rows_fit
from kit.pieces import DYNAMIC, Piece, forest, shared

from sglang_pat.explain.tree import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Planner
from sglang_pat.target import CUTS, WITHOUT_BRANCHES
from sglang_pat.workspace import Workspace

BF16, FP16 = torch.bfloat16, torch.float16


def alone(queries: int) -> list[Piece]:
    """Queries that share nothing."""
    return [Piece((query,), 0, DYNAMIC) for query in range(queries)]


def rows_of(inputs: Case) -> int:
    return inputs.heads[0] // inputs.heads[1] * inputs.draft_tokens


chains_and_trees = pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])


def with_masks(inputs: Case, trees: bool, seed: int = 0) -> Case:
    return random_trees(inputs, seed) if trees else inputs


@chains_and_trees
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, BF16), (128, FP16), (256, BF16)])
@pytest.mark.parametrize("draft_tokens", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (10, 2), (16, 1), (7, 1)])
def test_random_forests(
    heads: tuple[int, int], draft_tokens: int, head_dim: int, dtype: torch.dtype, trees: bool
) -> None:
    skip_unless_rows_fit(heads[0] // heads[1], draft_tokens, head_dim)
    for seed in range(3):
        pieces = drafted_forest(seed, heads, draft_tokens)
        inputs = drafted(pieces, heads, draft_tokens, head_dim, seed=seed)
        check(on_device(with_masks(inputs, trees, seed), dtype))


@chains_and_trees
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("draft_tokens", [2, 4, 5, 8, 16, 32, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_units_of_one_query(group: int, draft_tokens: int, head_dim: int, trees: bool) -> None:
    """Narrow, short, light, heavy and wide ones, each with tails around its tiles."""
    skip_unless_rows_fit(group, draft_tokens, head_dim)
    if trees and draft_tokens > 64:
        pytest.skip("a mask has 64 bits")
    for more in (0, 1, 17, 32, 62, 63, 64, 65, 127, 300):
        tails = (draft_tokens + more, max(draft_tokens, more + 1))
        inputs = drafted(alone(3), (2 * group, 2), draft_tokens, head_dim, tails=tails, seed=more)
        inputs = on_device(with_masks(inputs, trees, more), BF16)
        check(inputs)
        if rows_of(inputs) > 64 and head_dim < 256:
            check(inputs, wide(inputs))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("draft_tokens", "most"), [(2, 8), (4, 4), (4, 1), (5, 3), (16, 1)])
def test_branches(draft_tokens: int, most: int, head_dim: int) -> None:
    for seed in range(5):
        pieces = forest(np.random.default_rng(seed), 8)
        tails = (draft_tokens, draft_tokens + 1, draft_tokens + 70)
        inputs = by_hand(
            pieces,
            (8, 2),
            head_dim=head_dim,
            most=most,
            tails=tails,
            draft_tokens=draft_tokens,
            seed=seed,
        )
        check(on_device(inputs, BF16))


@pytest.mark.parametrize(
    ("cuts", "trees"),
    [(WITHOUT_BRANCHES, False), (("branches",), False), (CUTS, False), (WITHOUT_BRANCHES, True)],
)
@pytest.mark.parametrize("partial", [torch.float32, BF16])
@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (16, 1)])
def test_plans_of_the_planner(
    heads: tuple[int, int], partial: torch.dtype, cuts: tuple[str, ...], trees: bool
) -> None:
    rng = np.random.default_rng(1)
    kinds = set()
    for draft_tokens in (2, 4, 8):
        for levels, tokens in (((1, 40), (700, 60)), ((2, 6, 24), (200, 90, 30)), ((3,), (5000,))):
            tree = Tree(levels, tokens)
            start = sum(tokens[:-1])
            lens = (start + draft_tokens + rng.integers(0, 5000, tree.num_queries)).tolist()
            inputs = case_of_tree(tree, heads, seq_lens=lens, draft_tokens=draft_tokens)
            if trees:
                masks = random_trees(inputs).draft_masks
                assert masks is not None
                inputs = replace(inputs, draft_masks=masks.cuda())
            target = target_of(inputs, cuts=cuts, partial_bytes=partial.itemsize)
            workspace = Workspace(
                target, inputs.table.shape[1], partial_dtype=partial, draft_masks=trees
            )
            plan = Planner(target).plan(tree.paths, lens)
            kinds |= set(plan.items["row_tile"].tolist())
            check(inputs, plan, workspace=workspace)
    assert len(kinds) > 1


@pytest.mark.parametrize("heads", [(8, 2), (16, 1), (2, 2)])
def test_no_row_sees_a_later_draft_token(heads: tuple[int, int]) -> None:
    """Other K and V of draft token t change no bit of the rows before it, and all rows from it."""
    draft_tokens = 4
    inputs = on_device(drafted(shared(8, 100), heads, draft_tokens, 128), BF16)
    before, lse = execute(inputs)
    for draft_token in range(draft_tokens):
        at = inputs.seq_lens - draft_tokens + draft_token
        slots = inputs.table[inputs.rows, at].long()
        k, v = inputs.k.clone(), inputs.v.clone()
        k[slots], v[slots] = -k[slots], 3 * v[slots] + 1
        after, changed = execute(replace(inputs, k=k, v=v))
        same = (before == after).flatten(1).all(1).view(-1, draft_tokens)
        assert same[:, :draft_token].all() and not same[:, draft_token:].any()
        same = (lse == changed).all(1).view(-1, draft_tokens)
        assert same[:, :draft_token].all() and not same[:, draft_token:].any()


@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (16, 1)])
def test_a_graph_while_tokens_are_accepted(heads: tuple[int, int]) -> None:
    """One plan and one graph over steps in which each query grows by 1 to T tokens; the slots of
    what was rejected hold NaN."""
    draft_tokens, steps = 4, 20
    rng = np.random.default_rng(0)
    tree = Tree((1, 24), (300, 80))
    longest = [380 + draft_tokens * (steps + 1)] * tree.num_queries
    inputs = case_of_tree(tree, heads, seq_lens=longest, draft_tokens=draft_tokens)
    lens = 300 + rng.integers(draft_tokens, 40, tree.num_queries)
    target = target_of(inputs)
    workspace = Workspace(target, inputs.table.shape[1])
    plan = Planner(target).plan(tree.paths, lens.tolist())
    workspace.load(plan)
    static = replace(inputs, seq_lens=torch.tensor(lens, device="cuda"))
    k, v = inputs.k.clone(), inputs.v.clone()
    out = torch.full_like(inputs.q, POISON)

    def run() -> None:
        workspace.snapshot(static.table, static.rows, static.seq_lens)
        arguments = (static.q, k, v, static.table, static.rows, static.seq_lens, plan)
        decode(*arguments, scale=static.scale, out=out, workspace=workspace)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(steps):
        assert plan.total_tokens(np.ascontiguousarray(lens).ctypes.data, len(lens)) >= 0
        static.seq_lens.copy_(torch.tensor(lens))
        for cache, full in ((k, inputs.k), (v, inputs.v)):
            cache.copy_(full)
            for query, length in enumerate(lens.tolist()):
                cache[inputs.table[query + 1, length:].long()] = float("nan")
        step = replace(static, q=torch.randn_like(static.q), k=k, v=v)
        static.q.copy_(step.q)
        graph.replay()
        assert torch.equal(check(step, plan, workspace=workspace), out)
        lens = lens + rng.integers(1, draft_tokens + 1, len(lens))


@chains_and_trees
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("draft_tokens", [2, 4, 8])
def test_e4m3(draft_tokens: int, head_dim: int, trees: bool) -> None:
    for heads in ((8, 2), (4, 4), (8, 1)):
        inputs = with_masks(drafted(shared(9, 150), heads, draft_tokens, head_dim), trees)
        check(on_device(inputs.to_e4m3(0.5, 2.0), BF16))


def test_rows_that_pad_a_batch() -> None:
    """They get zeros, all of their draft tokens."""
    inputs = on_device(drafted(shared(5, 60), (8, 2), 3, 128), BF16)
    workspace = Workspace(target_of(inputs, max_queries=8), inputs.table.shape[1])
    plan = DevicePlan(inputs.plan())
    workspace.load(plan)
    rows = torch.cat([inputs.rows, inputs.rows[:3]])
    lens = torch.cat([inputs.seq_lens, torch.full_like(inputs.seq_lens[:3], 3)])
    q = torch.cat([inputs.q, inputs.q[:9]])
    workspace.snapshot(inputs.table, rows, lens)
    out = torch.full_like(q, POISON)
    decode(
        q,
        inputs.k,
        inputs.v,
        inputs.table,
        rows,
        lens,
        plan,
        scale=inputs.scale,
        out=out,
        workspace=workspace,
    )
    assert torch.equal(out[:15], execute(inputs)[0]) and not out[15:].any()


def test_runs_repeat_bit_by_bit() -> None:
    inputs = on_device(drafted(shared(30, 500), (32, 8), 4, 128), BF16)
    results = [execute(inputs) for _ in range(5)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_what_is_refused() -> None:
    inputs = on_device(drafted(shared(4, 60), (8, 2), 3, 128), BF16)
    other = Workspace(target_of(inputs, draft_tokens=2), inputs.table.shape[1])
    with pytest.raises(ValueError, match="the plan is for 3 draft tokens a query, the workspace"):
        other.load(DevicePlan(inputs.plan()))
    strided = torch.empty(12, 9, 128, dtype=BF16, device="cuda")[:, 1:]
    arguments = (inputs.table, inputs.rows, inputs.seq_lens, DevicePlan(inputs.plan()))
    with pytest.raises(ValueError, match="with draft tokens it must be contiguous"):
        decode(inputs.q, inputs.k, inputs.v, *arguments, scale=1.0, out=strided)
