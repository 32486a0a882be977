# SPDX-License-Identifier: Apache-2.0
"""The server's side of a dump: a thread that waits for requests, and collects and writes batches.

A decode step reads one attribute, ``Watch.open``, and while a dump is open it puts what it has into
a bounded queue. Everything else, files included, is this thread's, so that a slow disk delays the
dump and no step.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from sglang_pat.dump.records import Batch, first_line
from sglang_pat.dump.request import DumpRequest, Mail

logger = logging.getLogger("sglang_pat")

IDLE_S, BUSY_S = 0.5, 0.05  # between two looks, while no dump is open and while one is
MAX_QUEUED = 128  # batches that wait to be written: more are left out
MAX_BYTES = 256 << 20  # of a dump


class Collection:
    """What an open dump still wants. Steps call it from their thread, one at a time."""

    def __init__(self, request: DumpRequest) -> None:
        self.request = request
        self.waiting: deque[Batch] = deque()
        self.left_out = 0  # batches for which there was no room, or that could not be read
        self.made = self.kept = 0
        self._steps = self._keeps = 0

    @property
    def is_complete(self) -> bool:
        return self.made >= self.request.batches

    def wants(self, *, made: bool) -> bool:
        """Whether this step is to be added; to be called once for each step. Counts it as left out
        if it were, but the queue is full."""
        self._steps += 1
        if made:
            wanted = not self.is_complete
        else:
            every, before = self.request.kept_every, self._keeps
            self._keeps += 1
            wanted = bool(every) and before % every == 0 and self.kept < self.request.batches
        if wanted and len(self.waiting) >= MAX_QUEUED:
            self.left_out += 1
            return False
        return wanted

    def add(
        self,
        paths: list[list[tuple[int, int, int]]],
        seq_lens: list[int],
        *,
        made: bool,
        plan: dict[str, int],
    ) -> None:
        """Add the step that was wanted; see ``Batch``."""
        self.made += made
        self.kept += not made
        number = self.made + self.kept
        self.waiting.append(Batch(number, paths, seq_lens, self._steps, made, plan))


class Watch:
    """Waits for requests in ``folder`` and answers them.

    ``header``: of all dumps, but for the date. ``open``: the dump that steps add to, None while
    there is none.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.open: Collection | None = None
        self._mail = Mail(folder)
        self._header = header
        self._writing: Writing | None = None
        self._last = ""  # the id of the last request: answered, or being answered
        self._said: set[str] = set()

    def start(self) -> None:
        """Look for requests from now on, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="sglang-pat-dump", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(IDLE_S if self._writing is None else BUSY_S)
            self.look()

    def look(self) -> None:
        """Begin, go on with or end a dump, as ``request.json`` says. Raises nothing."""
        try:
            if self._writing is None:
                self._begin()
            else:
                self._go_on(self._writing)
        except Exception as error:  # whatever it is, it must not cost the server
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the open dump, if there is one, because of ``error``; says so once."""
        self.open, writing, self._writing = None, self._writing, None
        self.say_once(f"a dump into {self._mail.folder} failed: {error!r}")
        if writing is not None:
            writing.give_up(repr(error))

    def say_once(self, text: str) -> None:
        """Warn, but not again in the same words."""
        if text not in self._said and len(self._said) < 10:
            self._said.add(text)
            logger.warning("sglang_pat: %s", text)

    def _begin(self) -> None:
        try:
            request = self._mail.asked()
        except ValueError as error:
            self.say_once(f"{self._mail.request} is no request of `sglang-pat dump`: {error}")
            return
        if request is None or request.id == self._last:
            return
        self._last = request.id
        try:
            self._writing = Writing(self._mail, Collection(request), self._header)
        except FileExistsError:
            logger.info("sglang_pat: %s is answered by another server", self._mail.request)
            return
        except Exception as error:  # said by look()
            self._mail.error(request.id).write_text(f"{error!r}\n", encoding="utf-8")
            raise
        self.open = self._writing.collection
        logger.info(
            "sglang_pat: dumps the next %d batches with a new plan into %s, for at most %g s",
            request.batches,
            self._mail.folder,
            request.seconds,
        )

    def _go_on(self, writing: Writing) -> None:
        why = writing.reason_to_end()
        if why:
            self.open = None  # before the last ones are written
        writing.write()
        if why:
            self._writing = None
            writing.finish(why)
            counts = ", ".join(f"{name} {count}" for name, count in writing.counts.items())
            logger.info("sglang_pat: the dump ended (%s): %s", why, counts)


class Writing:
    """The file of an open dump, which is made anew. Raises OSError as files do."""

    def __init__(self, mail: Mail, collection: Collection, header: Mapping[str, Any]) -> None:
        self.collection = collection
        self._mail = mail
        self._id = collection.request.id
        self._ends = time.monotonic() + collection.request.seconds
        self._bytes = 0
        self._written = {"made": 0, "kept": 0}
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(mail.partial(self._id), flags, 0o600)
        self._file: IO[str] = os.fdopen(descriptor, "w", encoding="utf-8")
        request = collection.request
        asked = {"batches": request.batches, "kept_every": request.kept_every}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._line(first_line({"date": now, **header, "asked": asked}))
        self._file.flush()

    def reason_to_end(self) -> str:
        """Why the dump ends now, or ""."""
        if self.collection.is_complete:
            return "complete"
        if self._bytes > MAX_BYTES:
            return f"it has more than {MAX_BYTES >> 20} MB"
        if time.monotonic() > self._ends:
            return "the time is up"
        if not self._mail.request.exists():
            return "the request was withdrawn"
        return ""

    def write(self) -> None:
        """Write what is waiting."""
        waiting = self.collection.waiting
        while waiting and self._bytes <= MAX_BYTES:
            batch = waiting.popleft()
            self._line(batch.to_json())
            self._written["made" if batch.made else "kept"] += 1
        self._file.flush()

    def finish(self, why: str) -> None:
        """Write the last line, and give the file its name."""
        self._line({"end": why, **self.counts})
        self._file.close()
        os.replace(self._mail.partial(self._id), self._mail.answer(self._id))

    def give_up(self, why: str) -> None:
        """Leave a note of an error where the file would be. Raises nothing."""
        try:
            self._mail.error(self._id).write_text(why + "\n", encoding="utf-8")
            self._mail.partial(self._id).unlink()
            self._file.close()
        except OSError:
            pass  # the same as before, likely: it was said

    @property
    def counts(self) -> dict[str, int]:
        """Batches in the file with a new plan and with one that was kept, and those left out."""
        left_out = self.collection.left_out + len(self.collection.waiting)
        return {**self._written, "left_out": left_out}

    def _line(self, found: dict[str, Any]) -> None:
        text = json.dumps(found, separators=(",", ":")) + "\n"
        self._bytes += len(text)
        self._file.write(text)
