# SPDX-License-Identifier: Apache-2.0
"""A captured CUDA graph serves every plan that is loaded later: as eager, bit by bit, while tokens
are accepted, masks are set, and the list of slots is replaced: longer, in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import E4M3, Case, random_trees
from kit.device import (
    K_SCALE,
    V_SCALE,
    Captured,
    Dtypes,
    case_of_tree,
    check,
    execute,
    of_both_kv,
    same,
    target_of,
)

from benchmarks.common.forests import Tree
from sglang_pat.planner import Plan, Planner
from sglang_pat.srt.step import StepClock
from sglang_pat.target import CUTS, WITHOUT_BRANCHES
from sglang_pat.workspace import LAUNCHES, Workspace

HEADS = (8, 2)
ROWS = 64  # of the captured batch
of_launches = pytest.mark.parametrize("launch", LAUNCHES)


def random_step(rng: np.random.Generator) -> tuple[Tree, list[int]]:
    """A batch by levels of up to ROWS queries, and the lengths of its sequences."""
    levels = np.cumprod(rng.integers(1, 5, int(rng.integers(1, 4)))).tolist()
    tokens = rng.choice([3, 40, 200, 700], len(levels)).tolist()
    tree = Tree(tuple(levels), tuple(tokens))
    start = sum(tokens[:-1])
    return tree, (start + rng.integers(1, 300, tree.num_queries)).tolist()


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


@of_both_kv
@of_launches
@pytest.mark.parametrize(("cuts", "count"), [(CUTS, 100), (("branches",), 20)])
def test_one_graph_serves_many_plans(
    launch: str, cuts: tuple[str, ...], count: int, dtypes: Dtypes
) -> None:
    def batch(tree: Tree, seq_lens: list[int] | None = None, seed: int = 0) -> Case:
        made = case_of_tree(tree, HEADS, seq_lens=seq_lens, seed=seed)
        return made.to_e4m3(K_SCALE, V_SCALE) if dtypes[1] == E4M3 else made

    table = torch.zeros((ROWS + 3, 4096), dtype=torch.int32, device="cuda")
    static = replace(batch(Tree((ROWS,), (3000,))), table=table)
    target = target_of(static, cuts=cuts)
    workspace = Workspace(target, 4096, launch=launch, list_tokens=64)
    planner = Planner(target)
    workspace.load(planner.plan([], []))
    captured = Captured(static, workspace)
    rng = np.random.default_rng(5)
    branched = 0
    for seed in range(count):
        tree, seq_lens = random_step(rng)
        step = batch(tree, seq_lens, seed)
        fill(static, step)
        plan = planner.plan(tree.paths, seq_lens)
        branched += plan.branch_tokens > 0
        assert workspace.load(plan) and not workspace.load(plan)
        out, lse = captured.replay()
        assert same((out, lse), captured.run()), seed
        assert not out[len(step.q) :].any()
        if seed % 10 == 0:
            other = Workspace(target, step.table.shape[1], launch=launch)
            assert torch.equal(check(step, plan, workspace=other), out[: len(step.q)])
    assert cuts == CUTS or branched >= count / 2
    assert workspace.list_tokens >= 4864  # from 64, under the captured graph


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
    static = replace(
        inputs, seq_lens=torch.tensor(lens).cuda(), k=inputs.k.clone(), v=inputs.v.clone()
    )
    captured = Captured(static, workspace)
    rows = inputs.rows.tolist()
    for _ in range(steps):
        assert plan.total_tokens(np.ascontiguousarray(lens).ctypes.data, len(lens)) >= 0
        static.seq_lens.copy_(torch.tensor(lens))
        static.q.normal_()
        for cache, full in ((static.k, inputs.k), (static.v, inputs.v)):
            cache.copy_(full)
            for row, length in zip(rows, lens.tolist(), strict=True):
                cache[inputs.table[row, length : longest[0]].long()] = float("nan")
        out, _ = captured.replay()
        assert torch.equal(check(static, plan, workspace=workspace), out)
        lens = lens + rng.integers(1, draft_tokens + 1, len(lens))


def test_graphs_read_the_masks_that_were_set_last() -> None:
    tree = Tree((1, 12), (300, 48))
    inputs = case_of_tree(tree, HEADS, draft_tokens=8)
    target = target_of(inputs, cuts=WITHOUT_BRANCHES)
    workspace = Workspace(target, inputs.table.shape[1], draft_masks=True)
    plan = Planner(target).plan(tree.paths, tree.seq_lens)
    workspace.load(plan)
    captured = Captured(inputs, workspace)
    for seed in range(3):
        masks = random_trees(inputs, seed).draft_masks
        assert masks is not None
        workspace.set_draft_masks(masks.cuda())
        want = execute(replace(inputs, draft_masks=masks.cuda()), plan)
        assert same(captured.replay(), want)


def test_loads_do_not_overtake_copies_in_flight() -> None:
    """Plans that are loaded while the device is busy arrive whole and in order."""
    tree = Tree((1, 16), (200, 30))
    inputs = case_of_tree(tree, HEADS)
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    planner = Planner(workspace.target)
    plans = [planner.plan(paths, tree.seq_lens) for paths in (tree.paths, [[]] * 16)]
    want = [execute(inputs, plan, workspace=workspace) for plan in plans]
    torch.cuda._sleep(200_000_000)
    found = [execute(inputs, plans[i % 2], workspace=workspace) for i in range(12)]
    for i, results in enumerate(found):
        assert same(results, want[i % 2]), i


TREE = Tree((1, 64), (2000, 30))
SHORT = 16384  # tokens: a list for the plans that share


class ListBed(Captured):
    """A graph that was captured with a list of ``SHORT`` tokens, and plans for its batch.
    ``memory``: whether the GPU has any left for another list."""

    def __init__(self, launch: str) -> None:
        inputs = case_of_tree(TREE, HEADS)
        target, width = target_of(inputs), inputs.table.shape[1]
        self.memory = True
        workspace = Workspace(target, width, launch=launch, list_tokens=SHORT, region=self.region)
        self.planner = Planner(target)
        self.private = self.planner.plan([[]] * TREE.num_queries, TREE.seq_lens)
        assert self.private.list_tokens > 2 * SHORT
        other = Workspace(target, width, launch=launch, list_tokens=1 << 20)
        self.want = {
            plan.num_shared_items > 0: execute(inputs, plan, workspace=other)
            for plan in (self.private, self.shared())
        }
        workspace.load(self.shared())
        super().__init__(inputs, workspace)

    @contextmanager
    def region(self) -> Iterator[None]:
        if not self.memory:
            raise torch.cuda.OutOfMemoryError("no memory")
        yield

    def shared(self) -> Plan:
        """A plan that shares, anew: the one that is loaded is not loaded again."""
        return self.planner.plan(TREE.paths, TREE.seq_lens)

    def right(self) -> torch.Tensor:
        """Whether the graph's results are those of the loaded plan; does not wait for them."""
        assert self.workspace.plan is not None
        out, lse = self.replay()
        want, want_lse = self.want[self.workspace.plan.num_shared_items > 0]
        return (out == want).all() & (lse == want_lse).all()


