# SPDX-License-Identifier: Apache-2.0
"""A radix tree of prompts in plain Python, as SGLang's cache would hold them with pages of 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_pat.dump import PathNodes

Symbols = npt.NDArray[np.int64]  # [n] token ids of a prompt, or names of its blocks

ROOT = 0


def common_prefix(one: Symbols, other: Symbols) -> int:
    """How many symbols two sequences begin with in common."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count


class RadixTree:
    """Sequences by what they begin with. Node 0 is the root and has no symbols.

    ``insert`` gives a node that stands for its sequence from then on, also when later insertions
    split the nodes above it.
    """

    def __init__(self) -> None:
        self._symbols: list[Symbols] = [np.zeros(0, np.int64)]
        self._parents = [ROOT]
        self._ends = [0]  # symbols from the root to the node's end
        self._children: list[dict[int, int]] = [{}]

    def insert(self, sequence: Symbols) -> int:
        """Add [n] symbols, of which the tree keeps views; the node where they end."""
        node, at = ROOT, 0
        while at < len(sequence):
            child = self._children[node].get(int(sequence[at]))
            if child is None:
                return self._add(node, sequence[at:])
            shared = common_prefix(self._symbols[child], sequence[at:])
            if shared < len(self._symbols[child]):
                child = self._split(child, shared)
            node, at = child, at + shared
        return node

    def path(self, node: int) -> PathNodes:
        """The nodes of the sequence that ends with ``node``, from the root on: (id, start, end) in
        symbols."""
        found: PathNodes = []
        while node != ROOT:
            end = self._ends[node]
            found.append((node, end - len(self._symbols[node]), end))
            node = self._parents[node]
        return found[::-1]

    def _add(self, parent: int, symbols: Symbols) -> int:
        node = len(self._symbols)
        self._symbols.append(symbols)
        self._parents.append(parent)
        self._ends.append(self._ends[parent] + len(symbols))
        self._children.append({})
        self._children[parent][int(symbols[0])] = node
        return node

    def _split(self, node: int, count: int) -> int:
        """Moves the first ``count`` symbols of ``node`` to a new node above it, and returns that:
        the old number stays with the end of the sequence."""
        parent, symbols = self._parents[node], self._symbols[node]
        upper = self._add(parent, symbols[:count])
        self._symbols[node] = symbols[count:]
        self._parents[node] = upper
        self._children[upper][int(symbols[count])] = node
        return upper


def shared_paths(paths: Sequence[PathNodes]) -> list[PathNodes]:
    """The same paths with the nodes that several of them have, where those that the same paths have
    are one node: its number is that of the first."""
    readers = Counter(node for path in paths for node, _, _ in path)
    found = []
    for path in paths:
        joined: PathNodes = []
        count = 0  # of the last node: below it are a part of its readers
        for node, start, end in path:
            if readers[node] == 1:
                break
            if joined and readers[node] == count:
                joined[-1] = (joined[-1][0], joined[-1][1], end)
            else:
                joined.append((node, start, end))
            count = readers[node]
        found.append(joined)
    return found
