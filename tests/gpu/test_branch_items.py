# SPDX-License-Identifier: Apache-2.0
"""Branches on a GPU, by hand and as planned: queries of one item that see different tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit import cases as kit_cases
from kit.cases import Case, by_hand, case, grown
from kit.device import (
    DevicePlan,
    check,
    check_launches,
    error,
    execute,
    of_all_kinds,
    of_both_kv,
    on_device,
    target_of,
)
from kit.pieces import DYNAMIC, Branch, Piece, branched, forest, paths_of, prefix

from sglang_pat.planner import Plan, plan
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

BF16, FP16 = torch.bfloat16, torch.float16
Kind = tuple[torch.dtype, torch.dtype]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 16]
TAILS = (0, 1, 31, 32, 33, 64, 65)


@of_all_kinds
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_hand_made_forests(group: int, head_dim: int, kind: Kind) -> None:
    """Every second branch has its tails first. Full branches and small ones."""
    for most in (64 // group, 3, 1):
        pieces = forest(np.random.default_rng(group), 40)
        inputs = by_hand(pieces, (2 * group, 2), head_dim=head_dim, most=most, tails=TAILS)
        check(on_device(inputs, *kind))


@pytest.mark.parametrize("tails_first", [False, True])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 700])
def test_lengths(length: int, tails_first: bool) -> None:
    """Of the part that all see, which needs no mask, and of tails that begin inside a tile."""
    for tails in (*((n,) for n in TAILS), TAILS):
        for num_queries in (1, 2, 16):
            pieces = prefix(num_queries, length)
            inputs = case(pieces, (8, 2), 128, tails=tails, seed=length)
            check(on_device(replace(inputs, pieces=[Branch(tuple(pieces), tails_first)]), BF16))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64])
def test_numbers_of_packed_rows(num_queries: int, head_dim: int) -> None:
    inputs = by_hand(prefix(num_queries, 70), (2, 2), head_dim=head_dim, tails=TAILS)
    check(on_device(inputs, BF16))


def test_deep_trees() -> None:
    """Chains of nodes for ever fewer queries, so that masks begin anywhere."""
    pieces, start = [], 0
    for first in range(16):
        length = 5 + 13 * (first % 7)
        pieces.append(Piece(tuple(range(first, 16)), start, length))
        pieces.append(Piece((first,), start + length, DYNAMIC))
        start += length
    inputs = case(pieces, (4, 1), 128, tails=TAILS)
    for tails_first in (False, True):
        check(on_device(replace(inputs, pieces=[Branch(tuple(pieces), tails_first)]), BF16))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_branches_without_tokens(head_dim: int) -> None:
    """More of them than any ring holds, alone and beside branches with tokens."""
    tails = [Piece((i,), 0, DYNAMIC) for i in range(200)]
    empty = by_hand(tails, (8, 2), head_dim=head_dim, most=2, tails=(0,))
    out, lse = execute(on_device(empty, BF16))
    assert not out.any() and torch.all(lse.isneginf())
    check(on_device(empty, BF16))
    some = by_hand(tails, (8, 2), head_dim=head_dim, most=2, tails=(0, 0, 0, 0, 0, 9))
    check(on_device(some, BF16))


def mixed(inputs: Case, most: int, keep: int) -> Case:
    """The case with pieces of more than ``keep`` tokens as items of their own."""
    pieces = inputs.pieces
    own = [p for p in pieces if isinstance(p, Piece) and p.length > keep]
    rest = [p for p in pieces if isinstance(p, Piece) and p.length <= keep]
    return replace(inputs, pieces=[*own, *branched(rest, most)])


@pytest.mark.parametrize("partial", [torch.float32, BF16])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_beside_other_items(group: int, partial: torch.dtype) -> None:
    """Partials of branches are merged with those of ordinary items."""
    for seed in range(4):
        pieces = forest(np.random.default_rng(seed), 60)
        inputs = case(pieces, (2 * group, 2), 128, tails=TAILS, seed=seed)
        inputs = on_device(mixed(inputs, 64 // group, 50), BF16)
        assert inputs.plan().header["num_partials"][0] > 0
        check(inputs, partial_dtype=partial)


@of_both_kv
@pytest.mark.parametrize("cap", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("scale", [0.1, 1e-4, 0.0, -0.1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_of_transformed_logits(cap: float, scale: float, head_dim: int, kind: Kind) -> None:
    """Tokens of other queries stay hidden under a cap, a negative scale and none."""
    pieces = forest(np.random.default_rng(2), 30)
    inputs = by_hand(pieces, (8, 2), head_dim=head_dim, tails=TAILS, logit_cap=cap)
    check(replace(on_device(inputs, *kind), scale=scale))


@pytest.mark.parametrize("tails_first", [False, True])
def test_other_queries_tokens_have_no_weight(tails_first: bool) -> None:
    """Scores that would win everywhere, in the tail of one query, reach that query only."""
    pieces = prefix(8, 100)
    inputs = case(pieces, (4, 1), 128, tails=(20,))
    inputs = on_device(replace(inputs, pieces=[Branch(tuple(pieces), tails_first)]), BF16)
    slot = inputs.table[inputs.rows[3], 110].long()
    q = inputs.q[:1, :1].expand_as(inputs.q).contiguous()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[slot] = 100 * q[0, 0].sign()  # a logit of about 900
    v[slot] = 1e4
    out = check(replace(inputs, q=q, k=k, v=v))
    assert torch.all(out[3] == torch.tensor(1e4, dtype=BF16))
    assert out[torch.arange(8) != 3].abs().max() < 10


def test_a_tail_beyond_its_room_takes_none_of_its_neighbours() -> None:
    """The snapshot cuts it; on the host such lengths do not fit the plan."""
    pieces = prefix(4, 100)
    inputs = case(pieces, (8, 2), 128, tails=(30,))
    inputs = replace(inputs, pieces=[Branch(tuple(pieces), room=30)])
    want, _ = execute(on_device(inputs, BF16))
    longer = grown(inputs, [130, 190, 130, 130])
    out, _ = execute(on_device(longer, BF16))
    assert torch.equal(out, want)


@pytest.mark.parametrize("heads", [(8, 2), (2, 2), (7, 1), (32, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_launch_modes_agree_and_repeat(heads: tuple[int, int], head_dim: int) -> None:
    """Same bits from one kernel, from streams and one by one, and from run to run."""
    pieces = forest(np.random.default_rng(5), 50)
    inputs = case(pieces, heads, head_dim, tails=TAILS)
    inputs = on_device(mixed(inputs, 64 * heads[1] // heads[0], 70), BF16)
    made = DevicePlan(inputs.plan())
    check_launches(inputs, made, target_of(inputs))


def planned(inputs: Case, target: Target) -> Plan:
    pieces: Any = inputs.pieces
    made = plan(paths_of(pieces, len(inputs.q)), inputs.seq_lens.tolist(), target)
    assert len(inputs.q) == 1 or made.branch_tokens > 0
    return made


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_planned_branches_while_tails_grow(group: int, head_dim: int) -> None:
    """One plan, at its own lengths and at the longest it allows."""
    for seed, cut in enumerate(("branches", "half_branches", "short_branches")):
        pieces = forest(np.random.default_rng(seed), 30)
        inputs = case(pieces, (2 * group, 2), head_dim, seed=seed)
        target = target_of(inputs, cuts=(cut,))
        made = planned(inputs, target)
        check(on_device(inputs, BF16), made)
        longest = grown(inputs, made.max_seq_lens.tolist())
        check(on_device(longest, BF16), made)


CONFIGS = [
    ((8, 2), 128, BF16),
    ((3, 3), 128, FP16),
    ((10, 2), 64, BF16),
    ((16, 1), 256, BF16),
    ((7, 1), 128, BF16),
]


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_forty_forests(config: int) -> None:
    """The CUDA executor against the CPU executor on the same plan: 200 in all."""
    heads, head_dim, dtype = CONFIGS[config]
    target = Target.h200(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        max_queries=64,
        cuts=("branches",),
    )
    workspace = Workspace(target, 4096)
    for seed in range(40):
        rng = np.random.default_rng(1000 * config + seed)
        pieces = forest(rng, int(rng.integers(1, 41)))
        inputs = case(pieces, heads, head_dim, seed=seed).to(dtype)
        made: Any = planned(inputs, target)
        want, want_lse = kit_cases.execute(inputs, made, threads=8)
        out, lse = execute(on_device(inputs, dtype), made, workspace=workspace)
        bound = 6e-3 if dtype == BF16 else 1e-3
        assert error(out.cpu(), want.double()) < bound, (config, seed)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=4e-6, atol=1e-5)
