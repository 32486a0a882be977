# SPDX-License-Identifier: Apache-2.0
"""The masks of drafts that are a tree, from the cells that SGLang gives."""

from __future__ import annotations

import pytest
import torch
from kit.drafts import custom_mask

from sglang_pat.draft_masks import masks_of


@pytest.mark.parametrize("draft_tokens", [1, 3, 33, 64])
def test_masks_of_cells(draft_tokens: int) -> None:
    """With and without those before the drafts, and where there are more cells than needed."""
    masks = torch.randint(-(2**63), 2**63 - 1, (5, draft_tokens))
    if draft_tokens < 64:
        masks &= (1 << draft_tokens) - 1
    lens = torch.tensor([5, 0, 130, 1, 64])
    alone, whole = custom_mask(masks), custom_mask(masks, lens)
    assert torch.equal(masks_of(alone, lens, draft_tokens, with_prefix=False), masks)
    for given in (whole, whole * torch.tensor(255).byte(), torch.cat([whole, whole[:9]])):
        found = masks_of(given, lens.int(), draft_tokens, with_prefix=True)
        assert torch.equal(found, masks)


def test_rows_of_padding_have_no_cells() -> None:
    """SGLang's masks end with the last request, its lengths with a one for each row of padding. An
    idle rank's have no cells at all."""
    lens = torch.tensor([4, 1, 1])
    given = custom_mask(torch.tensor([[1, 2, 4]]), lens[:1])
    masks = masks_of(given, lens, 3, with_prefix=True)
    assert masks.tolist() == [[1, 2, 4], [0, 0, 0], [0, 0, 0]]
    assert not masks_of(given[:0], lens, 3, with_prefix=False).any()


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
