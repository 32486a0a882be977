# SPDX-License-Identifier: Apache-2.0
"""Decode attention by its definition, one query at a time: what the executors are compared with."""

from __future__ import annotations

import math

import torch


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    draft_tokens: int = 1,
    draft_masks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention of each query to all tokens of its sequence, computed in ``dtype``; with T
    ``draft_tokens`` a query, of each of its last T tokens to those up to itself, or of those that
    ``draft_masks`` (int64 [B, T]) has.

    Args:
        q: [B * T, Hq, D], the draft tokens of a query side by side; k_cache: [slots, Hkv, D];
            v_cache: [slots, Hkv, Dv]; Hkv divides Hq. Of any floating dtypes.
        req_to_token: int [R, max_context], slot of each token of each row.
        rows: int [B], the row of ``req_to_token`` that query i reads.
        seq_lens: int [B], tokens of query i, the draft tokens included.
        scale: factor on q.k; ``logit_cap`` c > 0 turns a score s into c * tanh(s / c).
        k_scale, v_scale: factors of what the caches hold.

    Returns the output [B * T, Hq, Dv] and the log-sum-exp of the scores [B * T, Hq], base 2, both
    of ``dtype``; 0 and -inf for a sequence of no tokens.
    """
    num_rows, num_q_heads, _ = q.shape
    group = num_q_heads // k_cache.shape[1]
    out = q.new_zeros((num_rows, num_q_heads, v_cache.shape[2]), dtype=dtype)
    lse = q.new_full((num_rows, num_q_heads), -math.inf, dtype=dtype)
    tokens = [  # of each row of q, and their row of req_to_token
        (row, _attended(length, draft_tokens, i, masks))
        for row, length, masks in zip(
            rows.tolist(),
            seq_lens.tolist(),
            [None] * len(rows) if draft_masks is None else draft_masks.tolist(),
            strict=True,
        )
        for i in range(draft_tokens)
    ]
    for i, (row, attended) in enumerate(tokens):
        if not attended:
            continue
        slots = req_to_token[row, attended].long()
        keys = (k_cache[slots].to(dtype) * k_scale).repeat_interleave(group, dim=1)
        values = (v_cache[slots].to(dtype) * v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[i].to(dtype), keys) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        out[i] = torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), values)
        lse[i] = torch.logsumexp(scores, dim=-1) / math.log(2)
    return out, lse


def _attended(length: int, draft_tokens: int, i: int, masks: list[int] | None) -> list[int]:
    """Positions of a sequence that draft token ``i`` of its last ``draft_tokens`` attends to."""
    first = length - draft_tokens
    if masks is None or length == 0:
        return list(range(max(0, first + 1 + i)))
    drafts = [first + j for j in range(draft_tokens) if j == 0 or masks[i] >> j & 1]
    return [*range(first), *drafts]
