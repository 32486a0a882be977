# SPDX-License-Identifier: Apache-2.0
"""The least time that decode attention of a tree can take: its bytes and its operations over the
rates that the device was seen to reach."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.forests import Forest


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one attention layer."""

    q: int
    kv: int
    dim: int = 128

    @classmethod
    def parse(cls, spec: str) -> Heads:
        """``QUERY/KV`` or ``QUERY/KV/DIM``, as in 32/8."""
        try:
            heads = cls(*map(int, spec.split("/")))
        except (TypeError, ValueError):
            raise ValueError(f"heads {spec!r} are not QUERY/KV or QUERY/KV/DIM, as 32/8") from None
        if min(heads.q, heads.kv, heads.dim) < 1 or heads.q % heads.kv:
            raise ValueError(f"heads {spec!r}: the KV heads must divide the query heads")
        return heads

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}" + (f"/{self.dim}" if self.dim != 128 else "")


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches: bytes read per second, operations of 16-bit products per second."""

    bytes_per_s: float
    flops_per_s: float


def least_bytes(tree: Forest, heads: Heads, kv_itemsize: int = 2, draft_tokens: int = 1) -> int:
    """Every K/V slot of the batch and q read once, the output written once; q and the output of
    two bytes an element, with ``draft_tokens`` rows a query."""
    q_and_out = 2 * tree.num_queries * draft_tokens * heads.q * heads.dim * 2
    return 2 * tree.unique_tokens * heads.kv * heads.dim * kv_itemsize + q_and_out


def flops(tree: Forest, heads: Heads, draft_tokens: int = 1) -> int:
    """Multiplications and additions of q.k and p.v; no packing saves any of them. A draft token
    attends to no later one."""
    masked = draft_tokens * (draft_tokens - 1) // 2
    pairs = draft_tokens * sum(tree.seq_lens) - masked * tree.num_queries
    return 4 * pairs * heads.q * heads.dim


def floor_us(
    tree: Forest, heads: Heads, rates: Rates, kv_itemsize: int = 2, draft_tokens: int = 1
) -> float:
    """Microseconds, the larger of the time of the bytes and that of the operations."""
    return max(
        1e6 * least_bytes(tree, heads, kv_itemsize, draft_tokens) / rates.bytes_per_s,
        1e6 * flops(tree, heads, draft_tokens) / rates.flops_per_s,
    )
