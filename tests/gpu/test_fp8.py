# SPDX-License-Identifier: Apache-2.0
"""K and V in float8_e4m3fn: the CUDA executor against attention over what they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import Case, by_hand, case
from kit.device import (
    POISON,
    DevicePlan,
    case_of_tree,
    check_launches,
    execute,
    on_device,
    target_of,
)
from kit.e4m3 import K_SCALE, V_SCALE, check_e4m3, stored, wide
from kit.pieces import DYNAMIC, Piece, forest, prefix

from sglang_pat.explain.tree import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Planner
from sglang_pat.target import CUTS, WITHOUT_BRANCHES
from sglang_pat.workspace import Workspace

BF16, FP16 = torch.bfloat16, torch.float16
GROUPS = [1, 2, 4, 5, 7, 8, 16]
TAILS = (0, 1, 15, 31, 32, 33, 64, 65)


def shared(num_queries: int, length: int, splits: int = 1) -> list[Piece]:
    """Queries with one common prefix in equal pieces, and a tail each."""
    size, everyone = length // splits, tuple(range(num_queries))
    return [Piece(everyone, i * size, size) for i in range(splits)] + [
        Piece((query,), splits * size, DYNAMIC) for query in everyone
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_head_dims_and_ratios(dtype: torch.dtype, head_dim: int, group: int) -> None:
    for num_queries in (2, 9):
        inputs = case(shared(num_queries, 150), (2 * group, 2), head_dim, seed=group)
        check_e4m3(stored(inputs, dtype))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 8, 9, 16, 17, 32, 33, 63, 64, 65, 100, 128, 129])
def test_numbers_of_packed_rows(head_dim: int, num_queries: int) -> None:
    check_e4m3(stored(case(shared(num_queries, 130), (1, 1), head_dim, seed=num_queries), BF16))
    check_e4m3(stored(case(shared(num_queries, 30), (4, 2), head_dim, seed=num_queries), BF16))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 8, 20, 50, 100])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 128, 129, 448, 1000])
def test_lengths(num_queries: int, length: int, head_dim: int) -> None:
    """Around the tiles; short, narrow, light, heavy units and, beyond 64 rows, wide ones."""
    everyone = tuple(range(num_queries))
    inputs = stored(case([Piece(everyone, 0, length)], (1, 1), head_dim, seed=length), BF16)
    check_e4m3(inputs)
    if num_queries > 64:
        check_e4m3(inputs, wide(inputs))


@pytest.mark.parametrize("seed", range(8))
def test_random_forests(seed: int) -> None:
    heads = [(8, 2), (4, 4), (5, 1), (14, 2), (16, 1), (6, 3), (32, 8), (64, 8)][seed]
    pieces = forest(np.random.default_rng(seed), 1 + 9 * seed)
    for dtype in (BF16, FP16):
        check_e4m3(stored(case(pieces, heads, (64, 128, 256)[seed % 3], seed=seed), dtype))


@pytest.mark.parametrize("partial", [torch.float32, BF16])
@pytest.mark.parametrize("splits", [2, 5, 33])
def test_partials(splits: int, partial: torch.dtype) -> None:
    inputs = case(shared(4, 20 * splits, splits), (8, 2), 128, seed=splits)
    check_e4m3(stored(inputs, BF16), partial_dtype=partial)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_branches(group: int, head_dim: int, dtype: torch.dtype) -> None:
    for most in (64 // group, 3):
        pieces = forest(np.random.default_rng(group), 40)
        inputs = by_hand(pieces, (2 * group, 2), head_dim=head_dim, most=most, tails=TAILS)
        check_e4m3(stored(inputs, dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [[1 + 37 * i for i in range(40)], [700, 1, 64, 5000]])
def test_units_of_all_kinds_one_after_the_other(lengths: list[int], head_dim: int) -> None:
    """Wide units, then heavy and light ones, whose tiles differ, in the same stages."""
    pieces, first = [], 0
    for group, length in enumerate(lengths):
        members = tuple(range(first, first + (20, 12, 3)[group % 3]))
        pieces.append(Piece(members, 0, length))
        pieces += [Piece((query,), length, DYNAMIC) for query in members]
        first = members[-1] + 1
    inputs = stored(case(pieces, (32, 8), head_dim, tails=(*TAILS, 200)), BF16)
    out = check_e4m3(inputs, wide(inputs))
    for _ in range(5):
        assert torch.equal(execute(inputs, wide(inputs))[0], out)
    check_e4m3(inputs)


def paged(inputs: Case, page: int, seed: int = 0) -> Case:
    """The case with the tokens of each page in neighbouring slots."""
    rng = np.random.default_rng(seed)
    table = inputs.table.clone()
    found: dict[int, int] = {}
    new_of: dict[int, int] = {}
    total = -(-len(inputs.k) // page) + sum(-(-int(n) // page) for n in inputs.seq_lens)
    free = rng.permutation(total).tolist()
    for row, length in zip(inputs.rows.tolist(), inputs.seq_lens.tolist(), strict=True):
        for start in range(0, length, page):
            old = inputs.table[row, start : min(start + page, length)].tolist()
            if old[0] not in found:
                found[old[0]] = free.pop()
            for i, slot in enumerate(old):
                new_of[slot] = table[row, start + i] = found[old[0]] * page + i
    to, of = torch.tensor(list(new_of.values())), torch.tensor(list(new_of))

    def moved(cache: torch.Tensor) -> torch.Tensor:
        pages = cache.new_full((total * page, *cache.shape[1:]), float("nan"))
        pages.view(torch.uint8)[to] = cache.view(torch.uint8)[of]
        return pages

    return replace(inputs, k=moved(inputs.k), v=moved(inputs.v), table=table)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages(page: int, head_dim: int) -> None:
    """Prefixes end with a page, as in SGLang's tree; what is left of a last page is NaN."""
    for queries in (1, 9, 30):
        inputs = case(prefix(queries, 160), (8, 2), head_dim, tails=(1, 16, 47, 70))
        inputs = replace(inputs, k=inputs.k.contiguous(), v=inputs.v.contiguous())
        inputs = paged(inputs.to(BF16).to_e4m3(K_SCALE, V_SCALE), page)
        check_e4m3(on_device(inputs, BF16))


