# SPDX-License-Identifier: Apache-2.0
"""Decode batches as a line of text."""

from __future__ import annotations

import re
from typing import NoReturn

from sglang_pat.dump import MAX_REQUESTS, MAX_TOKENS, PathNodes, Requests

# Three requests: all begin with the same 512 tokens, the first two share 256 more.
DEFAULT_TREE = "512(256(40,25),90)"
MAX_DEPTH = 64


def parse_tree(spec: str) -> Requests:
    """The requests of a tree: a number is a request and counts its private tokens;
    ``TOKENS(...)`` is a radix node that the requests in parentheses share; ``COUNTx`` repeats what
    follows. ``512(2x256(40,25))`` is a node of 512 tokens over two nodes of 256 tokens with two
    requests each.

    Raises ValueError that names the place for what is none, and the limit for what is too large.
    """
    return _Parser("".join(spec.split())).parse()


class _Parser:
    """Recursive descent."""

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
