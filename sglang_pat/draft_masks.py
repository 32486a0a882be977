# SPDX-License-Identifier: Apache-2.0
"""Masks of draft tokens that are a tree: 64 bits each, one for each draft token attended to."""

from __future__ import annotations

import torch

MOST_MASKED_DRAFTS = 64  # bits of a draft mask


def masks_of(
    custom_mask: torch.Tensor, seq_lens: torch.Tensor, draft_tokens: int, *, with_prefix: bool
) -> torch.Tensor:
    """int64 [B, T]: bit j of [i, t] says that draft token t of request i attends to its draft
    token j. Bits of cells that ``custom_mask`` lacks are 0. On any device, without waiting for it;
    ``Workspace.read_draft_masks`` does it in one kernel.

    Args:
        custom_mask: bool or uint8, flat: one request after the other, a row for each of its draft
            tokens, which has a cell for each of these. It may be longer.
        seq_lens: int32 or int64 [B] on the same device, without the draft tokens. Rows of padding
            come last; their masks mean nothing.
        with_prefix: a row begins with a cell for each token before the drafts.

    Raises ValueError as ``check_custom_mask`` does.
    """
    check_custom_mask(custom_mask, seq_lens, draft_tokens, with_prefix=with_prefix)
    drafts = torch.arange(draft_tokens, device=custom_mask.device)
    prefix = seq_lens.long() if with_prefix else torch.zeros_like(seq_lens, dtype=torch.int64)
    widths = prefix + draft_tokens
    first = (torch.cumsum(widths, 0) - widths) * draft_tokens + prefix
    cells = (first[:, None] + drafts * widths[:, None])[:, :, None] + drafts
    padded = torch.cat([custom_mask, custom_mask.new_zeros(1)])
    attends = padded[cells.clamp(max=len(custom_mask))] != 0
    return (attends.long() << drafts).sum(-1)


def check_custom_mask(
    custom_mask: torch.Tensor, seq_lens: torch.Tensor, draft_tokens: int, *, with_prefix: bool
) -> None:
    """Check the arguments of ``masks_of``: a mask without prefix may have no cells at all, as an
    idle rank's; one with a prefix may be too small unnoticed, as the lengths are on the device."""
    for name, tensor, dtypes in (
        ("custom_mask", custom_mask, (torch.bool, torch.uint8)),
        ("seq_lens", seq_lens, (torch.int32, torch.int64)),
    ):
        if tensor.dim() != 1 or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, "
                f"must be flat, contiguous and {' or '.join(map(str, dtypes))}"
            )
    if custom_mask.device != seq_lens.device:
        raise ValueError(
            f"custom_mask is on {custom_mask.device}, seq_lens on {seq_lens.device}: move one"
        )
    least = len(seq_lens) * draft_tokens**2
    if not with_prefix and 0 < len(custom_mask) < least:
        raise ValueError(
            f"the mask of {len(seq_lens)} requests' {draft_tokens} draft tokens has "
            f"{len(custom_mask)} cells, must have {least}"
        )


def check_draft_masks(
    masks: torch.Tensor | None, device: torch.device, num_queries: int, draft_tokens: int
) -> None:
    """Check the ``draft_masks`` of ``ops.decode``."""
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
        raise ValueError(f"draft_masks is on {masks.device}, must be on {device}")
