# SPDX-License-Identifier: Apache-2.0
"""How many requests the GPU's workspace is made for, and how many bytes it takes.

The workspace is paid from what SGLang leaves free beside weights and K/V pool: by default 512 MB
for "constant meta data (e.g., from attention backend)" and more (SGLang 0.5.23's
``srt/arg_groups/memory_hook.py:309``). FlashInfer takes 384 or 512 MB there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

import torch

from sglang_pat import _C
from sglang_pat.target import capacities

MB = 1 << 20
# Partials of a workspace, at least, each of one draft token: to split a few long sequences.
_FEWEST_PARTIALS = 2048
# Partials of a query in a batch of many, which need not be split: of three nodes and a tail.
_PARTIALS_OF_A_PATH = 4
# The list at start, at most: 32 MB. It grows when a plan needs more.
_MOST_LIST_TOKENS = 8 * MB

# Fields of a ``Target`` that say how much its workspace holds.
ROOM = ("max_queries", "max_items", "max_partials", "max_segments", "max_branch_tokens")

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]


def buffer_shapes(
    num_rows: int,
    v_head_dim: int,
    list_tokens: int,
    partial_dtype: torch.dtype,
    room: Mapping[str, int],
) -> Buffers:
    """Shape and dtype of each device tensor of a ``Workspace``, by name. ``num_rows``: rows of
    partial results of a query, query heads x draft tokens; ``room``: the target's ``ROOM``."""
    queries, partials = room["max_queries"], room["max_partials"]
    # Every item that is no branch has one segment.
    items, segments = room["max_items"], room["max_segments"] + room["max_items"]
    plan_bytes = _C.plan_bytes(items, partials + queries, queries, segments)
    return {
        "plan": ((plan_bytes,), torch.uint8),
        "list": ((list_tokens,), torch.int32),
        "row_masks": ((room["max_branch_tokens"],), torch.int16),
        "partials": ((partials, num_rows, v_head_dim), partial_dtype),
        "partial_lse": ((partials, num_rows), torch.float32),
        "queue": ((_C.CUDA_QUEUE_INTS,), torch.int32),
        "first_units": ((_C.CUDA_FIRST_UNIT_BYTES,), torch.uint8),
    }


@dataclass(frozen=True)
class Capacity:
    """What a workspace is made for: fields of the ``Target``, an argument of the ``Workspace``."""

    max_queries: int
    max_partials: int
    list_tokens: int
    budget: int  # bytes
    parts: dict[str, int]  # bytes by buffer

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return sum(self.parts.values())

    @property
    def over_budget(self) -> bool:
        """Whether the least that every server needs is more than the budget; it was taken."""
        return self.total > self.budget

    @property
    def packed_queries(self) -> int:
        """Queries of a batch whose partials find room however deep their prefixes branch (three
        nodes and a tail). Larger batches are packed as far as the partials go."""
        return min(self.max_queries, self.max_partials // _PARTIALS_OF_A_PATH)

    def __str__(self) -> str:
        less = (
            f"; beyond {self.packed_queries:,} requests some may share less than they could "
            "unless SGLANG_PAT_WORKSPACE_MB is raised"
        )
        return (
            f"workspace: {ceil(self.total / MB):,} MB on the GPU, for batches of up to "
            f"{self.max_queries:,} requests{less if self.packed_queries < self.max_queries else ''}"
        )

    def warning(self) -> str:
        """Why the budget was exceeded and what to do about it."""
        return (
            f"the workspace takes {ceil(self.total / MB):,} MB on the GPU, more than "
            f"SGLANG_PAT_WORKSPACE_MB={self.budget // MB}, because that is the least for batches "
            f"of up to {self.max_queries:,} requests: lower --max-running-requests, or raise "
            f"SGLANG_PAT_WORKSPACE_MB"
        )


def list_tokens_for(pool_tokens: int, max_queries: int) -> int:
    """Tokens of the list that the plans of a K/V pool of ``pool_tokens`` need as a rule.

    A plan lists each token of the batch once, and tails with the room that they may grow into, a
    quarter or 128 tokens (csrc/pack/target.h). It lists more, and the list then grows, where
    children take over their parent's tokens, and where sharing is not known.
    """
    return max(1, min(_MOST_LIST_TOKENS, pool_tokens * 5 // 4 + 128 * max_queries))


def fit_workspace(
    *,
    num_q_heads: int,
    head_dim: int,
    pool_requests: int,
    pool_tokens: int,
    largest_graph: int,
    budget: int,
    draft_tokens: int = 1,
) -> Capacity:
    """Size a workspace for every batch that a server runs, within ``budget`` bytes if that can be.

    What the budget leaves beside plan, list and row masks is for partials: at most those that
    ordinary batches need (``capacities``), at least 2048 / ``draft_tokens``. ``pool_requests``,
    ``pool_tokens``: that the server's pools hold. ``num_q_heads`` of one rank, ``head_dim`` of V.
    ``largest_graph``: queries, padding included; may be 0, and beyond ``pool_requests``.
    """
    queries = max(pool_requests, largest_graph)
    list_tokens = list_tokens_for(pool_tokens, queries)
    room = {"max_queries": queries} | capacities(queries)

    def parts(max_partials: int) -> dict[str, int]:
        rows, of_partials = draft_tokens * num_q_heads, room | {"max_partials": max_partials}
        shapes = buffer_shapes(rows, head_dim, list_tokens, torch.float32, of_partials)
        return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}

    fixed = sum(parts(0).values())
    fitting = (budget - fixed) // (sum(parts(1).values()) - fixed)
    partials = min(room["max_partials"], max(_FEWEST_PARTIALS // draft_tokens, fitting))
    return Capacity(queries, partials, list_tokens, budget, parts(partials))
