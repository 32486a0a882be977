# SPDX-License-Identifier: Apache-2.0
"""How a dump is asked for: by a small file in the folder that the server watches.

``request.json`` asks, and stays while it is answered; without it the server ends the dump. The
answer grows as ``ID.jsonl.part`` and becomes ``ID.jsonl`` when it is complete. If the server cannot
write it, ``ID.error`` may say why.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_BATCHES = 10_000
MAX_SECONDS = 86_400
MAX_KEPT_EVERY = 1_000_000
_MAX_REQUEST_BYTES = 4096
_ID = re.compile(r"[0-9a-f]{8,32}")  # it becomes the name of a file


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """Asks for the next ``batches`` decode batches for which a plan is made.

    Beside them it gets of the steps that keep their plan the first and every ``kept_every``-th, 0
    for none of those. It ends after ``seconds`` with what there is. Raises ValueError for values
    out of range.
    """

    id: str
    batches: int
    kept_every: int
    seconds: float

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ValueError(f"id is {self.id!r}, must be 8 to 32 hexadecimal digits")
        for name, least, most in (
            ("batches", 1, MAX_BATCHES),
            ("kept_every", 0, MAX_KEPT_EVERY),
            ("seconds", 0, MAX_SECONDS),
        ):
            value = getattr(self, name)
            whole = name != "seconds"
            if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{name} is {value!r}, must be {kind} from {least} to {most:,}")

    @classmethod
    def new(cls, batches: int, kept_every: int, seconds: float) -> DumpRequest:
        """With an id of its own."""
        return cls(secrets.token_hex(8), batches, kept_every, seconds)


@dataclass(frozen=True, slots=True)
class Mail:
    """The files in a server's ``folder``."""

    folder: Path

    @property
    def request(self) -> Path:
        return self.folder / "request.json"

    def answer(self, id: str) -> Path:
        return self.folder / f"{id}.jsonl"

    def partial(self, id: str) -> Path:
        return self.folder / f"{id}.jsonl.part"

    def error(self, id: str) -> Path:
        return self.folder / f"{id}.error"

    def ask(self, request: DumpRequest) -> None:
        """Put a request there. Raises FileExistsError if there is one already, OSError if the
        folder cannot be written to."""
        written = self.folder / f"{request.id}.request"
        written.write_text(json.dumps(asdict(request)) + "\n", encoding="utf-8")
        try:
            os.link(written, self.request)  # whole at once, and never over another's
        finally:
            written.unlink()

    def asked(self) -> DumpRequest | None:
        """The request that is there. Raises ValueError for a file that is none."""
        try:
            with self.request.open("rb") as opened:
                text = opened.read(_MAX_REQUEST_BYTES)
        except FileNotFoundError:
            return None
        found = json.loads(text)
        if not isinstance(found, dict) or set(found) != set(DumpRequest.__slots__):
            raise ValueError(f"must hold {', '.join(DumpRequest.__slots__)}")
        return DumpRequest(**found)

    def withdraw(self, request: DumpRequest) -> None:
        """Remove the request, if it is this one; the server then ends the dump."""
        with suppress(OSError, ValueError):
            if self.asked() == request:
                self.request.unlink()
