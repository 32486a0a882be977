# SPDX-License-Identifier: Apache-2.0
"""Large pools, long contexts, large batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit.device import case_of_tree, check, target_of

from sglang_pat.explain.tree import Tree
from sglang_pat.planner import plan
from sglang_pat.workspace import Workspace


def run(tree: Tree, heads: tuple[int, int], head_dim: int = 128) -> None:
    inputs = case_of_tree(tree, heads, head_dim)
    target = target_of(inputs)
    made = plan(tree.paths, tree.seq_lens, target)
    check(inputs, made, workspace=Workspace(target, inputs.table.shape[1]))


@pytest.mark.parametrize(
    "tree",
    ["1,10_4096,416", "1,4,256_32,256,32", "1,4,8,256_32,256,256,32", "8,16,32,256_512,512,256,32"],
)
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (16, 8), (32, 32)])
def test_trees_of_the_paper(tree: str, heads: tuple[int, int]) -> None:
    run(Tree.parse(tree), heads)


@pytest.mark.parametrize("tree", ["2_131072", "1,3_131000,72"])
def test_contexts_of_131072(tree: str) -> None:
    run(Tree.parse(tree), (8, 1))


def test_batches_of_1024() -> None:
    run(Tree((1, 32, 1024), (200, 40, 20)), (8, 2))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_plans_of_other_head_dims(head_dim: int) -> None:
    run(Tree((1, 5, 80), (700, 150, 40)), (16, 2), head_dim)


def test_pools_beyond_31_bits() -> None:
    """Slots whose first element has an index above 2^31."""
    tree = Tree((1, 20), (150, 40))
    inputs = case_of_tree(tree, (8, 8))
    slots = 2**31 // (8 * 128) + 4 * len(inputs.k)
    offset = slots - len(inputs.k)
    big = {}
    for name in ("k", "v"):
        small = getattr(inputs, name)
        big[name] = torch.empty((slots, 8, 128), dtype=small.dtype, device="cuda")
        big[name][offset:] = small
    moved = replace(inputs, **big, table=inputs.table + offset)
    assert offset * 8 * 128 > 2**31
    target = target_of(inputs)
    check(moved, plan(tree.paths, tree.seq_lens, target))
