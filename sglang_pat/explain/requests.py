# SPDX-License-Identifier: Apache-2.0
"""The batch to explain: radix paths and lengths, from a line of text."""

from __future__ import annotations

from typing import NoReturn

from sglang_pat.dump import MAX_REQUESTS, MAX_TOKENS, PathNodes, Requests

# Three requests: all begin with the same 512 tokens, the first two share 256 more.
DEFAULT_TREE = "512(256(40,25),90)"
MAX_DEPTH = 64


def parse_tree(spec: str) -> Requests:
    """The requests of a tree in one of two notations.

    Nested: a number is a request and counts its private tokens; ``TOKENS(...)`` is a radix node
    that the requests in parentheses share; ``COUNTx`` repeats what follows. ``512(2x256(40,25))``
    is a node of 512 tokens over two nodes of 256 tokens with two requests each. By levels, as the
    benchmarks name their trees: ``1,8,512_32,512,256`` is one node of 32 tokens over 8 nodes of 512
    tokens over 512 requests of 256 private tokens.

    Raises ValueError that names the character for what is neither, and the limit for what is too
    large.
    """
    if "_" in spec:
        from sglang_pat.explain.tree import Tree

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
            self._fail(f"{self._next!r} is not expected")
        return self._requests

    @property
    def _next(self) -> str:
        return self._spec[self._at : self._at + 1]

    def _siblings(self, path: PathNodes) -> None:
        """Reads one or more nodes and requests under ``path``, with commas between them."""
        self._member(path)
        while self._next == ",":
            self._at += 1
            self._member(path)

    def _member(self, path: PathNodes) -> None:
        count, tokens = 1, self._number()
        if self._next == "x":
            self._at += 1
            count, tokens = tokens, self._number()
        start = path[-1][2] if path else 0
        end = start + tokens
        if end > MAX_TOKENS:
            self._fail(f"a request has {end:,} tokens, more than {MAX_TOKENS:,}")
        if self._next != "(":
            for _ in range(count):
                self._add(path, end)
            return
        if len(path) == MAX_DEPTH:
            self._fail(f"nodes are nested deeper than {MAX_DEPTH}")
        begin = self._at + 1
        for _ in range(count):
            self._nodes += 1
            self._at = begin
            self._siblings([*path, (self._nodes, start, end)])
            if self._next != ")":
                self._fail('a ")" is missing')
        self._at += 1

    def _add(self, path: PathNodes, length: int) -> None:
        if len(self._requests.seq_lens) == MAX_REQUESTS:
            raise ValueError(f"tree {self._spec!r} has more than {MAX_REQUESTS:,} requests")
        self._requests.paths.append(path)
        self._requests.seq_lens.append(length)

    def _number(self) -> int:
        begin = self._at
        while self._next in set("0123456789"):
            self._at += 1
        digits = self._spec[begin : self._at]
        if not digits or int(digits[:20]) == 0:
            self._at = begin
            found = repr(digits or self._next) if self._next else "the end"
            self._fail(f"a number of 1 or more must stand here, not {found}")
        return int(digits[:20])

    def _fail(self, what: str) -> NoReturn:
        raise ValueError(
            f"tree {self._spec!r}, character {self._at + 1}: {what}; write it as in {DEFAULT_TREE} "
            "or 32(8x512(64x256))"
        )
