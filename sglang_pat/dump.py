# SPDX-License-Identifier: Apache-2.0
"""Decode batches of a running server as JSON lines (``SGLANG_PAT_DUMP``): a header, an object with
the key ``sglang_pat_dump``, then a line for each batch. No line has a token or a text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sglang_pat.target import Target

KIND, VERSION = "sglang_pat_dump", 1
MAX_REQUESTS = 16_384
MAX_TOKENS = 2**31 - 1
FORM = '{"paths": [[[1, 0, 512]], []], "seq_lens": [600, 90]}'

PathNodes = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Requests:
    """B requests of a step, in a dump of one for which a server made a plan.

    ``paths[i]``: the radix nodes of request i as (id, start, end), in tokens. In a dump those that
    were safe to share, as far as another request shares them; neighbours with the same requests are
    one. ``seq_lens[i]``: its tokens, those being decoded or verified included; in a dump the least
    that the host knew of. ``plan``: ``items`` and ``shared_items`` of the server's plan, and the
    ``kv_tokens_read`` of one layer and KV head in this step.
    """

    paths: list[PathNodes] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    plan: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dump:
    """A file of batches. ``header``: what ``sglang_pat.srt.dump`` says of the server."""

    header: dict[str, Any]
    batches: list[Requests]

    @property
    def target(self) -> Target:
        """What the server made its plans for. Raises ValueError if this version does not know it,
        or knows more."""
        found = self.header.get("target")
        given: dict[str, Any] = found if isinstance(found, dict) else {}
        if other := {each.name for each in fields(Target)} ^ set(given):
            raise ValueError(
                f"the dump's target was written by another version of sglang_pat "
                f"({', '.join(sorted(other))}): name one with --target"
            )
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        try:
            return Target(**(given | lists))
        except TypeError as error:
            raise ValueError(
                f"the dump's target is damaged ({error}): name one with --target"
            ) from None


def read_dump(file: Path) -> Dump:
    """The dump in ``file``.

    Raises OSError for a file that cannot be read, and ValueError that names the line for one of
    another form or version. Whether paths are one tree is left to ``sglang_pat.plan``.
    """
    lines = [
        _object(f"{file}, line {number}", line)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    ]
    header = lines[0] if lines else {}
    if header.get(KIND) != VERSION:
        raise ValueError(
            f"{file} is no dump of version {VERSION}: it must begin with an object that has "
            f'"{KIND}": {VERSION}, as a server with SGLANG_PAT_DUMP writes it'
        )
    batches = [
        _requests(f"{file}, line {number}", found) for number, found in enumerate(lines[1:], 2)
    ]
    return Dump(header, batches)


def _requests(where: str, found: dict[str, Any]) -> Requests:
    try:
        paths = [[(node, start, end) for node, start, end in path] for path in found["paths"]]
        seq_lens = [*found["seq_lens"]]
        numbers = [*seq_lens, *(n for path in paths for node in path for n in node)]
        good = all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    except (KeyError, TypeError, ValueError):
        good = False
    if not (good and len(paths) == len(seq_lens) and 0 < len(paths) <= MAX_REQUESTS):
        raise ValueError(
            f"{where} must have a path and a length, in whole numbers, of 1 to {MAX_REQUESTS:,} "
            f"requests, as {FORM}"
        )
    return Requests(paths, seq_lens, found.get("plan", {}))


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be an object")
    return found
