# SPDX-License-Identifier: Apache-2.0
"""What a scheduler did in a run, function by function, out of py-spy's recordings.

A stall in the host's code, as of a kernel that is loaded at its first launch, a compiler or an
allocation, is a call that lasts long once. ``python -m sglang_pat.bench.serving.spy FIRST LAST``
prints the functions whose longest single call lasted longer in one recording than in the other.
``... spy RECORDING --steps N`` prints what each function takes of a decode step, waits left out, so
what pat does beside what SGLang itself does before a step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEDULER = "sglang::scheduler"  # how the title of a scheduler's process begins
RATE = 1000  # samples a second
SHOWN, SHOWN_MS = 25, 10.0
SHOWN_US = 5.0
# What SGLang does on the host for a step, before it and after it, and what pat does.
HOST_PARTS = (
    "Scheduler.get_next_batch_to_run (",
    "ForwardBatch.init_new (",
    "Scheduler.process_batch_result (",
    "sglang_pat/",
)
# In these the scheduler does nothing: it waits for the GPU or for requests.
WAITS = ("Event.synchronize (", "Stream.synchronize (", "Poller.poll (")
_ATTACH_S, _END_S = 1.0, 30.0


def scheduler_of(group: int) -> int:
    """The process id of the first scheduler in a process group.

    Raises:
        ProcessLookupError: there is none.
    """
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == group:
                title = (folder / "cmdline").read_bytes().decode(errors="replace")
                if title.startswith(SCHEDULER):
                    found.append(int(folder.name))
        except (ProcessLookupError, FileNotFoundError):
            continue  # ended meanwhile
    if not found:
        raise ProcessLookupError(f"no process named {SCHEDULER} in the process group {group}")
    return min(found)


@contextmanager
def recording(group: int, path: Path) -> Iterator[None]:
    """Record the scheduler of a server, by its process group, to ``path`` (Chrome's trace format).

    Raises:
        FileNotFoundError: py-spy is not installed.
        ProcessLookupError: no scheduler is there, or py-spy may not look into it.
    """
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    if not Path(program).is_file():
        raise FileNotFoundError("--spy needs the program py-spy: pip install py-spy")
    command = [
        *(program, "record", "--pid", str(scheduler_of(group)), "--output", str(path)),
        # Threads that wait for a driver count as idle; a paused process would measure py-spy.
        *("--format", "chrometrace", "--rate", str(RATE), "--idle", "--threads", "--nonblocking"),
    ]
    log = path.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        time.sleep(_ATTACH_S)
        if process.poll() is not None:
            raise ProcessLookupError(f"py-spy ended at once: {log.read_text(errors='replace')}")
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)  # it writes what it has
            process.wait(_END_S)


def longest_calls(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of the longest single call of every function, as ``name (file)``.

    ``events``: of Chrome's trace format, begins (``B``) and ends (``E``) in the order of time.
    """
    longest: dict[str, float] = {}
    for name, ms, _, _ in _calls(events):
        longest[name] = max(longest.get(name, 0.0), ms)
    return longest


def total_times(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds in all calls of every function, with what they call and without ``WAITS``, as
    ``name (file)``. A call within a call of the same function is not counted again. ``events``: as
    of ``longest_calls``."""
    total: defaultdict[str, float] = defaultdict(float)
    for name, ms, waited, within_itself in _calls(events):
        total[name] += 0.0 if within_itself else ms - waited
    return dict(total)


def _calls(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float, bool]]:
    """Of each call that has an end: the function, milliseconds, how many of them are within
    ``WAITS``, and whether it was made within another call of the same function."""
    stacks: defaultdict[Any, list[_Call]] = defaultdict(list)
    for event in events:
        stack = stacks[event["tid"]]
        if event["ph"] == "B":
            file = event.get("args", {}).get("filename", "").rpartition("site-packages/")[2]
            stack.append(_Call(f"{event['name']} ({file})", event["ts"]))
        elif event["ph"] == "E" and stack:
            call = stack.pop()
            ms = (event["ts"] - call.began) / 1e3
            waited = ms if call.name.startswith(WAITS) else call.waited
            if stack:
                stack[-1].waited += waited
            yield call.name, ms, waited, any(call.name == outer.name for outer in stack)


@dataclass(slots=True)
class _Call:
    name: str
    began: float  # us
    waited: float = 0.0  # ms, in the calls within it that have ended


def of_a_step(recording: Path, steps: int, parts: Sequence[str] = ("",)) -> list[str]:
    """A line for every function that takes at least ``SHOWN_US`` of a step on the main thread,
    without ``WAITS``, and whose name, as of ``total_times``, holds one of ``parts``."""
    total = total_times(_of_main_thread(_events(recording)))
    lines = [f"us a step, of {steps} in {recording.name}:"]
    for name, ms in sorted(total.items(), key=lambda each: -each[1]):
        if (us := 1e3 * ms / steps) >= SHOWN_US and any(part in name for part in parts):
            lines.append(f"{us:9.1f}  {name}")
    return lines


def _of_main_thread(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """py-spy names a thread in its first frame. Others wait in C code that it cannot name."""
    main = {event["tid"] for event in events if event["name"].endswith("): MainThread")}
    return [event for event in events if event["tid"] in main]


def compare(first: Path, last: Path) -> list[str]:
    """A line for every function whose longest call was at least ``SHOWN_MS`` longer in ``first``,
    the largest difference first; callers stand beside what they called."""
    theirs = [longest_calls(_events(path)) for path in (first, last)]
    more = sorted(
        ((ms - theirs[1].get(name, 0.0), ms, name) for name, ms in theirs[0].items()), reverse=True
    )
    lines = [f"longest single calls, {first.name} against {last.name}:"]
    lines += [
        f"{ms:9.1f} ms, {ms - by:7.1f} in the last  {name}"
        for by, ms, name in more[:SHOWN]
        if by >= SHOWN_MS
    ]
    return lines if len(lines) > 1 else [*lines, f"none was {SHOWN_MS:g} ms longer"]


def _events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    events: list[dict[str, Any]] = found["traceEvents"] if isinstance(found, dict) else found
    return events


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sglang_pat.bench.serving.spy", description=__doc__)
    parser.add_argument("first", type=Path, help="a recording of the first run, or the only one")
    parser.add_argument("last", type=Path, nargs="?", help="a recording of a later one")
    parser.add_argument("--steps", type=int, metavar="N", help="decode steps of the only one")
    options = parser.parse_args(arguments)
    if (options.last is None) != bool(options.steps):
        parser.error("give two recordings, or one with --steps N")
    if options.steps:
        print("\n".join(of_a_step(options.first, options.steps)))
    else:
        print("\n".join(compare(options.first, options.last)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
