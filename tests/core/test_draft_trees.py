# SPDX-License-Identifier: Apache-2.0
"""Draft tokens that are a tree: the CPU executor against attention by its definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from kit import drafts
from kit.cases import by_hand, execute, random_trees
from kit.cpu import check_any
from kit.pieces import DYNAMIC, Piece, forest

from sglang_pat.draft_masks import masks_of
from sglang_pat.ops import decode
from sglang_pat.planner import plan
from sglang_pat.target import Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")


drafted = partial(drafts.drafted, before=drafts.AROUND_BLOCKS)


@pytest.mark.parametrize("draft_tokens", [2, 3, 8, 60, 64])
@pytest.mark.parametrize("heads", [(8, 2), (5, 1), (2, 2)])
def test_random_trees(draft_tokens: int, heads: tuple[int, int]) -> None:
    for seed in range(3):
        pieces = forest(np.random.default_rng(seed), 7)
        inputs = random_trees(drafted(pieces, heads, draft_tokens, seed=seed), seed)
        check_any(inputs, inputs.plan())


def test_branches() -> None:
    pieces = forest(np.random.default_rng(3), 8)
    inputs = by_hand(pieces, (8, 2), most=3, tails=(5, 6, 75), draft_tokens=5)
    check_any(random_trees(inputs), inputs.plan())


def test_masks_of_a_chain_change_nothing() -> None:
    inputs = drafted(forest(np.random.default_rng(1), 9), (8, 2), 6)
    chain = torch.tensor([[(2 << i) - 1 for i in range(6)]] * len(inputs.rows))
    for one, other in zip(
        execute(inputs), execute(replace(inputs, draft_masks=chain)), strict=True
    ):
        assert torch.equal(one, other)


def test_siblings_do_not_see_each_other() -> None:
    """Other K and V of a draft token change the rows that attend to it, no bit of the others."""
    inputs = random_trees(drafted([Piece((0,), 0, DYNAMIC)], (4, 1), 8), seed=5)
    assert inputs.draft_masks is not None
    before, _ = execute(inputs)
    first = int(inputs.seq_lens[0]) - 8
    for draft_token in range(1, 8):
        slot = int(inputs.table[inputs.rows[0], first + draft_token])
        k, v = inputs.k.clone(), inputs.v.clone()
        k[slot] += 1
        v[slot] += 1
        out, _ = execute(replace(inputs, k=k, v=v))
        for row in range(8):
            sees = bool(inputs.draft_masks[0, row] >> draft_token & 1)
            assert torch.equal(out[row], before[row]) != sees


@pytest.mark.parametrize("draft_tokens", [1, 3, 33, 64])
def test_masks_of_cells(draft_tokens: int) -> None:
    """With and without those before the drafts, and where there are more cells than needed."""
    masks = torch.randint(-(2**63), 2**63 - 1, (5, draft_tokens))
    if draft_tokens < 64:
        masks &= (1 << draft_tokens) - 1
    lens = torch.tensor([5, 0, 130, 1, 64])
    alone, whole = drafts.custom_mask(masks), drafts.custom_mask(masks, lens)
    assert torch.equal(masks_of(alone, lens, draft_tokens, with_prefix=False), masks)
    for given in (whole, whole * torch.tensor(255).byte(), torch.cat([whole, whole[:9]])):
        found = masks_of(given, lens.int(), draft_tokens, with_prefix=True)
        assert torch.equal(found, masks)


def test_rows_of_padding_have_no_cells() -> None:
    """SGLang's masks end with the last request, its lengths with a one for each row of padding. An
    idle rank's have no cells at all."""
    lens = torch.tensor([4, 1, 1])
    given = drafts.custom_mask(torch.tensor([[1, 2, 4]]), lens[:1])
    masks = masks_of(given, lens, 3, with_prefix=True)
    assert masks.tolist() == [[1, 2, 4], [0, 0, 0], [0, 0, 0]]
    for with_prefix in (False, True):
        assert not masks_of(given[:0], lens, 3, with_prefix=with_prefix).any()


def test_cells_that_are_refused() -> None:
    cells, lens = torch.ones(18, dtype=torch.bool), torch.tensor([5, 2])
    for given, of, why in (
        (cells[1:], lens, "2 requests' 3 draft tokens has 17 cells, must have 18"),
        (cells[::2], lens, "custom_mask is torch.bool .9,. with strides .2,., must be flat"),
        (cells.view(2, 9), lens, "custom_mask is torch.bool .2, 9. with"),
        (cells.long(), lens, "torch.int64 .* must be flat, contiguous and torch.bool or torch.ui"),
        (cells, lens.float(), "seq_lens is torch.float32"),
        (cells, lens.to("meta"), "custom_mask is on cpu, seq_lens on meta"),
    ):
        with pytest.raises(ValueError, match=why):
            masks_of(given, of, 3, with_prefix=False)


def test_decode_takes_masks() -> None:
    inputs = random_trees(drafted([Piece((i,), 0, DYNAMIC) for i in range(3)], (8, 2), 4), seed=2)
    assert inputs.draft_masks is not None
    made_for = Target.cpu(
        num_q_heads=8, num_kv_heads=2, head_dim=64, threads=2, max_queries=8, draft_tokens=4
    )
    lens = inputs.seq_lens.tolist()
    given = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    made = plan([None] * 3, lens, made_for)
    out = decode(*given, made, scale=inputs.scale, draft_masks=inputs.draft_masks)
    torch.testing.assert_close(out, inputs.truth()[0].float(), rtol=1e-4, atol=1e-5)
    for masks, message in (
        (inputs.draft_masks[:2], r"must be contiguous int64 \(3, 4\)"),
        (inputs.draft_masks.int(), r"draft_masks is torch.int32 \(3, 4\), must be"),
        (inputs.draft_masks.T, "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(*given, made, scale=inputs.scale, draft_masks=masks)
