# SPDX-License-Identifier: Apache-2.0
"""The CUDA executor against attention by its definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import case, grown
from kit.device import (
    BF16,
    DevicePlan,
    check,
    error,
    execute,
    of_all_kinds,
    of_both_kv,
    on_device,
    target_of,
    wide,
)
from kit.pieces import DYNAMIC, Piece, branched, forest, prefix, shared

from sglang_pat.ops import decode
from sglang_pat.workspace import Workspace

Kind = tuple[torch.dtype, torch.dtype]


@of_all_kinds
@pytest.mark.parametrize("seed", range(8))
def test_random_forests(seed: int, kind: Kind) -> None:
    heads = [(8, 2), (4, 4), (5, 1), (14, 2), (16, 1), (6, 3), (32, 8), (64, 8)][seed]
    pieces = forest(np.random.default_rng(seed), 1 + 9 * seed)
    check(on_device(case(pieces, heads, (128, 64, 256)[seed % 3], seed=seed), *kind))


@of_all_kinds
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", range(1, 17))
def test_head_dims_and_ratios(kind: Kind, head_dim: int, group: int) -> None:
    for num_queries in (2, 9):
        inputs = case(shared(num_queries, 150), (2 * group, 2), head_dim, seed=group)
        check(on_device(inputs, *kind))


@of_both_kv
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "num_queries", [1, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129]
)
def test_numbers_of_packed_rows(head_dim: int, num_queries: int, kind: Kind) -> None:
    """Around the row tiles and beyond the largest, which the kernel runs in parts."""
    for length, heads in ((130, (1, 1)), (30, (4, 2))):
        inputs = case(shared(num_queries, length), heads, head_dim, seed=num_queries)
        check(on_device(inputs, *kind))


@of_both_kv
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 8, 20, 50, 100])
@pytest.mark.parametrize(
    "length", [1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 127, 128, 129, 448, 1000]
)
def test_lengths(num_queries: int, length: int, head_dim: int, kind: Kind) -> None:
    """Around the KV tiles, for every row tile."""
    everyone = tuple(range(num_queries))
    inputs = on_device(case([Piece(everyone, 0, length)], (2, 2), head_dim, seed=length), *kind)
    check(inputs)
    if num_queries > 64:
        check(inputs, wide(inputs))


@of_both_kv
@pytest.mark.parametrize("splits", [2, 3, 5, 32, 33, 70])
@pytest.mark.parametrize("partial", [torch.float32, BF16])
def test_splits(splits: int, partial: torch.dtype, kind: Kind) -> None:
    inputs = case(shared(4, 20 * splits, splits), (8, 2), 128, seed=splits)
    check(on_device(inputs, *kind), partial_dtype=partial)


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


@of_both_kv
@pytest.mark.parametrize("cap", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("scale", [0.1, 1e-4, 0.0, -0.1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_transformed_logits(cap: float, scale: float, head_dim: int, kind: Kind) -> None:
    for num_queries in (2, 8, 20, 50):
        inputs = case(shared(num_queries, 150), (4, 2), head_dim, logit_cap=cap)
        check(replace(on_device(inputs, *kind), scale=scale))


@pytest.mark.parametrize(("cap", "scale"), [(0.0, 0.5), (1.0, 1.0), (30.0, 1.0)])
def test_large_logits(cap: float, scale: float) -> None:
    for num_queries in (2, 20, 50):
        inputs = on_device(case(shared(num_queries, 150), (4, 2), 128, logit_cap=cap), BF16)
        check(replace(inputs, scale=scale))


@pytest.mark.parametrize("num_queries", [1, 9, 40])
@pytest.mark.parametrize("token", [0, 63, 64, 149])
def test_one_token_wins(num_queries: int, token: int) -> None:
    """A score far above the others, in the first or last token of a tile and of the sequence."""
    inputs = on_device(case([Piece(tuple(range(num_queries)), 0, 150)], (4, 1), 128), BF16)
    slot = inputs.table[inputs.rows[0], token].long()
    q = inputs.q[:1, :1].expand_as(inputs.q).contiguous()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[slot] = 1e4 * q[0, 0].sign()
    v[slot] = 1e4
    out = check(replace(inputs, q=q, k=k, v=v))
    assert torch.all(out == torch.tensor(1e4, dtype=BF16))


@pytest.mark.parametrize("num_queries", [1, 9, 40])
def test_equal_and_extreme_values(num_queries: int) -> None:
    inputs = on_device(case(shared(num_queries, 128, 2), (4, 1), 128, tails=(7,)), BF16)
    for size in (0.0, 1.0, 1e4):
        check(replace(inputs, k=torch.full_like(inputs.k, size)))
    check(replace(inputs, v=inputs.v * 1e4))
    check(replace(inputs, k=inputs.k * 1e4))


def test_a_query_without_tokens() -> None:
    inputs = on_device(case(shared(3, 60), (4, 2), 128, tails=(0,)), BF16)
    check(inputs)
    alone = on_device(case([Piece((0,), 0, DYNAMIC), Piece((1,), 0, 9)], (4, 2), 128), BF16)
    check(replace(alone, seq_lens=torch.tensor([0, 9], device="cuda")))


def test_many_empty_tails() -> None:
    """Units without tokens, more of them than any ring holds, between those with tokens."""
    for heads in ((4, 2), (64, 8)):
        inputs = case(shared(40, 200, 2), heads, 128, tails=(0, 0, 0, 0, 5))
        check(on_device(inputs, BF16))


@of_both_kv
@pytest.mark.parametrize("branches", [False, True])
def test_what_no_item_owns_is_not_read(branches: bool, kind: Kind) -> None:
    """Poison in the list, in row masks, in plan entries and partials; K and V of other slots are
    NaN already."""
    inputs = case(forest(np.random.default_rng(3), 20), (8, 2), 128)
    if branches:
        parts = [part for part in inputs.pieces if isinstance(part, Piece)]
        own = [part for part in parts if part.length > 60]
        inputs = replace(inputs, pieces=[*own, *branched([p for p in parts if p not in own], 16)])
    inputs = on_device(inputs, *kind)
    plan = DevicePlan(inputs.plan())
    assert plan.num_partials > 0 and (plan.branch_tokens > 0) == branches
    clean, clean_lse = execute(inputs, plan)
    workspace = Workspace(target_of(inputs, max_queries=64), inputs.table.shape[1] + 64)
    workspace._buffers["list"].fill_(2**31 - 1)
    workspace._buffers["row_masks"].fill_(-1)
    workspace.partials.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    workspace._buffers["plan"].fill_(0x7F)
    out, lse = execute(inputs, plan, workspace=workspace)
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


@pytest.mark.parametrize("num_queries", [0, 1, 5])
def test_padded_rows_and_empty_plans(num_queries: int) -> None:
    """Rows beyond the plan's queries get zeros, as in a captured batch that is not full."""
    full = on_device(case([Piece((i,), 0, 50 + i) for i in range(8)], (8, 2), 128), BF16)
    first = replace(
        full,
        q=full.q[:num_queries],
        rows=full.rows[:num_queries],
        seq_lens=full.seq_lens[:num_queries],
        pieces=full.pieces[:num_queries],
    )
    plan = DevicePlan(first.plan())
    workspace = Workspace(target_of(full), full.table.shape[1])
    want, want_lse = execute(first, plan, workspace=workspace)
    out, lse = execute(full, plan, workspace=workspace)
    assert torch.equal(out[:num_queries], want) and torch.equal(lse[:num_queries], want_lse)
    assert not out[num_queries:].any() and torch.all(lse[num_queries:].isneginf())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one() -> None:
    with torch.cuda.device(1):
        inputs = on_device(case(shared(9, 150), (8, 2), 128), BF16)
        there = check(inputs)
    plan = DevicePlan(inputs.plan())
    workspace = Workspace(target_of(inputs), inputs.table.shape[1], "cuda:1")
    assert torch.cuda.current_device() == 0
    workspace.load(plan)
    workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens, plan)
    here = decode(*arguments, scale=inputs.scale, workspace=workspace)
    assert torch.equal(here, there)


def test_a_tail_beyond_its_room_takes_none_of_its_neighbours() -> None:
    """The snapshot cuts it, in the table's width as well; on the host such lengths do not fit the
    plan."""
    inputs = case(prefix(4, 100), (8, 2), 128, tails=(30,))
    hand = inputs.plan()
    tails = hand.segments["kv_len"] == DYNAMIC
    hand.segments["room"][tails] = 30
    starts = 100 + 30 * np.arange(len(tails))
    hand.items["list_start"][1:] = starts[: len(tails) - 1]
    hand.header["list_tokens"] = 100 + 30 * tails.sum()
    made = DevicePlan(hand.encode())
    want, _ = execute(on_device(inputs, BF16), made)
    longer = on_device(grown(inputs, [130, 190, 130, 130]), BF16)
    out, _ = execute(longer, made)
    assert torch.equal(out, want)
    beyond = replace(longer, seq_lens=longer.seq_lens.clamp_max(130) + 10**6)
    out, _ = execute(replace(beyond, table=longer.table[:, :130]), made)
    assert torch.equal(out, want)
