# SPDX-License-Identifier: Apache-2.0
"""Masks of draft tokens that are a tree on the GPU: how they are read, set and refused; what
attention makes of them is in test_chains.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import random_trees
from kit.device import case_of_tree, execute, on_device, target_of
from kit.drafts import custom_mask, drafted
from kit.pieces import forest

from sglang_pat.draft_masks import masks_of
from sglang_pat.explain.tree import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Planner
from sglang_pat.target import WITHOUT_BRANCHES, Target
from sglang_pat.workspace import Workspace

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("heads", [(8, 2), (16, 1), (2, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_of_a_chain_change_no_bit(heads: tuple[int, int], head_dim: int) -> None:
    inputs = on_device(drafted(forest(np.random.default_rng(2), 8), heads, 4, head_dim), BF16)
    chain = torch.tensor([[(2 << i) - 1 for i in range(4)]] * len(inputs.rows)).cuda()
    found = (execute(inputs), execute(replace(inputs, draft_masks=chain)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_graphs_read_the_masks_that_were_set_last() -> None:
    tree = Tree((1, 12), (300, 40))
    lens = [348] * 12
    inputs = case_of_tree(tree, (8, 2), seq_lens=lens, draft_tokens=8)
    target = target_of(inputs, cuts=WITHOUT_BRANCHES)
    workspace = Workspace(target, inputs.table.shape[1], draft_masks=True)
    plan = Planner(target).plan(tree.paths, lens)
    out = torch.empty_like(inputs.q.contiguous())
    given = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens, plan)

    def run() -> None:
        workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
        decode(*given, scale=inputs.scale, out=out, workspace=workspace)

    workspace.load(plan)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        masks = random_trees(inputs, seed).draft_masks
        assert masks is not None
        workspace.set_draft_masks(masks.cuda())
        graph.replay()
        wanted, _ = execute(replace(inputs, draft_masks=masks.cuda()), plan)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("draft_tokens", [2, 3, 32, 33, 64])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_masks_are_read_from_cells(draft_tokens: int, with_prefix: bool) -> None:
    """As on the CPU, of more queries than a CTA has threads; rows of padding have no cells."""
    num_queries, padding = 300, 3
    target = Target.h200(
        num_q_heads=2,
        num_kv_heads=2,
        head_dim=64,
        max_queries=num_queries + padding,
        draft_tokens=draft_tokens,
    )
    workspace = Workspace(target, 1024, draft_masks=True)
    lens = torch.randint(0, 200, (num_queries,))
    masks = torch.randint(-(2**63), 2**63 - 1, (num_queries, draft_tokens))
    if draft_tokens < 64:
        masks &= (1 << draft_tokens) - 1
    cells = custom_mask(masks, lens if with_prefix else None)
    padded = torch.cat([lens, torch.ones(padding, dtype=torch.int64)])
    held = workspace._draft_masks
    assert held is not None
    for given in (cells, cells * torch.tensor(255).byte()):
        for of in (padded, padded.int()):
            if not with_prefix:
                of = of[:num_queries]
            held.fill_(-1)
            workspace.read_draft_masks(given.cuda(), of.cuda(), with_prefix=with_prefix)
            wanted = masks_of(given, of, draft_tokens, with_prefix=with_prefix)
            assert torch.equal(held[: len(of)].cpu(), wanted)
            assert (held[len(of) :] == -1).all()
    workspace.read_draft_masks(cells[:0].cuda(), padded.cuda(), with_prefix=with_prefix)
    assert not held.any()


def test_what_is_refused() -> None:
    tree = Tree((1, 12), (300, 40))
    inputs = case_of_tree(tree, (8, 2), seq_lens=[348] * 12, draft_tokens=8)
    given = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    chains = Workspace(target_of(inputs), inputs.table.shape[1])
    masks = torch.ones(12, 8, dtype=torch.int64, device="cuda")
    with pytest.raises(
        ValueError, match="for chains of draft tokens: make it with draft_masks=True"
    ):
        chains.set_draft_masks(masks)
    plan = Planner(chains.target).plan(tree.paths, [348] * 12)
    chains.load(plan)
    chains.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    with pytest.raises(ValueError, match="call its set_draft_masks"):
        decode(*given, plan, scale=inputs.scale, draft_masks=masks, workspace=chains)
    trees = Workspace(target_of(inputs), inputs.table.shape[1], draft_masks=True)
    with pytest.raises(ValueError, match=r"\(13, 8\), must be contiguous int64 \(12, 8\)"):
        trees.set_draft_masks(torch.ones(13, 8, dtype=torch.int64, device="cuda"))
    for wrong in (masks.int(), masks.cpu()):
        with pytest.raises(ValueError, match=r"must be contiguous int64|must be on cuda:0"):
            trees.set_draft_masks(wrong)
    cells, lens = torch.ones(13 * 64, dtype=torch.bool), torch.ones(13, dtype=torch.int64)
    for workspace, arguments, why in (
        (
            chains,
            (cells.cuda(), lens.cuda()),
            "for chains of draft tokens: make it with draft_masks=True",
        ),
        (trees, (cells.cuda(), lens.cuda()), "draft masks of 13 queries, at most 12 fit"),
        (trees, (cells, lens), "custom_mask is on cpu, must be on cuda:0"),
        (trees, (cells.long().cuda(), lens.cuda()), "custom_mask is torch.int64"),
    ):
        with pytest.raises(ValueError, match=why):
            workspace.read_draft_masks(*arguments, with_prefix=False)
    branched = Planner(target_of(inputs, cuts=("branches",))).plan(tree.paths, [348] * 12)
    assert branched.branch_tokens
    with pytest.raises(ValueError, match="a branch has no draft masks"):
        decode(*given, branched, scale=inputs.scale, draft_masks=masks)
