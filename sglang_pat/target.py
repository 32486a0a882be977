# SPDX-License-Identifier: Apache-2.0
"""What a plan is made for: a machine, a model's heads and the rules to apply."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from sglang_pat import _C, gpus

# Ways to cut a batch into items, of which the judge takes the fastest (csrc/pack/cut.h).
CUTS = tuple(_C.CUTS)
WITHOUT_BRANCHES = tuple(cut for cut in CUTS if "branches" not in cut)
POLICIES = ("default", "pat")
# The CPU executor's head dims are multiples of the one up to the other.
HEAD_DIM_STEP, MAX_HEAD_DIM = _C.CPU_HEAD_DIM_STEP, _C.CPU_MAX_HEAD_DIM
LARGEST = 2**31 - 1  # what the extension's integers hold
# Head dims of K and V of multi-head latent attention (MLA), of which the cache holds K alone: V is
# its first part.
LATENT_DIMS = (576, 512)
# Row tiles of the CUDA kernels in packed rows. The last is of wide items, which both halves of an
# SM share; beyond head dim 128 an SM has one half.
_ROW_TILES = (_C.HEAVY_ROWS, _C.WIDE_ROWS, 2 * _C.WIDE_ROWS)


@dataclass(frozen=True)
class Target:
    """Input of the scheduler beside paths and lengths. Hashable; needs no such machine at hand.

    ``num_sms`` are the SMs, or of a CPU the threads, that run items. ``row_tiles`` (packed rows,
    queries x GQA group x draft tokens) and ``kv_tiles`` (tokens) ascend. An SM runs
    ``items_per_sm`` items side by side, 1 or 2, or one wide one, and reads K/V ``sm_speedup`` times
    as fast as by its share of ``bytes_per_s`` if it has the memory to itself. ``reread_weight`` in
    (0, 1] is what reading hot K/V again costs relative to the first read. ``hopper``: whether the
    judge takes what items cost on a Hopper (csrc/pack/target.h) or computes it from the rates. The
    ``max_*`` are the executor's buffers: cuts that would exceed them are not weighed, and if none
    is left the plan is made without any split, then without packs, and says so in
    ``Plan.degraded``.

    ``head_dim`` is that of q and K, ``v_head_dim`` that of V and of the output; 0: the same.

    ``draft_tokens``: tokens of a query that attend in one step, 1 in a decode step; more where
    speculative decoding verifies draft tokens. A query then has a GQA group of packed
    rows for each, and lengths of sequences count them.

    ``policy``: ``default`` makes a plan for each of ``cuts`` and takes the one that the judge says
    is the fastest, and without cuts leaves packs whole; ``pat`` is the paper to the letter:
    equations 1 and 2 of section 5.1 say what is a pack, and no piece is longer than the mean
    (section 6).

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
    items_per_sm: int
    reread_weight: float
    hopper: bool
    row_tiles: tuple[int, ...]
    kv_tiles: tuple[int, ...]
    max_queries: int
    max_items: int
    max_partials: int
    max_segments: int
    max_branch_tokens: int
    v_head_dim: int = 0
    draft_tokens: int = 1
    kv_bytes: int = 2
    partial_bytes: int = 4
    policy: str = "default"
    cuts: tuple[str, ...] = CUTS

    def __post_init__(self) -> None:
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        choices = [("policy", self.policy, POLICIES), *(("cuts", cut, CUTS) for cut in self.cuts)]
        for name, value, known in choices:
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
            "num_sms": threads,
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_queries": max_queries,
            "kv_bytes": kv_bytes,
            "bytes_per_s": 12e9 * threads,
            "flops_per_s": 40e9 * threads,
            "item_overhead_s": 1e-6,
            "sm_speedup": 1.0,
            "items_per_sm": 1,
            "reread_weight": 0.7,
            "hopper": False,
            "cuts": WITHOUT_BRANCHES,
            "row_tiles": (16, 64, 256),
            "kv_tiles": (64,),
        }
        return cls(**values | capacities(max_queries) | overrides)

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
        hopper = properties.major == 9
        values: dict[str, Any] = {
            "num_sms": properties.multi_processor_count,
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_queries": max_queries,
            "bytes_per_s": rates.bytes_per_s,
            "flops_per_s": rates.flops_per_s,
            # Chosen and fitted on an H200 (docs/lessons.md).
            "item_overhead_s": 1.2e-6,
            "sm_speedup": 1.6,
            "reread_weight": 1.0,
            "items_per_sm": gpus.items_per_sm((properties.major, properties.minor), head_dim),
            "row_tiles": row_tiles_for(head_dim),
            "kv_tiles": (64,) if head_dim == LATENT_DIMS[0] else (32, 64),
            "hopper": hopper,
            "cuts": CUTS if hopper else WITHOUT_BRANCHES,
        }
        return cls(**values | capacities(max_queries) | overrides)

    @property
    def token_values(self) -> int:
        """Numbers of a token that the cache holds for a KV head: those of K and V, and of latents
        those of K."""
        dims = (self.head_dim, self.v_head_dim)
        return self.head_dim if dims == LATENT_DIMS else sum(dims)

    @cached_property
    def native(self) -> _C.Target:
        """The same values for the extension."""
        native = _C.Target()
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "policy":
                name, value = "by_paper", value == "pat"
            elif name == "cuts":
                value = sum(1 << CUTS.index(cut) for cut in set(value))
            elif isinstance(value, tuple):
                value = list(value)
            elif field.type == "int" and value > LARGEST:
                raise ValueError(f"Target.{name} is {value}, must be at most {LARGEST}")
            setattr(native, name, value)
        native.token_values = self.token_values
        return native


def row_tiles_for(head_dim: int) -> tuple[int, ...]:
    if head_dim == LATENT_DIMS[0]:  # fewer rows would take as long
        return _ROW_TILES[1:2]
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
