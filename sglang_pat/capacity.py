# SPDX-License-Identifier: Apache-2.0
"""How many requests the GPU's workspace is made for, and how many bytes it takes.

The workspace is paid from what SGLang leaves free beside weights and K/V pool, because backends
are built after the pool was sized (S model_runner.py:971 and 1105, ``S`` being SGLang 0.5.23's
``srt/``). There are two ways in which SGLang sizes the pool:

- before the graphs: it leaves ``total * (1 - mem_fraction_static)`` free
  (S mem_cache/kv_cache_configurator.py:3007), by default 512 MB for "constant meta data (e.g., from
  attention backend)", 1.5 MB a token of a prefill chunk, 2 MB a request of the largest decode
  graph, and 10 GB in all on a GPU of more than 60 GB (S arg_groups/memory_hook.py:309-315);
- after the graphs: it measures what is free by then, our workspace taken
  (S model_runner_components/kv_pool_runtime.py:60, arg_groups/memory_hook.py:291).

FlashInfer takes its workspace in the same place: 384 MB, 512 MB for Qwen2 and Qwen3
(S environ.py:1221, layers/attention/flashinfer_backend.py:431 and 457). The default budget, 256 MB,
is below that and below the 512 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from sglang_pat import _C
from sglang_pat.target import capacities

MB = 1 << 20
# A query's partials where not even the largest graph fits the budget: those of a path of three
# nodes and a tail. What is above them makes room for longer sequences to be split.
_FEWEST_PARTIALS = 4

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]


def buffer_shapes(
    *,
    num_q_heads: int,
    head_dim: int,
    max_context: int,
    partial_dtype: torch.dtype,
    max_queries: int,
    max_items: int,
    max_partials: int,
    max_segments: int,
    max_branch_tokens: int,
) -> Buffers:
    """Shape and dtype of each device tensor of a ``Workspace``, by name; the last five arguments
    are the fields of its ``Target``."""
    max_members = max_partials + max_queries
    plan_bytes = _C.plan_bytes(max_items, max_members, max_queries, max_segments)
    queue_ints = _C.cuda_queue_ints() if hasattr(_C, "cuda_queue_ints") else 0
    return {
        "plan": ((plan_bytes,), torch.uint8),
        "slots": ((max_queries, max_context), torch.int32),
        "branch_slots": ((max_branch_tokens,), torch.int32),
        "branch_rows": ((max_branch_tokens,), torch.int16),
        "partials": ((max_partials, num_q_heads, head_dim), partial_dtype),
        "partial_lse": ((max_partials, num_q_heads), torch.float32),
        "queue": ((queue_ints,), torch.int32),
    }


@dataclass(frozen=True)
class Capacity:
    """What a workspace is made for. ``parts``: bytes by buffer; ``budget`` in bytes.

    ``max_queries`` and ``max_partials`` are fields of the ``Target``. ``pool_requests``: requests
    that the server can run; batches of more than ``max_queries`` are not served by ``pat``.
    """

    max_queries: int
    max_partials: int
    max_context: int
    pool_requests: int
    budget: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return sum(self.parts.values())

    @property
    def over_budget(self) -> bool:
        """Whether even the largest graph needs more than the budget, and so got it."""
        return self.total > self.budget

    def __str__(self) -> str:
        text = (
            f"workspace: {megabytes(self.total):,} MB on the GPU, for batches of up to "
            f"{self.max_queries:,} requests of up to {self.max_context:,} tokens"
        )
        if self.max_queries < self.pool_requests:
            text += (
                f"; larger ones, of up to {self.pool_requests:,}, run on SGLang's attention "
                f"unless SGLANG_PAT_WORKSPACE_MB is raised"
            )
        return text

    def warning(self) -> str:
        """Why the budget was exceeded and what to do about it."""
        return (
            f"the workspace takes {megabytes(self.total):,} MB on the GPU, more than "
            f"SGLANG_PAT_WORKSPACE_MB={self.budget // MB}, because the largest decode graph, of "
            f"{self.max_queries:,} requests of up to {self.max_context:,} tokens, needs it: lower "
            f"--cuda-graph-max-bs-decode or --context-length, or raise SGLANG_PAT_WORKSPACE_MB"
        )


def megabytes(size: int) -> int:
    """Bytes in MB of 2**20, rounded up."""
    return -(-size // MB)


def fit_workspace(
    *,
    num_q_heads: int,
    head_dim: int,
    max_context: int,
    pool_requests: int,
    largest_graph: int,
    partial_dtype: torch.dtype,
    budget: int,
) -> Capacity:
    """Size a workspace: for the largest decode graph at least, and beyond that for as many
    requests as ``budget`` bytes hold, up to ``pool_requests``.

    If the largest graph does not fit, but does with fewer partials, at least four a query, it gets
    those, and a plan that would need more is made with fewer splits or packs (see ``Target``).
    Else the budget is exceeded, since a captured graph must always find room: see
    ``Capacity.over_budget``. ``max_context``: tokens of a row of ``req_to_token``.
    ``num_q_heads`` of one rank. ``largest_graph`` may be 0, and beyond ``pool_requests``.

    Raises ValueError unless the other numbers are 1 or more.
    """
    numbers = {
        "num_q_heads": num_q_heads,
        "head_dim": head_dim,
        "max_context": max_context,
        "pool_requests": pool_requests,
        "budget": budget,
    }
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}, must be 1 or more")

    def parts(room: dict[str, int], queries: int) -> dict[str, int]:
        shapes = buffer_shapes(
            num_q_heads=num_q_heads,
            head_dim=head_dim,
            max_context=max_context,
            partial_dtype=partial_dtype,
            max_queries=queries,
            **room,
        )
        return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}

    def total(queries: int) -> int:
        return sum(parts(capacities(queries), queries).values())

    # Every part grows by the same bytes with every query.
    fixed = total(0)
    fitting = (budget - fixed) // (total(1) - fixed)
    least = max(1, largest_graph)
    queries = max(least, min(fitting, pool_requests))
    room = capacities(queries)
    missing = total(queries) - budget
    if missing > 0:
        of_a_partial = num_q_heads * (head_dim * partial_dtype.itemsize + 4) + _member_bytes()
        partials = room["max_partials"] - -(-missing // of_a_partial)
        if partials >= capacities(0)["max_partials"] + _FEWEST_PARTIALS * queries:
            room["max_partials"] = partials
    return Capacity(
        max_queries=queries,
        max_partials=room["max_partials"],
        max_context=max_context,
        pool_requests=max(pool_requests, largest_graph),
        budget=budget,
        parts=parts(room, queries),
    )


def _member_bytes() -> int:
    """What one more member takes in a plan."""
    return _C.plan_bytes(0, 1, 0, 0) - _C.plan_bytes(0, 0, 0, 0)
