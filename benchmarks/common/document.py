# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: a document of how and where they measured, a limit of time, and types of
arguments."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

Document = dict[str, Any]

T = TypeVar("T")


def conditions(
    kind: str, module: str, device: str, packages: Sequence[str], settings: Mapping[str, Any]
) -> Document:
    """A document of ``kind`` without rows, of ``python -m module`` as it was called; ``packages``:
    those whose versions matter."""
    return {
        "kind": kind,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "device": device,
        "versions": {name: _version(name) for name in packages},
        "settings": dict(settings),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def heading(document: Document) -> list[str]:
    """Where and how a document was measured, as two lines."""
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    found = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return [f"{document['date']}  {document['device']}  {settings}", found]


def read(path: Path, kinds: Collection[str]) -> Document:
    """A document of one of ``kinds`` that ``--json`` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such document; the message says what to do.
    """
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): name a file that --json wrote") from None
    if not isinstance(document, dict) or not document.keys() >= {"kind", "settings", "rows"}:
        raise ValueError(f"{path} is JSON, but not of a benchmark: name a file that --json wrote")
    if document["kind"] not in kinds:
        program = " ".join(shlex.split(document["command"])[:3])
        raise ValueError(
            f"{path} has rows of kind {document['kind']!r}, which this program does not print: use "
            f"{program} --from {path}"
        )
    return document


def write(found: Any, path: Path | None, indent: int | None = 1) -> None:
    """Replace the file at once, so that whoever ends this process leaves a whole one."""
    if path:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(found, indent=indent) + "\n")
        os.replace(part, path)


@dataclass(slots=True)
class Budget:
    """Time for runs: none starts that would not end before ``deadline`` (``time.monotonic``), if
    it takes as long as the longest of its kind so far."""

    deadline: float
    spent_out: bool = False
    _longest: dict[str, float] = field(default_factory=dict)

    def allows(self, kind: str) -> bool:
        longest = self._longest.get(kind, max(self._longest.values(), default=0.0))
        self.spent_out = self.spent_out or time.monotonic() + longest > self.deadline
        return not self.spent_out

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def __str__(self) -> str:
        """To go behind a line; nothing without a limit."""
        return f"; {self.left_s():.0f} s left" if math.isfinite(self.deadline) else ""

    def took(self, kind: str, seconds: float) -> None:
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))


def value(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as a type of argparse, which shows the message of no other error."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def whole_number(text: str) -> int:
    """1 or more. Raises ValueError if ``text`` is none."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(f"{text!r} is not a whole number, 1 or more")
    return int(text)
