# SPDX-License-Identifier: Apache-2.0
"""The CUDA executor against attention by its definition, for every kind of item (``kit.kinds``):
K and V of slots that no query owns are NaN, and so is what lies between the rows of tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from kit.cases import by_hand, case, grown
from kit.device import (
    BF16,
    BOTH_KV,
    HEAD_DIMS,
    Dtypes,
    case_of_tree,
    check,
    check_launches,
    error,
    execute,
    of_all_dtypes,
    of_both_kv,
    of_head_dims,
    on_device,
    same,
    target_of,
)
from kit.kinds import SMALL, TAILS, halves, items_of
from kit.pieces import DYNAMIC, Branch, Piece, branched, forest, paths_of, shared

from benchmarks.common.forests import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import plan
from sglang_pat.workspace import Workspace

RANDOM = ("forest", "wide_forest", "branches", "small_branches")
of_kinds = pytest.mark.parametrize("kind", SMALL)


@of_all_dtypes
@of_head_dims
@of_kinds
def test_kinds_of_items(kind: str, head_dim: int, dtypes: Dtypes) -> None:
    """With all ratios of heads; of those that are random three each."""
    for group in range(1, 17):
        for seed in range(3 if kind in RANDOM else 1):
            inputs, hand = items_of(kind, (2 * group, 2), head_dim, seed=16 * seed + group)
            check(on_device(inputs, *dtypes), hand)


@of_both_kv
@of_head_dims
@of_kinds
def test_transformed_logits(kind: str, head_dim: int, dtypes: Dtypes) -> None:
    """Tokens of other queries stay hidden under a cap, a negative scale and none."""
    for cap in (0.0, 1.0, 30.0):
        inputs, hand = items_of(kind, (8, 2), head_dim, logit_cap=cap)
        for scale in (0.1, 1e-4, 0.0, -0.1):
            check(replace(on_device(inputs, *dtypes), scale=scale), hand)


@of_both_kv
@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [
        *product(SMALL, [128]),
        *product(["branches"], [64, 256]),
        *product(["turns", "many_pairs"], [64, 128]),
    ],
)
def test_launches_agree_and_repeat(kind: str, head_dim: int, dtypes: Dtypes) -> None:
    """Same bits from one kernel, from streams and one by one, and from run to run; buffers hold
    poison before."""
    many = kind in ("turns", "many_pairs")
    tails = (0, 1, 15, 30, 31, 32, 33, 64, 65) if many else TAILS
    if kind == "turns":  # a branch has no room for such tails
        tails += (200, 700)
    for heads in [(64, 16)] if many else [(8, 2), (2, 2), (7, 1), (32, 2)]:
        inputs, hand = items_of(kind, heads, head_dim, tails=tails)
        check_launches(on_device(inputs, *dtypes), hand)


@of_both_kv
@of_head_dims
@pytest.mark.parametrize(
    "num_queries", [1, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129]
)
def test_numbers_of_packed_rows(num_queries: int, head_dim: int, dtypes: Dtypes) -> None:
    """Around the row tiles and beyond the largest, which the kernel runs in parts."""
    for length, heads in ((130, (1, 1)), (30, (4, 2))):
        check(on_device(case(shared(num_queries, length), heads, head_dim), *dtypes))
    if num_queries <= 64:
        branch = by_hand(shared(num_queries, 70), (2, 2), head_dim=head_dim, tails=TAILS)
        check(on_device(branch, *dtypes))


@pytest.mark.parametrize(
    ("num_queries", "head_dim", "dtypes"),
    [
        *product([1, 8, 20, 50, 100], HEAD_DIMS, BOTH_KV),
        *product([65, 127, 129, 192, 193, 300], [128], [(BF16, BF16)]),
    ],
)
def test_lengths(num_queries: int, head_dim: int, dtypes: Dtypes) -> None:
    """Around the KV tiles and pairs of them, for every row tile."""
    everyone = tuple(range(num_queries))
    for length in (1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 127, 128, 129, 191, 193, 320, 448, 1000):
        pieces = [Piece(everyone, 0, length)]
        check(on_device(case(pieces, (2, 2), head_dim, seed=length), *dtypes))


@of_both_kv
@pytest.mark.parametrize("partial", [torch.float32, BF16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_splits(head_dim: int, partial: torch.dtype, dtypes: Dtypes) -> None:
    """Partials of branches are merged with those of ordinary items."""
    for splits in (2, 3, 5, 32, 33, 70):
        inputs = case(shared(4, 20 * splits, splits), (8, 2), head_dim, seed=splits)
        check(on_device(inputs, *dtypes), partial_dtype=partial)
    for seed, group in enumerate((1, 4, 7)):
        parts = forest(np.random.default_rng(seed), 60)
        own = [part for part in parts if part.length > 50]
        rest = branched([part for part in parts if part not in own], 64 // group)
        inputs = case(parts, (2 * group, 2), head_dim, tails=TAILS, seed=seed)
        inputs = on_device(replace(inputs, pieces=[*own, *rest]), *dtypes)
        assert inputs.plan().num_partials > 0
        check(inputs, partial_dtype=partial)


@pytest.mark.parametrize("heads", [(7, 1), (8, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_merge_of_more_rows_than_warps(heads: tuple[int, int], splits: int) -> None:
    """Where a warp of the merge takes two heads, the last of an odd number alone."""
    queries = min(700, 4096 // (heads[0] // heads[1]))  # an item has 4096 packed rows at most
    check(on_device(case(shared(queries, 32 * splits, splits), heads, 64), BF16))


def test_half_partials_are_used() -> None:
    inputs = on_device(case(shared(6, 120, 4), (8, 2), 128, tails=(9, 50)), BF16)
    exact, _ = execute(inputs)
    rounded, _ = execute(inputs, partial_dtype=BF16)
    assert 1e-5 < error(rounded, exact.double()) < 6e-3


# Pieces, heads, cut, and what the plan must have.
PLANNED: list[tuple[list[Piece], tuple[int, int], str, str]] = [
    *(
        (forest(np.random.default_rng(seed), 30), (2 * group, 2), cut, "branch_tokens")
        for group in (1, 2, 3, 4, 5, 7, 8, 16)
        for seed, cut in enumerate(("branches", "half_branches", "short_branches"))
    ),
    (shared(512, 600), (32, 8), "branches", "num_paired_items"),
    (halves([700] * 16, (300, 40), 16), (32, 8), "branches", "num_paired_items"),
]


@of_head_dims
@pytest.mark.parametrize("row", range(len(PLANNED)))
def test_planned_branches_while_tails_grow(row: int, head_dim: int) -> None:
    """One plan, at its own lengths and at the longest it allows."""
    pieces, heads, cut, has = PLANNED[row]
    inputs = case(pieces, heads, head_dim, seed=row)
    target = target_of(inputs, cuts=(cut,))
    made: Any = plan(paths_of(pieces, len(inputs.rows)), inputs.seq_lens.tolist(), target)
    assert getattr(made, has) > 0 or (has == "num_paired_items" and head_dim == 256)
    check(on_device(inputs, BF16), made)
    check(on_device(grown(inputs, made.max_seq_lens.tolist()), BF16), made)


PAPERS = ("1,10_4096,416", "1,4,256_32,256,32", "1,4,8,256_32,256,256,32")
LARGE = [
    *product((*PAPERS, "8,16,32,256_512,512,256,32"), [(32, 8), (64, 8), (16, 8), (32, 32)], [128]),
    *product(("2_131072", "1,3_131000,72"), [(8, 1)], [128]),
    ("1,32,1024_200,40,20", (8, 2), 128),
    *product(["1,5,80_700,150,40"], [(16, 2)], [64, 256]),
]


@pytest.mark.parametrize(("spec", "heads", "head_dim"), LARGE)
def test_large_batches(spec: str, heads: tuple[int, int], head_dim: int) -> None:
    """The paper's trees, long contexts, many requests; as planned by default."""
    tree = Tree.parse(spec)
    inputs = case_of_tree(tree, heads, head_dim)
    target = target_of(inputs)
    made = plan(tree.paths, tree.seq_lens, target)
    check(inputs, made, workspace=Workspace(target, inputs.table.shape[1]))


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
    check(moved, plan(tree.paths, tree.seq_lens, target_of(inputs)))


