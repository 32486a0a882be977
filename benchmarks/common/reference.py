# SPDX-License-Identifier: Apache-2.0
"""Decode attention by its definition, one row at a time: what executors are compared with."""

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
    group = num_q_heads // k_cache.shape[1]
    out = q.new_zeros((num_rows, num_q_heads, v_cache.shape[2]), dtype=dtype)
    sink = torch.full((num_q_heads, 1), -math.inf, dtype=dtype, device=q.device)
    if sinks is not None:
        sink = sinks.to(sink)[:, None]
    lse = (sink.mT / math.log(2)).repeat(num_rows, 1)
    of_rows, lens = rows.tolist(), seq_lens.tolist()
    for i in range(num_rows):
        query, draft = divmod(i, draft_tokens)
        first = lens[query] - draft_tokens  # position of the first draft token
        attended = list(range(max(0, first + 1 + draft)))
        if draft_masks is not None and lens[query]:
            mask = int(draft_masks[query, draft]) | 1
            attended = [t for t in range(lens[query]) if t < first or mask >> (t - first) & 1]
        if not attended:
            continue
        slots = req_to_token[of_rows[query], attended].long()
        keys = (k_cache[slots].to(dtype) * k_scale).repeat_interleave(group, dim=1)
        values = (v_cache[slots].to(dtype) * v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[i].to(dtype), keys) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[:, :-1]
        out[i] = torch.einsum("ht,thd->hd", weights, values)
        lse[i] = torch.logsumexp(scores, dim=-1) / math.log(2)
    return out, lse
