# SPDX-License-Identifier: Apache-2.0
"""Queries of several draft tokens on the GPU: the causal mask of a chain and the masks of trees, in
every kind of unit; how masks are read, set and refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from kit.cases import Case, by_hand, random_trees
from kit.device import (
    ALL_DTYPES,
    BF16,
    BOTH_KV,
    Dtypes,
    case_of_tree,
    check,
    check_launches,
    execute,
    of_head_dims,
    on_device,
    same,
    target_of,
)
from kit.drafts import chains, custom_mask, drafted, drafted_forest, skip_unless_rows_fit
from kit.kinds import items_of
from kit.pieces import DYNAMIC, Piece, forest, shared

from benchmarks.common.forests import Tree
from sglang_pat.draft_masks import masks_of
from sglang_pat.ops import decode
from sglang_pat.planner import Planner
from sglang_pat.target import CUTS, WITHOUT_BRANCHES, Target
from sglang_pat.workspace import Workspace

of_heads = pytest.mark.parametrize("heads", [(8, 2), (16, 1), (2, 2)])
chains_and_trees = pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])


def with_masks(inputs: Case, trees: bool, seed: int = 0) -> Case:
    return random_trees(inputs, seed) if trees else inputs


@chains_and_trees
@pytest.mark.parametrize(
    ("head_dim", "dtypes"), [*product([64, 256], BOTH_KV), *product([128], ALL_DTYPES)]
)
@pytest.mark.parametrize("draft_tokens", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (10, 2), (16, 1), (7, 1)])
def test_random_forests(
    heads: tuple[int, int], draft_tokens: int, head_dim: int, dtypes: Dtypes, trees: bool
) -> None:
    skip_unless_rows_fit(heads[0] // heads[1], draft_tokens, head_dim)
    for seed in range(2):
        pieces = drafted_forest(seed, heads, draft_tokens)
        inputs = drafted(pieces, heads, draft_tokens, head_dim, seed=seed)
        check(on_device(with_masks(inputs, trees, seed), *dtypes))


@chains_and_trees
@of_head_dims
@pytest.mark.parametrize("draft_tokens", [2, 4, 5, 8, 16, 32, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_units_of_one_query(group: int, draft_tokens: int, head_dim: int, trees: bool) -> None:
    """Narrow, light, heavy and wide ones, each with tails around its tiles."""
    skip_unless_rows_fit(group, draft_tokens, head_dim)
    if trees and draft_tokens > 64:
        pytest.skip("a mask has 64 bits")
    alone = [Piece((query,), 0, DYNAMIC) for query in range(3)]
    for more in (0, 1, 17, 32, 62, 63, 64, 65, 127, 300):
        tails = (draft_tokens + more, max(draft_tokens, more + 1))
        inputs = drafted(alone, (2 * group, 2), draft_tokens, head_dim, tails=tails, seed=more)
        check(on_device(with_masks(inputs, trees, more), BF16))


@of_head_dims
@pytest.mark.parametrize(("draft_tokens", "most"), [(2, 8), (4, 4), (4, 1), (5, 3), (16, 1)])
def test_branches(draft_tokens: int, most: int, head_dim: int) -> None:
    for seed in range(5):
        pieces = forest(np.random.default_rng(seed), 8)
        inputs = by_hand(
            pieces,
            (8, 2),
            head_dim=head_dim,
            most=most,
            tails=(draft_tokens, draft_tokens + 1, draft_tokens + 70),
            draft_tokens=draft_tokens,
            seed=seed,
        )
        check(on_device(inputs, BF16))


@pytest.mark.parametrize("draft_tokens", [2, 4])
@pytest.mark.parametrize("kind", ["turns", "many_pairs"])
def test_many_units(kind: str, draft_tokens: int) -> None:
    tails = (8, 9, 40, 65)
    inputs, hand = items_of(kind, (32, 16), draft_tokens=draft_tokens, tails=tails)
    check_launches(on_device(inputs, BF16), hand)


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
    tiles = set()
    for draft_tokens in (2, 4, 8):
        for spec in ("1,40_700,60", "2,6,24_200,90,30", "3_5000"):
            tree = Tree.parse(spec)
            start = sum(tree.tokens[:-1])
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
            tiles |= set(plan.items["row_tile"].tolist())
            check(inputs, plan, workspace=workspace)
    assert len(tiles) > 1


@of_heads
def test_no_row_sees_a_later_draft_token(heads: tuple[int, int]) -> None:
    """Other K and V of draft token t change no bit of the rows before it, and all rows from it."""
    draft_tokens = 4
    inputs = on_device(drafted(shared(8, 100), heads, draft_tokens, 128), BF16)
    before = execute(inputs)
    for draft_token in range(draft_tokens):
        at = inputs.seq_lens - draft_tokens + draft_token
        slots = inputs.table[inputs.rows, at].long()
        k, v = inputs.k.clone(), inputs.v.clone()
        k[slots], v[slots] = -k[slots], 3 * v[slots] + 1
        for one, other in zip(before, execute(replace(inputs, k=k, v=v)), strict=True):
            equal = (one == other).flatten(1).all(1).view(-1, draft_tokens)
            assert equal[:, :draft_token].all() and not equal[:, draft_token:].any()


@of_heads
@of_head_dims
def test_masks_of_a_chain_change_no_bit(heads: tuple[int, int], head_dim: int) -> None:
    inputs = on_device(drafted(forest(np.random.default_rng(2), 8), heads, 4, head_dim), BF16)
    chain = chains(len(inputs.rows), 4).cuda()
    assert same(execute(inputs), execute(replace(inputs, draft_masks=chain)))


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
    inputs = case_of_tree(tree, (8, 2), draft_tokens=8)
    width = inputs.table.shape[1]
    given = inputs.inputs
    options = {"scale": inputs.scale, "draft_masks": torch.ones(12, 8, dtype=torch.int64).cuda()}
    chain, masked = (
        Workspace(target_of(inputs), width, draft_masks=each) for each in (False, True)
    )
    plan = Planner(chain.target).plan(tree.paths, tree.seq_lens)
    branched = Planner(target_of(inputs, cuts=("branches",))).plan(tree.paths, tree.seq_lens)
    assert branched.branch_tokens
    chain.load(plan)
    chain.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    ones = torch.ones(13 * 64, dtype=torch.bool)
    cells, lens = ones.cuda(), torch.ones(13, dtype=torch.int64).cuda()
    masks = options["draft_masks"]
    strided = torch.empty(96, 9, 128, dtype=BF16, device="cuda")[:, 1:]
    other = Workspace(target_of(inputs, draft_tokens=2), width)

    def read(into: Workspace, cells: torch.Tensor) -> None:
        into.read_draft_masks(cells, lens.to(cells.device), with_prefix=False)

    for run, message in (
        (lambda: other.load(plan), "the plan is for 8 draft tokens a query, the workspace for 2"),
        (lambda: decode(*given, plan, scale=1.0, out=strided), "it must be contiguous"),
        (lambda: decode(*given, plan, workspace=chain, **options), "call its set_draft_masks"),
        (lambda: decode(*given, branched, **options), "a branch has no draft masks"),
        (lambda: chain.set_draft_masks(masks), "make it with draft_masks=True"),
        (lambda: read(chain, cells), "make it with draft_masks=True"),
        (lambda: masked.set_draft_masks(masks.repeat(2, 1)), r"\(24, 8\), must be contiguous"),
        (lambda: masked.set_draft_masks(masks.int()), "must be contiguous int64"),
        (lambda: masked.set_draft_masks(masks.cpu()), "must be on cuda:0"),
        (lambda: read(masked, cells), "draft masks of 13 queries, at most 12 fit"),
        (lambda: read(masked, ones), "custom_mask is on cpu, must be on cuda:0"),
        (lambda: read(masked, cells.long()), "custom_mask is torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
