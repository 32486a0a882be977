# SPDX-License-Identifier: Apache-2.0
"""How full the tiles of a plan are: PackInfer's equation 1 (section 3.1) for a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_pat import _C
from sglang_pat.planner import Plan


def utilisation(plan: Plan, seq_lens: Sequence[int]) -> float:
    """Pairs of a packed row and a token that attention needs, over those that the items' tiles have
    room for, in (0, 1]; 1 for a plan without tokens. ``seq_lens`` [B]: tokens of each query in that
    step, which may be more than the plan was made for.

    The paper counts L_i ** 2 for a request of L_i tokens, as of a prefill, over tiles of T x T. A
    decode step has a GQA group of packed rows a query instead of L_i rows, and a tile is a row tile
    of the plan by the kernels' 64 tokens.
    """
    group = plan.num_q_heads // plan.num_kv_heads * plan.draft_tokens
    lengths = np.asarray(seq_lens, dtype=np.int64)
    segments, parts = plan.segments, plan.item_segments
    ends = np.where(
        segments["kv_len"] < 0,  # a tail: it ends where its query does
        lengths[segments["query"]],
        segments["kv_start"].astype(np.int64) + segments["kv_len"],
    )
    before = np.concatenate([[0], np.cumsum(ends - segments["kv_start"])])
    first = parts["first_segment"]
    tokens = before[first + parts["num_segments"]] - before[first]
    tiles = -(-tokens // _C.CUDA_TILE_TOKENS)
    capacity = int((plan.items["row_tile"] * tiles * _C.CUDA_TILE_TOKENS).sum())
    return float(lengths.sum() * group / capacity) if capacity else 1.0
