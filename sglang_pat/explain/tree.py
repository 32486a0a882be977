# SPDX-License-Identifier: Apache-2.0
"""Regular decode batches by levels, named as PAT's paper names its trees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Tree:
    """A batch by levels: ``nodes[i]`` radix nodes of ``tokens[i]`` tokens; the last level is one
    private tail per query."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def parse(cls, spec: str) -> Tree:
        """The tree of a ``str(tree)``: nodes per level, ``_``, tokens per node."""
        try:
            nodes, tokens = (tuple(map(int, half.split(","))) for half in spec.split("_"))
        except ValueError:
            raise ValueError(
                f"tree {spec!r} is not NODES_TOKENS, as in 1,8,512_32,512,256"
            ) from None
        if len(nodes) != len(tokens):
            raise ValueError(
                f"tree {spec!r} has {len(nodes)} levels of nodes and {len(tokens)} of tokens"
            )
        if min(nodes + tokens) < 1 or any(b % a for a, b in pairwise(nodes)):
            raise ValueError(
                f"tree {spec!r}: counts must be 1 or more, and nodes divide those of the next level"
            )
        return cls(nodes, tokens)

    @property
    def num_queries(self) -> int:
        return self.nodes[-1]

    @property
    def shares(self) -> bool:
        return len(self.nodes) > 1

    @property
    def unique_tokens(self) -> int:
        """K/V tokens that the batch holds, each counted once."""
        return sum(n * t for n, t in zip(self.nodes, self.tokens, strict=True))

    @property
    def seq_lens(self) -> list[int]:
        return [sum(self.tokens)] * self.num_queries

    @property
    def paths(self) -> list[list[tuple[int, int, int]]]:
        """Per query its radix nodes as (node id, start, end)."""
        paths = []
        for query in range(self.num_queries):
            path: list[tuple[int, int, int]] = []
            end = 0
            for level in range(len(self.nodes) - 1):
                start, end = end, end + self.tokens[level]
                node = query * self.nodes[level] // self.num_queries
                path.append((level * 1_000_000 + node, start, end))
            paths.append(path)
        return paths

    def __str__(self) -> str:
        return f"{','.join(map(str, self.nodes))}_{','.join(map(str, self.tokens))}"
