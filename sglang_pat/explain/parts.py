# SPDX-License-Identifier: Apache-2.0
"""The named parts of an explained plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_pat import Plan, Target

Queries = tuple[int, ...]


@dataclass(slots=True)
class TreeNode:
    """Tokens [start, end) of a radix node, and the queries that share them. ``depth``: nodes above
    it. A tail, the tokens that a query shares with no other, has ``id`` None."""

    id: int | None
    start: int
    end: int
    queries: Queries
    depth: int
    items: list[int] = field(default_factory=list)  # that read these tokens


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens [start, end) that an item reads, in the row of ``row_of``, for ``queries``. ``grows``:
    the end is that of the sequence, read at run time."""

    row_of: int
    start: int
    end: int
    queries: Queries
    grows: bool


@dataclass(frozen=True, slots=True)
class Item:
    """One forward work item. ``kind``: shared (several queries read the tokens), tail (one query
    does) or branch (a part of the tree, each token for some of the queries). ``rows``: packed rows,
    queries x query heads per KV head; ``partials``: slot of each query's partial result, None where
    the item writes the output itself."""

    index: int
    kind: str
    size: str
    queries: Queries
    ranges: list[Range]
    rows: int
    row_tile: int
    partials: dict[int, int | None]

    @property
    def tokens(self) -> int:
        """K/V tokens that it reads per KV head."""
        return sum(part.end - part.start for part in self.ranges)


@dataclass(frozen=True, slots=True)
class Merge:
    """Where the output of a query comes from: partial slots, in the order of the merge, and the
    item that wrote each; without slots the one item writes the output itself."""

    query: int
    slots: list[int]
    items: list[int]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is drawn. Token sums are per layer and KV head, bytes per layer."""

    target: Target
    plan: Plan
    seq_lens: list[int]
    nodes: list[TreeNode]
    items: list[Item]
    merges: list[Merge]
    tokens_read: int  # by the items
    tokens_alone: int  # if every query read its own
    tokens_held: int  # of the batch, each counted once

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all KV heads, one layer."""
        return 2 * self.target.num_kv_heads * self.target.head_dim * self.target.kv_bytes

    @property
    def partial_bytes(self) -> int:
        """Partial outputs and their LSEs, all query heads."""
        per_head = self.target.head_dim * self.target.partial_bytes + 4
        return self.plan.num_partials * self.target.num_q_heads * per_head