@of_launches
def test_a_list_in_the_hosts_memory(launch: str) -> None:
    bed = ListBed(launch)
    bed.memory = False
    before = bed.workspace.plan
    with pytest.raises(torch.cuda.OutOfMemoryError):
        bed.workspace.load(bed.private)
    assert bed.workspace.plan is before and bed.right()
    for _ in range(2):
        bed.workspace.load(bed.private, list_on_host=True)
        assert bed.right() and bed.right()
        bed.workspace.load(bed.shared())
        assert bed.right()
    assert bed.workspace.list_tokens == SHORT


@of_launches
def test_a_list_is_replaced_while_kernels_read_it(launch: str) -> None:
    """What it leaves free goes to tensors of another stream, which write to it at once."""
    right = []
    steps = torch.cuda.Stream()
    for _ in range(4):
        bed = ListBed(launch)
        torch.cuda.synchronize()
        with torch.cuda.stream(steps):
            torch.cuda._sleep(20_000_000)
            right.append(bed.right())
            bed.workspace.load(bed.private)
            right.append(bed.right())
        assert bed.workspace.list_tokens >= bed.private.list_tokens
        poison = [torch.full((SHORT,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
        with torch.cuda.stream(steps):
            for _ in range(3):
                bed.workspace.load(bed.shared())
                right.append(bed.right())
        torch.cuda.synchronize()
        del poison
    assert all(right)


LONG = 200_000_000  # clock cycles: some 0.1 s


def test_only_a_busy_gpu_hides_the_host() -> None:
    clock = StepClock(on_gpu=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    clock.start()
    assert clock.is_hidden()
    torch.cuda.synchronize()
    assert not clock.is_hidden()
    clock.start()  # of a GPU without work
    torch.cuda._sleep(LONG)  # later work, such as the plan's own copy, hides nothing
    first = next(i for i in range(1_000_000) if not clock.is_hidden())
    assert first < 1_000  # the event itself takes some microseconds
    torch.cuda.synchronize()
