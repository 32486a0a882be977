# SPDX-License-Identifier: Apache-2.0
"""The requests to estimate for, whatever file they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sglang_pat.dump import PathNodes
from sglang_pat.estimate.radix import RadixTree, Symbols

T = TypeVar("T")

MAX_TOKENS = 2**24  # of a prompt or an answer
MAX_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt. ``line``: where it stands in its file, from 1 on. ``symbols``: its token ids, or
    names of its blocks; ``length``: its tokens; ``output``: tokens of its answer; ``samples``:
    answers that are asked for at once."""

    line: int
    symbols: Symbols
    length: int
    output: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in the order in which they come. ``unit``: tokens of a symbol, 1 or those of a block
    of which the last of a prompt may be part filled."""

    requests: Sequence[Request]
    unit: int = 1

    def paths(self) -> list[PathNodes]:
        """The radix nodes of each prompt as (id, start, end) in tokens. Every prompt is taken to be
        in the cache as a whole."""
        tree = RadixTree()
        leaves = [tree.insert(request.symbols) for request in self.requests]
        return [
            [
                (node, start * self.unit, min(end * self.unit, request.length))
                for node, start, end in tree.path(leaf)
            ]
            for request, leaf in zip(self.requests, leaves, strict=True)
        ]

    def queue(self) -> list[tuple[int, int]]:
        """Number and output tokens of each answer that is asked for."""
        return [
            (number, request.output)
            for number, request in enumerate(self.requests)
            for _ in range(request.samples)
        ]


class InputError(ValueError):
    """A file or an option that makes no sense; the message names it, the limit and the way out."""


def fail(where: str, what: str) -> NoReturn:
    raise InputError(f"{where}: {what}")


def read_lines(file: Path, what: str, form: str, read: Callable[[Any, int, str], T]) -> list[T]:
    """The requests of a file of JSON lines: what ``read`` makes of each line's value, its number
    and its place in words. Blank lines are passed over. ``what`` and ``form`` say in errors what
    the lines are and how to write one.

    Raises OSError for a file that cannot be read, InputError for a line that is not JSON and for a
    file without lines, and what ``read`` raises.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            given = json.loads(line)
        except ValueError as error:
            fail(where, f"is not JSON ({error}); write it as {form}")
        found.append(read(given, number, where))
    if not found:
        fail(f"{file}", f"holds no {what}; write one a line, as {form}")
    return found


def whole(value: object, where: str, most: int) -> int:
    """``value`` as a whole number from 1 to ``most``. Raises InputError."""
    if type(value) is not int or not 1 <= value <= most:
        fail(where, f"is {value!r}, must be a whole number from 1 to {most:,}")
    return value