@pytest.mark.parametrize("most", [0, 1, 2])
@of_head_dims
def test_items_without_tokens(head_dim: int, most: int) -> None:
    """More of them than any ring holds, alone and between those with tokens; in branches of
    ``most`` queries, or each by itself."""
    tails = [Piece((i,), 0, DYNAMIC) for i in range(200)]
    parts = branched(tails, most) if most else tails
    inputs = case(tails, (8, 2), head_dim, tails=(0,))
    empty = on_device(replace(inputs, pieces=parts), BF16)
    check(empty)
    out, lse = execute(empty)
    assert not out.any() and torch.all(lse.isneginf())
    inputs = case(tails, (8, 2), head_dim, tails=(0, 0, 0, 0, 0, 9))
    check(on_device(replace(inputs, pieces=parts), BF16))
    for heads in ((4, 2), (64, 8)):
        inputs = case(shared(40, 200, 2), heads, head_dim, tails=(0, 0, 0, 0, 5))
        check(on_device(inputs, BF16))


@pytest.mark.parametrize("num_queries", [0, 1, 5])
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_padded_rows_and_empty_plans(num_queries: int, draft_tokens: int) -> None:
    """Rows beyond the plan's queries get zeros, as in a captured batch that is not full."""
    pieces = [Piece((i,), 0, DYNAMIC) for i in range(8)]
    tails = tuple(range(50, 70, 7))
    full = on_device(case(pieces, (8, 2), 128, draft_tokens=draft_tokens, tails=tails), BF16)
    rows = num_queries * draft_tokens
    first = replace(
        full,
        q=full.q[:rows],
        rows=full.rows[:num_queries],
        seq_lens=full.seq_lens[:num_queries],
        pieces=full.pieces[:num_queries],
    )
    made = first.plan()
    workspace = Workspace(target_of(full), full.table.shape[1])
    want = execute(first, made, workspace=workspace)
    out, lse = execute(full, made, workspace=workspace)
    assert same((out[:rows], lse[:rows]), want)
    assert not out[rows:].any() and torch.all(lse[rows:].isneginf())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one() -> None:
    with torch.cuda.device(1):
        inputs = on_device(case(shared(9, 150), (8, 2), 128), BF16)
        there = check(inputs)
    made = inputs.plan()
    workspace = Workspace(target_of(inputs), inputs.table.shape[1], "cuda:1")
    assert torch.cuda.current_device() == 0
    workspace.load(made)
    workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    here = decode(*inputs.inputs, made, scale=inputs.scale, workspace=workspace)
    assert torch.equal(here, there)


@pytest.mark.parametrize("branch", [False, True])
def test_a_tail_beyond_its_room_takes_none_of_its_neighbours(branch: bool) -> None:
    """The snapshot cuts it, in the table's width as well; on the host such lengths do not fit the
    plan."""
    pieces = shared(4, 100)
    inputs = case(pieces, (8, 2), 128, tails=(30,))
    if branch:
        inputs = replace(inputs, pieces=[Branch(tuple(pieces), room=30)])
    hand = inputs.plan()
    if not branch:
        hand.segments["room"][1:] = 30
        hand.items["list_start"][1:] = 100 + 30 * np.arange(4)
        hand.header["list_tokens"] = 100 + 30 * 4
    made = hand.encode()
    want = execute(on_device(inputs, BF16), made)
    longer = on_device(grown(inputs, [130, 190, 130, 130]), BF16)
    assert torch.equal(execute(longer, made)[0], want[0])
    if not branch:
        beyond = replace(longer, seq_lens=longer.seq_lens.clamp_max(130) + 10**6)
        out, _ = execute(replace(beyond, table=longer.table[:, :130]), made)
        assert torch.equal(out, want[0])
