# SPDX-License-Identifier: Apache-2.0
"""SGLang's masks of draft trees, as ``ops.decode`` takes them. ``S``: SGLang 0.5.23's ``srt/``."""

from __future__ import annotations

from typing import Any

import torch


def draft_masks(
    custom_mask: torch.Tensor, seq_lens: torch.Tensor, draft_tokens: int, *, with_prefix: bool
) -> torch.Tensor:
    """int64 [B, T]: bit j of [i, t] says that draft token t of request i attends to its draft
    token j. Does not wait for the device.

    Args:
        custom_mask: bool or uint8, flat: one request after the other, a row for each of its draft
            tokens, which has a cell for each of these. It may be longer.
        seq_lens: int [B] on the same device, without the draft tokens. Rows of padding come last;
            their masks mean nothing.
        with_prefix: a row begins with a cell for each token before the drafts (S
            speculative/eagle_utils.py, TreeMaskMode.FULL_MASK).

    Raises ValueError for a mask without prefix that is too small. One with a prefix is not checked:
    the lengths are on the device. Of a mask without cells, as an idle rank has, all bits are 0.
    """
    if custom_mask.numel() == 0:
        return torch.zeros(
            (len(seq_lens), draft_tokens), dtype=torch.int64, device=custom_mask.device
        )
    least = len(seq_lens) * draft_tokens**2
    if not with_prefix and custom_mask.numel() < least:
        raise ValueError(
            f"the mask of {len(seq_lens)} requests' {draft_tokens} draft tokens has "
            f"{custom_mask.numel()} cells, must have {least}"
        )
    drafts = torch.arange(draft_tokens, device=custom_mask.device)
    prefix = seq_lens.long() if with_prefix else torch.zeros_like(seq_lens, dtype=torch.int64)
    widths = prefix + draft_tokens
    first = (torch.cumsum(widths, 0) - widths) * draft_tokens + prefix
    cells = (first[:, None] + drafts * widths[:, None])[:, :, None] + drafts
    cells.clamp_(max=custom_mask.numel() - 1)  # SGLang has no cells for padding
    return (custom_mask[cells].long() << drafts).sum(-1)


def have_prefix(spec_info: Any, verify_mask: Any) -> bool:
    """Whether the masks of a verify step are ``with_prefix``.

    ``verify_mask``: the buffer of SGLang's backend, into which EAGLE's workers write their masks (S
    speculative/eagle_worker_common.py:411); None without one. NGRAM's have a tensor of their own,
    by the rule of EAGLE's without a buffer (S speculative/ngram_worker.py:350).
    """
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
    from sglang.srt.speculative.spec_info import SpecInputType

    own = verify_mask is None or spec_info.spec_input_type == SpecInputType.NGRAM_VERIFY
    mode = default_tree_mask_mode() if own else verify_mask.mode
    full: bool = mode == TreeMaskMode.FULL_MASK
    return full
