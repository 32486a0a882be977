# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``sglang-pat dump``: asks a running server for batches and collects them."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sglang_pat.dump.records import Dump, read_dump
from sglang_pat.dump.request import DumpRequest, Mail

TAKEN_S = 15.0  # until a server has begun to answer
ENDED_S = 15.0  # until it has written what it has, once the time is up
LOOK_S = 0.1


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand with its options."""
    add = commands.add_parser(
        "dump",
        help="dump the decode batches of a running server, as paths and lengths",
        description="Ask a running server for its next decode batches, and write them to a file: "
        "radix nodes and lengths of each request, no tokens (docs/operating.md). The server must "
        "have been started with SGLANG_PAT_DUMP=FOLDER. Exit status: 0 written, 1 not, 2 wrong "
        "usage.",
    ).add_argument
    add("folder", type=Path, metavar="FOLDER", help="the server's SGLANG_PAT_DUMP")
    add("--out", type=Path, required=True, metavar="FILE", help="where the dump is to go")
    how = "decode batches for which a new plan is made (default: 100)"
    add("--batches", type=int, default=100, metavar="N", help=how)
    how = "and of the steps that keep their plan the first and every N-th, 0: none (default: 100)"
    add("--kept-every", type=int, default=100, metavar="N", help=how)
    how = "end after S seconds with what there is (default: 60)"
    add("--seconds", type=float, default=60.0, metavar="S", help=how)


def run_dump(arguments: argparse.Namespace) -> int:
    """Dumps; exit status 0, or 1 with a line that says what is wrong and what would do."""
    try:
        said = _dumped(arguments)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        wrong = "interrupted" if isinstance(error, KeyboardInterrupt) else error
        print(f"sglang-pat dump: {wrong}", file=sys.stderr)
        return 1
    print(said)
    return 0


def _dumped(arguments: argparse.Namespace) -> str:
    """Asks, waits and collects; what was dumped, in words. Raises ValueError or OSError saying what
    is wrong."""
    mail = Mail(arguments.folder)
    out: Path = arguments.out
    request = DumpRequest.new(arguments.batches, arguments.kept_every, arguments.seconds)
    if not mail.folder.is_dir():
        raise ValueError(f"{mail.folder} is no folder: name the server's SGLANG_PAT_DUMP")
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"--out {out} is a folder, or in none: name a file in one that is there")
    try:
        mail.ask(request)
    except FileExistsError:
        raise ValueError(
            f"{mail.request} is there already: another dump is under way; wait for it, or remove "
            "the file to end it"
        ) from None
    try:
        _wait(mail, request)
    finally:
        mail.withdraw(request)
    answer = mail.answer(request.id)
    dump = read_dump(answer)
    shutil.move(answer, out)
    return _summary(dump, out)


def _wait(mail: Mail, request: DumpRequest) -> None:
    """Until the answer is complete. Raises ValueError if no server takes the request, or one cannot
    answer."""
    answer, error, partial = (path(request.id) for path in (mail.answer, mail.error, mail.partial))

    def is_over() -> bool:
        return answer.exists() or error.exists()

    if not _until(lambda: partial.exists() or is_over(), TAKEN_S):
        raise ValueError(
            f"no server took the request within {TAKEN_S:g} s: is one running on pat, with "
            f"SGLANG_PAT_DUMP={mail.folder.resolve()}? Its log says where it waits"
        )
    with suppress(KeyboardInterrupt):  # what there is by then will do
        _until(is_over, request.seconds + ENDED_S)
    mail.withdraw(request)  # the server ends it now, at the latest
    _until(is_over, ENDED_S)
    if error.exists():
        said = error.read_text(encoding="utf-8").strip()
        with suppress(OSError):
            error.unlink()
        raise ValueError(f"the server could not write the dump: {said}")
    if not answer.exists():
        raise ValueError(f"the server did not end the dump; {partial} is what there is")


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits until it is so, for at most ``seconds``; whether it is."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _summary(dump: Dump, out: Path) -> str:
    made = sum(batch.made for batch in dump.batches)
    kept = len(dump.batches) - made
    why = dump.end.get("end", "cut off")
    if not dump.batches:
        return (
            f"{out}: no batch ({why}): no decode step of several requests ran on pat; see the "
            "server's counters"
        )
    sizes = [len(batch.seq_lens) for batch in dump.batches]
    lines = [
        f"{out}: {made} batches with a new plan, {kept} that kept theirs, of {min(sizes)} to "
        f"{max(sizes)} requests ({why})",
        f"  sglang-pat explain --paths {out} --batch 1",
        f"  python -m sglang_pat.bench.kernel --batches {out}",
    ]
    if left_out := dump.end.get("left_out"):
        lines.insert(
            1,
            f"  {left_out} batches were left out: they came faster than they could be "
            "written, or could not be read; see the server's log",
        )
    return "\n".join(lines)
