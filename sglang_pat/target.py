# SPDX-License-Identifier: Apache-2.0
"""What a plan is made for: a machine, a model's heads and the rules to apply."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from sglang_pat import _C, gpus

# Values of the options, the default first.
POLICIES = tuple(_C.Policy.__members__)
SPLITS = tuple(_C.Split.__members__)
BRANCHINGS = tuple(_C.Branching.__members__)
# Tokens of a piece in PagedAttention V2.
DEFAULT_SPLIT_TOKENS = 512
# The CPU executor's head dims are multiples of the one up to the other.
HEAD_DIM_STEP, MAX_HEAD_DIM = _C.CPU_HEAD_DIM_STEP, _C.CPU_MAX_HEAD_DIM
LARGEST = 2**31 - 1  # what the extension's integers hold
# Row tiles of the CUDA kernels in packed rows. The last is of wide items, which both halves of an
# SM share; beyond head dim 128 an SM has one half.
_ROW_TILES = (_C.HEAVY_ROWS, _C.WIDE_ROWS, 2 * _C.WIDE_ROWS)


@dataclass(frozen=True)
class Target:
    """Input of the scheduler beside paths and lengths. Hashable; needs no such machine at hand.

    ``num_sms`` are the SMs, or of a CPU the threads, that run items. ``row_tiles`` (packed rows,
    queries x GQA group x draft tokens) and ``kv_tiles`` (tokens) ascend. An SM runs
    ``items_per_sm`` items side by side, or one wide one, and reads K/V ``sm_speedup`` times as fast
    as by its share of ``bytes_per_s`` if it has the memory to itself. ``merge_round_s``: seconds of
    the splits of a query that the merge joins at once (csrc/merge_rule.h). ``reread_weight`` in (0,
    1] is what reading hot K/V again costs relative to the first read. ``reread_factor``,
    ``wide_factor``, ``merge_factor`` and ``branch_overhead_s`` are fitted: what the model of a
    plan's time charges for a token read again, for the arithmetic of a wide item's token (both
    relative to a first read), for a partial's bytes (relative to their time in memory) and for a
    branch (seconds on its SM). The ``max_*`` are the executor's buffers: a plan that would exceed
    them is made with fewer splits, then without branches, then without any split, then without
    packs, and says so in ``Plan.degraded``, except of branches, and of splits that were not worth
    much.

    ``draft_tokens``: tokens of a query that attend in one step, 1 in a decode step; more where
    speculative decoding verifies draft tokens. A query then has a GQA group of packed
    rows for each, and lengths of sequences count them.

    ``policy``: ``bytes`` compares the exact bytes of both schemes of PAT section 5.1, ``paper``
    applies equations 1 and 2 of that section, ``naive`` packs every node, ``root`` the first node
    of each path alone (RelayAttention), ``queries`` none (PagedAttention), ``padding`` compares
    what tiles that are not full compute in vain (FastTree). ``split``: ``cost`` minimises the
    modelled makespan, ``mean`` is the rule of PAT section 6: no piece longer than the mean.
    ``fixed`` cuts pieces of ``split_tokens`` tokens (PagedAttention V2), ``chunks`` does so where
    several queries read and leaves the rest whole (ChunkAttention), ``phases`` cuts pieces of an
    eighth of that where these make few items (FastTree), ``none`` cuts nothing. Of one pack there
    are at most 512 pieces. ``branching``: whether a part of the pack tree may become one item, a
    branch, in which queries do not see each other's tokens: ``cost`` where the modelled time is
    shorter, ``always`` or ``never``; ``groups`` makes branches of any queries, of about
    ``split_tokens`` tokens each (PackInfer, section 3.1). With the default policy, split and
    branching (``bytes``, ``cost``, ``cost``) other plans are weighed as well, and taken if they are
    modelled to be clearly faster: each query of a small batch by itself; groups of any queries;
    branches of short nodes and tails beside longer items; packs in equal pieces. ``branch_rows``
    (packed rows of a branch) and ``branch_limits`` (tokens of a node or tail beyond which it stays
    an item of its own) are what it chooses from.

    Raises ValueError for a field that makes no sense.
    """

    num_sms: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_s: float
    flops_per_s: float
    item_overhead_s: float
    sm_speedup: float
    merge_round_s: float
    items_per_sm: int
    reread_weight: float
    reread_factor: float
    wide_factor: float
    merge_factor: float
    branch_overhead_s: float
    row_tiles: tuple[int, ...]
    kv_tiles: tuple[int, ...]
    max_queries: int
    max_items: int
    max_partials: int
    max_segments: int
    max_branch_tokens: int
    draft_tokens: int = 1
    kv_bytes: int = 2
    partial_bytes: int = 4
    policy: str = "bytes"
    split: str = "cost"
    split_tokens: int = DEFAULT_SPLIT_TOKENS
    branching: str = "never"
    branch_rows: tuple[int, ...] = (_C.BRANCH_ROWS, _C.BRANCH_ROWS // 2)
    branch_limits: tuple[int, ...] = (2**31 - 1,)  # whole paths: branches of tails alone lose

    def __post_init__(self) -> None:
        for name, value, known in (
            ("policy", self.policy, POLICIES),
            ("split", self.split, SPLITS),
            ("branching", self.branching, BRANCHINGS),
        ):
            if value not in known:
                raise ValueError(f"Target.{name} is {value!r}, must be one of {', '.join(known)}")
        _C.Planner(self.native)  # checks the numbers

    @classmethod
    def cpu(
        cls,
        *,
        threads: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_queries: int,
        kv_bytes: int = 4,
        **overrides: Any,
    ) -> Target:
        """The CPU executor with ``threads`` threads: rates of one x86 core with AVX2 and DDR5.

        Raises ValueError also for a head dim that the CPU executor does not have.
        """
        if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"Target.head_dim is {head_dim}, the CPU executor takes multiples of "
                f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}: pad q, k_cache and v_cache with zeros"
            )
        values: dict[str, Any] = {
            "bytes_per_s": 12e9 * threads,
            "flops_per_s": 40e9 * threads,
            "item_overhead_s": 1e-6,
            "sm_speedup": 1.0,
            "merge_round_s": 0.0,
            "items_per_sm": 1,
            "reread_weight": 0.7,
            # Of branches, which are off by default: not fitted.
            "reread_factor": 0.7,
            "wide_factor": 0.0,
            "merge_factor": 1.0,
            "branch_overhead_s": 1e-6,
            "row_tiles": (16, 64, 256),
            "kv_tiles": (64,),
        }
        values |= capacities(max_queries) | overrides
        return cls(
            num_sms=threads,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_queries=max_queries,
            kv_bytes=kv_bytes,
            **values,
        )

    @classmethod
    def h200(
        cls,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_queries: int,
        **overrides: Any,
    ) -> Target:
        """One NVIDIA H200.

        Plans for any head dim; ``decode`` refuses those that the CUDA kernels do not have.
        """
        return cls.gpu(
            gpus.GPUS["h200"],
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_queries=max_queries,
            **overrides,
        )

    @classmethod
    def gpu(
        cls,
        properties: Any,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_queries: int,
        **overrides: Any,
    ) -> Target:
        """The GPU of ``torch.cuda.get_device_properties``, with the rates that were measured on
        such a GPU, else the vendor's (``sglang_pat.gpus``)."""
        rates = gpus.rates_of(properties)
        # Elsewhere than on a Hopper branches run with mma.sync, which was not measured.
        branches = properties.major == 9
        capability = (properties.major, properties.minor)
        values: dict[str, Any] = {
            "num_sms": properties.multi_processor_count,
            "bytes_per_s": rates.bytes_per_s,
            "flops_per_s": rates.flops_per_s,
            **gpus.COSTS,
            "items_per_sm": gpus.items_per_sm(capability, head_dim),
            "row_tiles": row_tiles_for(head_dim),
            "kv_tiles": (32, 64),
            "branching": "cost" if branches else "never",
        }
        values |= capacities(max_queries) | overrides
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_queries=max_queries,
            **values,
        )

    @cached_property
    def native(self) -> _C.Target:
        """The same values for the extension."""
        native = _C.Target()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "policy":
                value = getattr(_C.Policy, value)
            elif field.name == "split":
                value = getattr(_C.Split, value)
            elif field.name == "branching":
                value = getattr(_C.Branching, value)
            elif isinstance(value, tuple):
                value = list(value)
            elif field.type == "int" and value > LARGEST:
                raise ValueError(f"Target.{field.name} is {value}, must be at most {LARGEST}")
            setattr(native, field.name, value)
        return native


def row_tiles_for(head_dim: int) -> tuple[int, ...]:
    """Row tiles of the CUDA kernels, in packed rows."""
    return _ROW_TILES if head_dim <= 128 else _ROW_TILES[:-1]


def capacities(max_queries: int) -> dict[str, int]:
    """Buffers that ordinary batches do not fill: four items and eight partials a query, and room
    for a few long sequences to split over a whole GPU; of branches four segments a query, of which
    each has room for 256 tokens."""
    return {
        "max_items": 4 * max_queries + 1024,
        "max_partials": 8 * max_queries + 2048,
        "max_segments": 4 * max_queries,
        "max_branch_tokens": 1024 * max_queries,
    }
