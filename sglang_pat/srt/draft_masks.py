# SPDX-License-Identifier: Apache-2.0
"""SGLang's masks of draft trees, as ``ops.decode`` takes them. ``S``: SGLang 0.5.23's ``srt/``."""

from __future__ import annotations

import torch


def draft_masks(
    custom_mask: torch.Tensor, seq_lens: torch.Tensor, draft_tokens: int
) -> torch.Tensor:
    """int64 [B, T]: bit j of [i, t] says that draft token t of request i attends to its draft
    token j.

    Args:
        custom_mask: bool, flat, row by row of each request's draft tokens: what they attend to of
            the draft tokens, or of all tokens (S speculative/eagle_utils.py, TreeMaskMode).
        seq_lens: int [B] without the draft tokens, 1 or more, of a batch that is not padded.

    Raises ValueError for a mask of another size.
    """
    drafts = torch.arange(draft_tokens, device=custom_mask.device)
    prefix = seq_lens.long()
    if custom_mask.numel() == len(seq_lens) * draft_tokens**2:
        prefix = torch.zeros_like(prefix)
    widths = prefix + draft_tokens
    cells = int((widths * draft_tokens).sum())
    if custom_mask.numel() != cells:
        raise ValueError(
            f"the mask of {len(seq_lens)} requests' {draft_tokens} draft tokens has "
            f"{custom_mask.numel()} cells, must be {cells}"
        )
    first = torch.cumsum(widths * draft_tokens, 0) - widths * draft_tokens
    rows = first[:, None] + drafts * widths[:, None] + prefix[:, None]
    return (custom_mask[rows[:, :, None] + drafts].long() << drafts).sum(-1)