@pytest.mark.parametrize("cap", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("scale", [0.1, 1e-4, 0.0, -0.1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_transformed_logits(cap: float, scale: float, head_dim: int) -> None:
    for queries in (2, 8, 20, 50):
        inputs = case(shared(queries, 150), (4, 2), head_dim, logit_cap=cap)
        check_e4m3(replace(stored(inputs, BF16), scale=scale))
    pieces = forest(np.random.default_rng(2), 30)
    inputs = by_hand(pieces, (8, 2), head_dim=head_dim, tails=TAILS, logit_cap=cap)
    check_e4m3(replace(stored(inputs, BF16), scale=scale))


def test_what_no_item_owns_is_not_read() -> None:
    """Poison in the list and in partials; K and V of other slots are NaN already."""
    inputs = stored(case(forest(np.random.default_rng(3), 20), (8, 2), 128), BF16)
    plan = DevicePlan(inputs.plan())
    clean, clean_lse = execute(inputs, plan)
    workspace = Workspace(target_of(inputs, max_queries=64), inputs.table.shape[1] + 64)
    workspace._buffers["list"].fill_(2**31 - 1)
    workspace.partials.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    out, lse = execute(inputs, plan, workspace=workspace)
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


@pytest.mark.parametrize("heads", [(8, 2), (2, 2), (32, 2)])
@pytest.mark.parametrize("cuts", [WITHOUT_BRANCHES, ("short_branches",)])
def test_launch_modes_agree_and_repeat(heads: tuple[int, int], cuts: tuple[str, ...]) -> None:
    tree = Tree((1, 3, 60), (300, 150, 40))
    inputs = case_of_tree(tree, heads).to_e4m3(K_SCALE, V_SCALE)
    target = target_of(inputs, cuts=cuts)
    plan = Planner(target).plan(tree.paths, tree.seq_lens)
    check_launches(inputs, plan, target, check_e4m3)


@pytest.mark.parametrize("cuts", [CUTS, ("branches",)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_graph_serves_many_plans(head_dim: int, cuts: tuple[str, ...]) -> None:
    """A graph that was captured with an empty plan gives what later plans give when they run."""
    tree = Tree((2, 8, 48), (500, 120, 60))
    inputs = case_of_tree(tree, (8, 2), head_dim).to_e4m3(K_SCALE, V_SCALE)
    target = target_of(inputs, cuts=cuts)
    workspace = Workspace(target, inputs.table.shape[1])
    planner = Planner(target)
    out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:2], device="cuda")

    def run() -> None:
        workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
        tensors = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
        scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        decode(
            *tensors,
            workspace.plan,
            scale=inputs.scale,
            out=out,
            lse=lse,
            workspace=workspace,
            **scales,
        )

    workspace.load(planner.plan([], []))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for depth in (2, 1, 0):
        plan = planner.plan([path[:depth] for path in tree.paths], tree.seq_lens)
        workspace.load(plan)
        out.fill_(POISON)
        lse.fill_(POISON)
        graph.replay()
        assert torch.equal(check_e4m3(inputs, plan), out) and not torch.any(lse == POISON)
