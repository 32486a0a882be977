# SPDX-License-Identifier: Apache-2.0
"""The file of a dump: JSON lines.

The first line is the header, an object with the key ``sglang_pat_dump``. Each further line is a
batch, ``paths`` and ``seq_lens`` as ``sglang-pat explain`` reads them. The last line has the key
``end``; a dump that was cut off lacks it. No line has a token or a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sglang_pat.explain.requests import Requests, checked
from sglang_pat.target import Target

KIND, VERSION = "sglang_pat_dump", 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The B queries of one step: a decode step's, or a verify step's.

    ``paths[i]``: the radix nodes of query i that were safe to share, as (id, start, end) in tokens,
    from the root on. ``seq_lens[i]``: its tokens, those being decoded or verified included; the
    least that the host knew of. ``number``: place in the file, from 1 on. ``step``: of the server,
    since the dump began. ``made``: whether a plan was made for this step; else it ran the last one.
    ``plan``: of the server's plan its ``items`` and ``shared_items``, and the ``kv_tokens_read`` of
    one layer and KV head in this step.
    """

    number: int
    paths: list[list[tuple[int, int, int]]]
    seq_lens: list[int]
    step: int
    made: bool
    plan: dict[str, int]

    @property
    def requests(self) -> Requests:
        """As ``sglang_pat.explain`` takes them."""
        return Requests(self.paths, self.seq_lens)

    def to_json(self) -> dict[str, Any]:
        """The object of its line."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Dump:
    """A file of batches. ``header``: what ``sglang_pat.srt.dump`` says of the server. ``end``: why
    and how the dump ended, empty if it was cut off."""

    header: dict[str, Any]
    batches: list[Batch]
    end: dict[str, Any]

    @property
    def target(self) -> Target:
        """What the server made its plans for. Raises ValueError if this version does not know it,
        or knows more."""
        given = self.header.get("target")
        names = {field.name for field in fields(Target)}
        if not isinstance(given, dict) or set(given) != names:
            other = sorted(names ^ set(given)) if isinstance(given, dict) else ["target"]
            raise ValueError(
                f"the dump's target was written by another version of sglang_pat "
                f"({', '.join(other)}): name one with --target"
            )
        lists = {name: tuple(v) for name, v in given.items() if isinstance(v, list)}
        return Target(**(given | lists))


def first_line(header: dict[str, Any]) -> dict[str, Any]:
    """The header with the mark of a dump."""
    return {KIND: VERSION, **header}


def is_dump(file: Path) -> bool:
    """Whether a file begins as a dump does. Raises OSError for one that cannot be read."""
    with file.open("rb") as opened:
        return f'"{KIND}"'.encode() in opened.read(2 * len(KIND))


def read_dump(file: Path) -> Dump:
    """The dump in ``file``.

    Raises OSError for a file that cannot be read, and ValueError that names the line for one of
    another form or version. Whether paths are one tree is left to ``sglang_pat.plan``.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    header = _object(file, 1, lines[0] if lines else "")
    if header.get(KIND) != VERSION:
        raise ValueError(
            f"{file} is no dump of version {VERSION}: it must begin with an object that has "
            f'"{KIND}": {VERSION}, as `sglang-pat dump` writes it'
        )
    batches: list[Batch] = []
    end: dict[str, Any] = {}
    for number, line in enumerate(lines[1:], 2):
        found = _object(file, number, line)
        if "end" in found:
            end = found
            break
        batches.append(_batch(f"{file}, line {number}", found, len(batches) + 1))
    return Dump(header, batches, end)


def _object(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{file}, line {number} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}, line {number} must be an object, as `sglang-pat dump` writes it")
    return found


def _batch(where: str, found: dict[str, Any], number: int) -> Batch:
    requests = checked(found.get("paths"), found.get("seq_lens"), where)
    step, made, plan = found.get("step", 0), found.get("made", True), found.get("plan", {})
    if type(step) is not int or type(made) is not bool or not isinstance(plan, dict):
        raise ValueError(
            f"{where}: step must be a whole number, made true or false, plan an object"
        )
    return Batch(number, requests.paths, requests.seq_lens, step, made, plan)
