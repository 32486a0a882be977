# SPDX-License-Identifier: Apache-2.0
"""The batches that calibration measures: regular ones, each for one cost, and random forests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sglang_pat.bench.common.forests import Forest, PrefixPath
from sglang_pat.bench.common.trees import Tree

# Of a random forest: some have only short nodes, where branches pay, some only short tails.
QUERIES = (64, 1024)
DEPTHS = (1, 5)
LEAST_TOKENS = 8
LONGEST_NODE = (128, 4096)
LONGEST_TAIL = (32, 1024)
MAX_CHILDREN = 6
MAX_CONTEXT = 12_288


def regular(tree: Tree) -> Forest:
    """A tree with equal nodes on each level."""
    return Forest(str(tree), tree.paths, tree.seq_lens)


def forest(seed: int) -> Forest:
    """Random roots, each split further down to a random depth; lengths spread evenly over the
    octaves up to the longest, which is random, too. Equal seeds give equal forests."""
    rng = np.random.default_rng(seed)
    queries = _log_uniform(rng, QUERIES)
    depth = int(rng.integers(DEPTHS[0], DEPTHS[1] + 1))
    builder = _Builder(rng)
    for count in _shares(rng, queries, int(rng.integers(1, 4))):
        builder.grow(count, [], depth)
    return Forest(f"forest {seed}", builder.paths, builder.seq_lens)


class _Builder:
    def __init__(self, rng: np.random.Generator) -> None:
        self.paths: list[PrefixPath] = []
        self.seq_lens: list[int] = []
        self._rng = rng
        self._nodes = 0
        self._node_tokens = LEAST_TOKENS, _log_uniform(rng, LONGEST_NODE)
        self._tail_tokens = LEAST_TOKENS, _log_uniform(rng, LONGEST_TAIL)

    def grow(self, queries: int, path: PrefixPath, depth: int) -> None:
        """A node that so many queries share, and what is below it."""
        start = path[-1][2] if path else 0
        tokens = _log_uniform(self._rng, self._node_tokens)
        if depth == 0 or queries == 1 or start + tokens > MAX_CONTEXT:
            for _ in range(queries):
                self.paths.append(path)
                self.seq_lens.append(start + _log_uniform(self._rng, self._tail_tokens))
            return
        self._nodes += 1
        below = [*path, (self._nodes, start, start + tokens)]
        children = int(self._rng.integers(1, MAX_CHILDREN + 1))
        for count in _shares(self._rng, queries, children):
            self.grow(count, below, depth - 1)


def _shares(rng: np.random.Generator, total: int, parts: int) -> Iterator[int]:
    """``total`` in up to ``parts`` random shares, none of them empty."""
    cuts = np.sort(rng.integers(0, total + 1, parts - 1))
    for share in np.diff([0, *cuts, total]):
        if share:
            yield int(share)


def _log_uniform(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    low, high = np.log2(bounds)
    return round(2 ** float(rng.uniform(low, high)))
