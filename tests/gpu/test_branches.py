# SPDX-License-Identifier: Apache-2.0
"""Branches, queries of one item that see different tokens, and paired ones: the halves of an SM run
one each and load their common tiles for both. What all items have in common is in
test_attention.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit.cases import case
from kit.device import BF16, attend, check, execute, on_device, same, target_of
from kit.kinds import PAIRED, TAILS, halves, items_of, shared_first
from kit.pieces import DYNAMIC, Branch, Piece, shared
from kit.plans import paired

from sglang_pat.workspace import Workspace


@pytest.mark.parametrize("tails_first", [False, True])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 700])
def test_lengths(length: int, tails_first: bool) -> None:
    """Of the part that all see, which needs no mask, and of tails that begin inside a tile."""
    for tails in (*((n,) for n in TAILS), TAILS):
        for num_queries in (1, 2, 16):
            pieces = shared(num_queries, length)
            inputs = case(pieces, (8, 2), 128, tails=tails, seed=length)
            check(on_device(replace(inputs, pieces=[Branch(tuple(pieces), tails_first)]), BF16))


@pytest.mark.parametrize("tails_first", [False, True])
def test_deep_trees(tails_first: bool) -> None:
    """Chains of nodes for ever fewer queries, so that masks begin anywhere."""
    pieces, start = [], 0
    for first in range(16):
        length = 5 + 13 * (first % 7)
        pieces.append(Piece(tuple(range(first, 16)), start, length))
        pieces.append(Piece((first,), start + length, DYNAMIC))
        start += length
    inputs = case(pieces, (4, 1), 128, tails=TAILS)
    check(on_device(replace(inputs, pieces=[Branch(tuple(pieces), tails_first)]), BF16))


@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("tails", [(0,), (1,), (0, 0, 0, 0, 70), (33, 64, 0, 65, 200)])
@pytest.mark.parametrize("common", [64, 65, 128, 192, 256, 300, 321, 512, 577, 2100])
def test_lengths_of_pairs(common: int, tails: tuple[int, ...], own_first: bool) -> None:
    """Halves of few and many tiles of their own, and of none. The same bits as computed without
    pairs, where no half begins with its own tokens."""
    for own in ((0,), (1, 300), (63, 0), (128, 64), (500, 129)):
        pieces = halves([common], own, 5)
        inputs = case(pieces, (8, 2), 128, tails=tails, seed=common)
        inputs = on_device(replace(inputs, pieces=shared_first(pieces, 5)), BF16)
        hand, tiles = inputs.plan(), common // 64
        out = check(inputs, paired(hand, -tiles if own_first else tiles))
        assert own_first or torch.equal(out, execute(inputs, hand)[0])


@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_pairs_compute_what_their_branches_do_alone(head_dim: int, draft_tokens: int) -> None:
    """Bit by bit where no half begins with its own tokens: a norm over all rows would not see that
    one is wrong."""
    options = {"draft_tokens": draft_tokens, "tails": (8, 9, 40, 65)}
    inputs, hand = items_of("many_pairs", (32, 16), head_dim, **options)
    inputs = on_device(inputs, BF16)
    together = paired(hand, *map(abs, PAIRED["many_pairs"]))
    alone = execute(inputs, inputs.plan())
    assert same(execute(inputs, together), alone)


def test_without_a_snapshot_nothing_hangs() -> None:
    """Items have no tokens then: a half must not wait for what the other one does not load."""
    inputs, hand = items_of("many_pairs", (32, 8))
    inputs = on_device(inputs, BF16)
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    workspace.load(hand)
    attend(inputs, hand, workspace=workspace)
    torch.cuda.synchronize()


@pytest.mark.parametrize("heads", [(8, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["tails first", "tails last", "paired"])
def test_a_query_depends_on_no_other(kind: str, heads: tuple[int, int]) -> None:
    """Great logits and values of one query's own tokens change no bit of the others."""
    if kind == "paired":
        parts = shared_first(pieces := halves([900], (0,), 8), 8)
    else:
        parts = [Branch(tuple(pieces := shared(16, 900)), kind == "tails first")]
    inputs = on_device(replace(case(pieces, heads, 128, tails=(100,)), pieces=parts), BF16)
    hand = inputs.plan()
    made = paired(hand, 14) if kind == "paired" else hand
    out, lse = execute(inputs, made)
    k, v = inputs.k.clone(), inputs.v.clone()
    own = inputs.table[inputs.rows[3], 900:1000].long()
    k[own] *= 100
    v[own] = 1e4
    other, other_lse = execute(replace(inputs, k=k, v=v), made)
    rest = torch.arange(16) != 3
    assert same((out[rest], lse[rest]), (other[rest], other_lse[rest]))
    assert not torch.equal(out[3], other[3])
