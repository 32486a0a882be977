# SPDX-License-Identifier: Apache-2.0
"""Decode attention by its definition: what executors are compared with."""

from __future__ import annotations

import math

import torch

MOST_KEYS = 1 << 23  # elements of the keys that a chunk of rows gathers


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
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention, computed in ``dtype``; arguments as of ``sglang_pat.decode``, of any
    floating dtypes. With T ``draft_tokens`` q has T rows a query, and the last T tokens of a
    sequence are attended to by the rows from their own on, or by those of ``draft_masks``.

    Returns the output [B * T, Hq, Dv] and the log-sum-exp of the scores and the sink [B * T, Hq],
    base 2, both of ``dtype``; for a sequence of no tokens 0 and -inf, or its sink.
    """
    num_rows, num_q_heads, _ = q.shape
    num_kv_heads, head_dim = k_cache.shape[1:]
    group = num_q_heads // num_kv_heads
    out = q.new_zeros((num_rows, num_q_heads, v_cache.shape[2]), dtype=dtype)
    sink = torch.full((num_q_heads,), -math.inf, dtype=dtype, device=q.device)
    if sinks is not None:
        sink = sinks.to(sink)
    lse = (sink / math.log(2)).repeat(num_rows, 1)
    lens = seq_lens.to(q.device).long().repeat_interleave(draft_tokens)
    # A chunk is as wide as its longest row, so it takes rows of about the same length.
    todo = lens.argsort(descending=True)
    while len(todo) and (width := int(lens[todo[0]])):
        count = max(1, MOST_KEYS // (width * num_kv_heads * head_dim))
        some, todo = todo[:count], todo[count:]
        seen = attended(some, lens[some], width, draft_tokens, draft_masks)
        attends = seen.any(dim=1)
        some, seen = some[attends], seen[attends]
        slots = req_to_token[rows[some // draft_tokens], :width].long()
        hidden = ~seen[..., None, None]
        keys = (k_cache[slots].to(dtype) * k_scale).masked_fill(hidden, 0)
        values = (v_cache[slots].to(dtype) * v_scale).masked_fill(hidden, 0)
        grouped = q[some].to(dtype).view(len(some), num_kv_heads, group, head_dim)
        scores = torch.einsum("nhgd,nthd->nhgt", grouped, keys).flatten(1, 2) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        scores = torch.cat([scores, sink[None, :, None].expand(len(some), -1, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :-1]
        weights = weights.reshape(len(some), num_kv_heads, group, width)
        out[some] = torch.einsum("nhgt,nthd->nhgd", weights, values).flatten(1, 2)
        lse[some] = torch.logsumexp(scores, dim=-1) / math.log(2)
    return out, lse


def attended(
    rows: torch.Tensor,
    lens: torch.Tensor,
    width: int,
    draft_tokens: int,
    draft_masks: torch.Tensor | None,
) -> torch.Tensor:
    """Which of the first ``width`` tokens some rows of q attend to, bool [N, width]; ``lens``: of
    the sequences of these rows."""
    query, draft = rows // draft_tokens, rows % draft_tokens
    # 0 for the first draft token of a sequence, and negative before it
    drafted = torch.arange(width, device=rows.device) - (lens - draft_tokens)[:, None]
    if draft_masks is None:
        return drafted <= draft[:, None]
    bits = (draft_masks[query, draft] | 1)[:, None] >> drafted.clamp(0, 63) & 1
    return (drafted < 0) | (drafted < draft_tokens) & bits.bool()
