# SPDX-License-Identifier: Apache-2.0
"""What py-spy's recordings of a scheduler say: long calls, and what functions take of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.serving import spy


def _call(name: str, phase: str, ms: float, thread: int = 1) -> dict[str, Any]:
    args = {"filename": "/venv/site-packages/kit.py"}
    return {"name": name, "ph": phase, "ts": 1e3 * ms, "tid": thread, "args": args}


def test_what_lasted_longer_in_the_first_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [_call("step", "B", 0), _call("load", "B", 5), _call("wait", "B", 6, thread=2)]
    first += [_call("load", "E", 205), _call("step", "E", 210), _call("wait", "E", 7, thread=2)]
    last = [_call("step", "B", 0), _call("step", "E", 8), _call("step", "B", 8)]
    assert spy.longest_calls(first) == {
        "step (kit.py)": 210,
        "load (kit.py)": 200,
        "wait (kit.py)": 1,
    }
    assert spy.longest_calls(last) == {"step (kit.py)": 8}  # the second has no end
    files = [tmp_path / "first.json", tmp_path / "last.json"]
    for file, events in zip(files, (first, last), strict=True):
        file.write_text(json.dumps(events))
    assert spy.main([*map(str, files)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "first.json against last.json" in heading
    assert [line.split()[-2] for line in lines] == ["step", "load"]  # the wait is too short


def test_what_a_function_waits_for_is_not_its_own_time() -> None:
    events = [
        *(_call("step", "B", 0), _call("result", "B", 1), _call("Event.synchronize", "B", 2)),
        *(_call("Poller.poll", "B", 3), _call("Poller.poll", "E", 4)),  # not counted twice
        *(_call("Event.synchronize", "E", 7), _call("result", "E", 8), _call("step", "E", 9)),
    ]
    assert spy.total_times(events) == {
        "step (kit.py)": 4,
        "result (kit.py)": 2,
        "Event.synchronize (kit.py)": 0,
        "Poller.poll (kit.py)": 0,
    }
    assert spy.longest_calls(events)["step (kit.py)"] == 9  # a stall may be a wait


def test_what_functions_take_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Microseconds of the main thread; a call within a call of the same function counts once."""
    reporter = "thread (8): sglang-pat-stats"
    events = [
        *(_call(reporter, "B", 0, thread=2), _call("sleep", "B", 0, thread=2)),
        *(_call("sleep", "E", 9, thread=2), _call(reporter, "E", 9, thread=2)),
        _call("thread (7): MainThread", "B", 0),
        *(_call("step", "B", 0), _call("plan", "B", 0.1), _call("plan", "B", 0.15)),
        *(_call("plan", "E", 0.25), _call("plan", "E", 0.3), _call("step", "E", 1)),
        *(_call("step", "B", 2), _call("step", "E", 2.6)),
    ]
    file = tmp_path / "spy.json"
    file.write_text(json.dumps(events))
    assert spy.main([str(file), "--steps", "2"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "of 2 in spy.json" in heading
    assert [line.split()[:2] for line in lines] == [["800.0", "step"], ["100.0", "plan"]]
    assert spy.of_a_step(file, 2, ("plan (", "draw (")) == [heading, lines[1]]
    for wrong in ([str(file)], [str(file), str(file), "--steps", "2"]):
        with pytest.raises(SystemExit, match="2"):
            spy.main(wrong)
