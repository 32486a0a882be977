# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs, launch modes, and results that repeat bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import E4M3, Case
from kit.device import (
    K_SCALE,
    POISON,
    V_SCALE,
    case_of_tree,
    check,
    check_launches,
    execute,
    of_both_kv,
    target_of,
)

from sglang_pat.explain.tree import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Plan, Planner
from sglang_pat.target import CUTS, WITHOUT_BRANCHES, Target
from sglang_pat.workspace import LAUNCHES, Workspace

HEADS = (8, 2)
ROWS = 64  # of the captured batch


def random_step(rng: np.random.Generator) -> tuple[Tree, list[int]]:
    """A batch by levels of up to ROWS queries, and the lengths of its sequences."""
    levels = np.cumprod(rng.integers(1, 5, int(rng.integers(1, 4)))).tolist()
    tokens = rng.choice([3, 40, 200, 700], len(levels)).tolist()
    tree = Tree(tuple(levels), tuple(tokens))
    shared = sum(tokens[:-1])
    return tree, (shared + rng.integers(1, 300, tree.num_queries)).tolist()


def fill(static: Case, step: Case) -> None:
    """Copy a step's batch into the tensors that a graph was captured with; the rows beyond name
    row 0 with one token, as SGLang pads."""
    count = len(step.q)
    static.q.normal_()
    static.q[:count] = step.q
    static.k[: len(step.k)] = step.k
    static.v[: len(step.v)] = step.v
    static.table[: len(step.table), : step.table.shape[1]] = step.table
    static.rows.zero_()
    static.rows[:count] = step.rows
    static.seq_lens.fill_(1)
    static.seq_lens[:count] = step.seq_lens


def stored(inputs: Case, kind: tuple[torch.dtype, torch.dtype]) -> Case:
    """The case of a tree with its K and V in e4m3 if ``kind`` says so."""
    return inputs.to_e4m3(K_SCALE, V_SCALE) if kind[1] == E4M3 else inputs


def output_of(step: Case, plan: Plan, target: Target, launch: str) -> torch.Tensor:
    """The output of a step that runs without a graph, compared with fp64 attention."""
    return check(step, plan, workspace=Workspace(target, step.table.shape[1], launch=launch))


@of_both_kv
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("cuts", "count"), [(CUTS, 100), (("branches",), 20)])
def test_one_graph_serves_many_plans(
    launch: str, cuts: tuple[str, ...], count: int, kind: tuple[torch.dtype, torch.dtype]
) -> None:
    table = torch.zeros((ROWS + 1, 4096), dtype=torch.int32, device="cuda")
    static = replace(stored(case_of_tree(Tree((ROWS,), (3000,)), HEADS), kind), table=table)
    target = target_of(static, cuts=cuts)
    workspace = Workspace(target, 4096, launch=launch, list_tokens=64)
    planner = Planner(target)
    out = torch.empty_like(static.q)
    lse = torch.empty(static.q.shape[:2], device="cuda")

    def run(into: torch.Tensor, into_lse: torch.Tensor) -> None:
        workspace.snapshot(static.table, static.rows, static.seq_lens)
        decode(
            static.q,
            static.k,
            static.v,
            static.table,
            static.rows,
            static.seq_lens,
            workspace.plan,
            scale=static.scale,
            k_scale=static.k_scale,
            v_scale=static.v_scale,
            out=into,
            lse=into_lse,
            workspace=workspace,
        )

    workspace.load(planner.plan([], []))
    run(out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out, lse)
    rng = np.random.default_rng(5)
    branched = 0
    for seed in range(count):
        tree, seq_lens = random_step(rng)
        step = stored(case_of_tree(tree, HEADS, seq_lens=seq_lens, seed=seed), kind)
        fill(static, step)
        plan = planner.plan(tree.paths, seq_lens)
        branched += plan.branch_tokens > 0
        assert workspace.load(plan) and not workspace.load(plan)
        out.fill_(POISON)
        lse.fill_(POISON)
        graph.replay()
        eager, eager_lse = torch.full_like(out, -POISON), torch.full_like(lse, -POISON)
        run(eager, eager_lse)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse), seed
        assert not out[len(step.q) :].any()
        if seed % 10 == 0:
            assert torch.equal(output_of(step, plan, target, launch), out[: len(step.q)])
    assert cuts == CUTS or branched >= count / 2
    assert workspace.list_tokens >= 4864  # from 64, under the captured graph


@of_both_kv
@pytest.mark.parametrize("cuts", [WITHOUT_BRANCHES, ("short_branches",)])
@pytest.mark.parametrize("heads", [(8, 2), (2, 2), (32, 2)])
def test_launch_modes_agree_and_repeat(
    heads: tuple[int, int], cuts: tuple[str, ...], kind: tuple[torch.dtype, torch.dtype]
) -> None:
    """Same bits from one kernel, from streams and one by one, and from run to run."""
    tree = Tree((1, 3, 60), (300, 150, 40))
    inputs = stored(case_of_tree(tree, heads), kind)
    target = target_of(inputs, cuts=cuts)
    plan = Planner(target).plan(tree.paths, tree.seq_lens)
    branched = cuts != WITHOUT_BRANCHES
    assert (plan.branch_tokens > 0) == branched
    assert branched or len(set(plan.items["row_tile"].tolist())) > 1
    check_launches(inputs, plan, target)


def test_loads_do_not_overtake_copies_in_flight() -> None:
    """Plans that are loaded while the device is busy arrive whole and in order."""
    tree = Tree((1, 16), (200, 30))
    inputs = case_of_tree(tree, HEADS)
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    planner = Planner(workspace.target)
    shared = planner.plan(tree.paths, tree.seq_lens)
    private = planner.plan([[]] * 16, tree.seq_lens)
    want = [execute(inputs, plan, workspace=workspace) for plan in (shared, private)]
    torch.cuda._sleep(200_000_000)
    results = [execute(inputs, (shared, private)[i % 2], workspace=workspace) for i in range(12)]
    for i, (out, lse) in enumerate(results):
        assert torch.equal(out, want[i % 2][0]) and torch.equal(lse, want[i % 2][1]), i
