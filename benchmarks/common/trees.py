# SPDX-License-Identifier: Apache-2.0
"""The 20 synthetic decode batches and four head configurations of PAT's section 8.2."""

from __future__ import annotations

from typing import Protocol

from sglang_pat.explain.tree import Tree

# (query heads, KV heads)
HEADS = ((32, 32), (16, 8), (32, 8), (64, 8))


class Requests(Protocol):
    """A decode batch: a ``Tree``, or a ``Forest`` of ``forests.py``."""

    @property
    def num_queries(self) -> int: ...
    @property
    def unique_tokens(self) -> int: ...
    @property
    def seq_lens(self) -> list[int]: ...
    @property
    def paths(self) -> list[list[tuple[int, int, int]]]: ...


def shortest_tail(batch: Requests) -> int:
    """Tokens of a query that no other reads, of the query with the fewest."""
    ends = (path[-1][2] if path else 0 for path in batch.paths)
    return min(length - end for length, end in zip(batch.seq_lens, ends, strict=True))


PAPER_TREES = (
    Tree((1, 10), (4096, 416)),
    Tree((1, 256), (256, 32)),
    Tree((1, 1024), (2048, 32)),
    Tree((1, 2, 64), (1024, 256, 256)),
    Tree((1, 4, 256), (32, 256, 32)),
    Tree((1, 8, 512), (32, 512, 256)),
    Tree((1, 8, 512), (32, 2048, 256)),
    Tree((1, 8, 512), (512, 512, 256)),
    Tree((1, 4, 8, 256), (32, 256, 256, 32)),
    Tree((1, 4, 16, 512), (1024, 256, 128, 32)),
    Tree((1, 4, 16, 64, 256, 1024), (256, 32, 256, 64, 32, 256)),
    Tree((1, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32)),
    Tree((1, 16, 32, 64, 256, 1024), (256, 128, 64, 32, 32, 32)),
    Tree((1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32, 32)),
    Tree((1, 8, 16, 32, 64, 256, 1024), (256, 128, 64, 32, 32, 32, 32)),
    Tree((2, 8, 16, 256), (256, 256, 32, 32)),
    Tree((4, 16, 256, 512), (512, 32, 128, 32)),
    Tree((8, 16, 32, 256), (512, 512, 256, 32)),
    Tree((256,), (1024,)),
    Tree((256,), (4096,)),
)
QUICK_TREES = tuple(PAPER_TREES[i] for i in (0, 2, 5, 9, 18))
