# SPDX-License-Identifier: Apache-2.0
"""Masks of draft tokens that are a tree: 64 bits each, one for each draft token attended to."""

from __future__ import annotations

import torch

MOST_MASKED_DRAFTS = 64  # bits of a draft mask


def check_draft_masks(
    masks: torch.Tensor | None, device: torch.device, num_queries: int, draft_tokens: int
) -> None:
    """Check the ``draft_masks`` of ``ops.decode``, None or a mask for each draft token. Raises
    ValueError."""
    if masks is None:
        return
    if draft_tokens > MOST_MASKED_DRAFTS:
        raise ValueError(
            f"draft_masks for {draft_tokens} draft tokens a query: a mask holds up to "
            f"{MOST_MASKED_DRAFTS}"
        )
    shape = (num_queries, draft_tokens)
    if masks.dtype != torch.int64 or masks.shape != shape or not masks.is_contiguous():
        raise ValueError(
            f"draft_masks is {masks.dtype} {tuple(masks.shape)}, must be contiguous int64 {shape}"
        )
    if masks.device != device:
        raise ValueError(f"draft_masks is on {masks.device}, q on {device}: move one of them")
