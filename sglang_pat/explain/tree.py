# SPDX-License-Identifier: Apache-2.0
"""Decode batches as a line of text: by levels, named as PAT's paper names its trees, or nested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from sglang_pat.dump import MAX_REQUESTS, MAX_TOKENS, PathNodes, Requests

# Three requests: all begin with the same 512 tokens, the first two share 256 more.
DEFAULT_TREE = "512(256(40,25),90)"
MAX_DEPTH = 64


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
    def paths(self) -> list[PathNodes]:
        """Per query its radix nodes as (node id, start, end)."""
        paths = []
        for query in range(self.num_queries):
            path: PathNodes = []
            end = 0
            for level in range(len(self.nodes) - 1):
                start, end = end, end + self.tokens[level]
                node = query * self.nodes[level] // self.num_queries
                path.append((level * 1_000_000 + node, start, end))
            paths.append(path)
        return paths

    def __str__(self) -> str:
        return f"{','.join(map(str, self.nodes))}_{','.join(map(str, self.tokens))}"


def parse_tree(spec: str) -> Requests:
    """The requests of a tree in one of two notations.

    Nested: a number is a request and counts its private tokens; ``TOKENS(...)`` is a radix node
    that the requests in parentheses share; ``COUNTx`` repeats what follows. ``512(2x256(40,25))``
    is a node of 512 tokens over two nodes of 256 tokens with two requests each. Levels: ``Tree``.

    Raises ValueError that names the place for what is neither, and the limit for what is too large.
    """
    if "_" in spec:
        tree = Tree.parse(spec)
        if tree.num_queries > MAX_REQUESTS:
            raise ValueError(f"tree {spec!r} has more than {MAX_REQUESTS:,} requests")
        return Requests(tree.paths, tree.seq_lens)
    return _Parser("".join(spec.split())).parse()


class _Parser:
    """Recursive descent over the nested notation."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._at = 0
        self._nodes = 0  # ids given out
        self._requests = Requests()

    def parse(self) -> Requests:
        self._siblings([])
        if self._at < len(self._spec):
            self._fail("the end must stand here")
        return self._requests

    def _take(self, letter: str) -> bool:
        """Step over ``letter`` if it comes next."""
        found = self._spec.startswith(letter, self._at)
        self._at += found
        return found

    def _siblings(self, path: PathNodes) -> None:
        """Read one or more nodes and requests under ``path``, with commas between them."""
        self._member(path)
        while self._take(","):
            self._member(path)

    def _member(self, path: PathNodes) -> None:
        count, tokens = 1, self._number()
        if self._take("x"):
            count, tokens = tokens, self._number()
        start = path[-1][2] if path else 0
        end = start + tokens
        if end > MAX_TOKENS:
            self._fail(f"a request has {end:,} tokens, more than {MAX_TOKENS:,}")
        if not self._take("("):
            if len(self._requests.paths) + count > MAX_REQUESTS:
                self._fail(f"more than {MAX_REQUESTS:,} requests")
            self._requests.paths.extend([path] * count)
            self._requests.seq_lens.extend([end] * count)
            return
        if len(path) == MAX_DEPTH:
            self._fail(f"nodes are nested deeper than {MAX_DEPTH}")
        begin = self._at
        for _ in range(count):
            self._nodes += 1
            self._at = begin
            self._siblings([*path, (self._nodes, start, end)])
            if not self._take(")"):
                self._fail('a ")" is missing')

    def _number(self) -> int:
        found = re.compile("[0-9]{1,20}").match(self._spec, self._at)
        if found is None or not int(found[0]):
            self._fail("a number of 1 or more must stand here")
        self._at = found.end()
        return int(found[0])

    def _fail(self, what: str) -> NoReturn:
        raise ValueError(
            f"tree {self._spec!r}, character {self._at + 1}: {what}; write it as in {DEFAULT_TREE} "
            "or 32(8x512(64x256))"
        )
