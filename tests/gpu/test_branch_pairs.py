# SPDX-License-Identifier: Apache-2.0
"""Paired branches: the halves of an SM run one each and load their common tiles for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.cases import E4M3, Case, case, grown
from kit.device import (
    DevicePlan,
    attend,
    check,
    check_launches,
    execute,
    on_device,
    target_of,
)
from kit.pieces import DYNAMIC, Branch, Piece, branched, paths_of, prefix
from kit.plans import paired

from sglang_pat.planner import plan
from sglang_pat.workspace import Workspace

BF16, FP16 = torch.bfloat16, torch.float16


def pieces_of_pairs(common: Sequence[int], own: Sequence[int], queries: int) -> list[Piece]:
    """For each of ``common`` a prefix of so many tokens of twice ``queries`` queries, half of which
    share ``own`` more tokens, by turns, then tails."""
    pieces = []
    for pair, length in enumerate(common):
        first = 2 * pair * queries
        pieces.append(Piece(tuple(range(first, first + 2 * queries)), 0, length))
        for half in range(2):
            mine = tuple(range(first + half * queries, first + (half + 1) * queries))
            more = own[(2 * pair + half) % len(own)]
            if more:
                pieces.append(Piece(mine, length, more))
            pieces += [Piece((query,), length + more, DYNAMIC) for query in mine]
    return pieces


def pairs(inputs: Case, queries: int) -> Case:
    """The case in branches of ``queries``, with shared tokens first."""
    made = branched([p for p in inputs.pieces if isinstance(p, Piece)], queries)
    return replace(inputs, pieces=[Branch(branch.pieces) for branch in made])


def tiles_of(common: Sequence[int], own_first: Sequence[bool]) -> list[int]:
    return [
        -(length // 64) if own_first[pair % len(own_first)] else length // 64
        for pair, length in enumerate(common)
    ]


def check_pairs(inputs: Case, tiles: list[int]) -> torch.Tensor:
    """As computed without pairs: the same bits where no half begins with its own tokens."""
    hand = inputs.plan()
    out = check(inputs, DevicePlan(paired(hand, *tiles)))
    if min(tiles) > 0:
        assert torch.equal(out, execute(inputs, DevicePlan(hand))[0])
    return out


@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("tails", [(0,), (1,), (0, 0, 0, 0, 70), (33, 64, 0, 65, 200)])
@pytest.mark.parametrize("common", [64, 65, 128, 192, 256, 300, 321, 512, 577, 2100])
def test_lengths(common: int, tails: tuple[int, ...], own_first: bool) -> None:
    """Halves of few and many tiles of their own, and of none."""
    for own in ((0,), (1, 300), (63, 0), (128, 64), (500, 129)):
        pieces = pieces_of_pairs([common], own, 5)
        inputs = on_device(pairs(case(pieces, (8, 2), 128, tails=tails, seed=common), 5), BF16)
        check_pairs(inputs, tiles_of([common], [own_first]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_ratios(group: int, head_dim: int, dtype: torch.dtype) -> None:
    queries = 64 // group
    lengths = [300, 1000, 64]
    pieces = pieces_of_pairs(lengths, (0, 40, 130), queries)
    made = case(pieces, (2 * group, 2), head_dim, tails=(0, 5, 70), seed=group)
    inputs = on_device(pairs(made, queries), dtype)
    for own_first in ([False], [True], [True, False]):
        check_pairs(inputs, tiles_of(lengths, own_first))


def several_an_sm(heads: tuple[int, int], head_dim: int, **options: Any) -> tuple[Case, list[int]]:
    """More pairs than SMs, of all lengths, that take turns."""
    lengths = [64 + 97 * (7 * i % 23) for i in range(24)]
    group = heads[0] // heads[1] * options.get("draft_tokens", 1)
    queries = 64 // group
    pieces = pieces_of_pairs(lengths, (0, 200, 64, 7, 700), queries)
    tails = (8, 9, 40, 65) if "draft_tokens" in options else (0, 1, 30, 64, 65)
    made = pairs(case(pieces, heads, head_dim, tails=tails, **options), queries)
    return made, tiles_of(lengths, [False, True, True])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_several_an_sm(head_dim: int) -> None:
    """The rings of stages go on from pair to pair: the halves have tiles of their own between."""
    made, tiles = several_an_sm((64, 16), head_dim)
    inputs = on_device(made, BF16)
    out = check_pairs(inputs, tiles)
    for _ in range(20):
        assert torch.equal(execute(inputs, DevicePlan(paired(inputs.plan(), *tiles)))[0], out)
    check_pairs(inputs, [abs(each) for each in tiles])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_e4m3(head_dim: int) -> None:
    made, tiles = several_an_sm((64, 16), head_dim)
    inputs = on_device(made, BF16, E4M3)
    hand = inputs.plan()
    check(inputs, DevicePlan(paired(hand, *tiles)))
    common_first = DevicePlan(paired(hand, *(abs(each) for each in tiles)))
    out = check(inputs, common_first)
    assert torch.equal(out, execute(inputs, DevicePlan(hand))[0])


@pytest.mark.parametrize("draft_tokens", [2, 4])
def test_draft_tokens(draft_tokens: int) -> None:
    made, tiles = several_an_sm((32, 16), 128, draft_tokens=draft_tokens)
    check_pairs(on_device(made, BF16), tiles)


def test_between_wide_and_other_items() -> None:
    """Pairs come after wide items; unpaired branches, heavy and light items after the pairs."""
    lengths = [500, 128, 900]
    pieces = pieces_of_pairs(lengths, (0, 200, 64), 8)
    made = branched(pieces, 8)
    parts: list[Piece | Branch] = [Branch(branch.pieces) for branch in made]
    first = 16 * len(lengths)
    for length, queries in ((700, 20), (333, 20), (400, 5), (90, 1), (1000, 3)):
        members = tuple(range(first, first + queries))
        pieces.append(Piece(members, 0, length))
        pieces += (rest := [Piece((query,), length, DYNAMIC) for query in members])
        parts += [pieces[-queries - 1], *rest]
        first += queries
    inputs = case(pieces, (64, 8), 128, tails=(0, 9, 70))
    inputs = on_device(replace(inputs, pieces=parts), BF16)
    hand = inputs.plan(wide=True)
    assert hand.header["num_wide_items"][0] > 0
    for own_first in (False, True):
        tiles = tiles_of(lengths[:2], [own_first])
        check(inputs, DevicePlan(paired(hand, *tiles)))


def test_launch_modes_agree_and_repeat() -> None:
    made, tiles = several_an_sm((32, 8), 128)
    inputs = on_device(made, BF16)
    hand = DevicePlan(paired(inputs.plan(), *(abs(each) for each in tiles)))
    check_launches(inputs, hand, target_of(inputs))


def test_without_a_snapshot_nothing_hangs() -> None:
    """Items have no tokens then: a half must not wait for what the other one does not load."""
    made, tiles = several_an_sm((32, 8), 128)
    inputs = on_device(made, BF16)
    hand = DevicePlan(paired(inputs.plan(), *tiles))
    workspace = Workspace(target_of(inputs), inputs.table.shape[1] + 64)
    workspace.load(hand)
    attend(inputs, hand, workspace=workspace)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tails", [(8,), (0, 1, 40, 90)])
@pytest.mark.parametrize(
    "pieces",
    [prefix(512, 600), pieces_of_pairs([700] * 16, (300, 40), 16)],
    ids=["a root", "many roots"],
)
def test_planned_pairs_while_tails_grow(pieces: list[Piece], tails: tuple[int, ...]) -> None:
    """One plan, at its own lengths and at the longest that it allows."""
    inputs = case(pieces, (32, 8), 128, tails=tails)
    made = plan(paths_of(pieces, len(inputs.rows)), inputs.seq_lens.tolist(), target_of(inputs))
    assert made.num_paired_items > 0
    check(on_device(inputs, BF16), made)
    check(on_device(grown(inputs, made.max_seq_lens.tolist()), BF16), made)
