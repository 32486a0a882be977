# SPDX-License-Identifier: Apache-2.0
"""Every program prints its help, and the command names what is wrong in one line."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_pat
from sglang_pat import cli

PACKAGE = Path(sglang_pat.__file__).parent
ROOT = Path(__file__).parents[2]


def _programs() -> Iterator[Path]:
    """Files that are run by themselves and parse arguments."""
    beside = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for path in sorted([*PACKAGE.rglob("*.py"), *beside]):
        source = path.read_text()
        if '__name__ == "__main__"' in source and ".parse_args(" in source:
            yield path


def test_every_program_and_command_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A help text with a single % ends --help with a traceback."""
    commands = ("demo", "doctor", "explain", "estimate")
    programs = [*((each, ()) for each in _programs())]
    for program, given in [*programs, *((PACKAGE / "__main__.py", (one,)) for one in commands)]:
        monkeypatch.setattr(sys, "argv", [str(program), *given, "--help"])
        monkeypatch.syspath_prepend(str(program.parent))  # as for a script
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
        assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: "), program


def test_a_native_module_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    """As in a checkout, whose folder has the sources only and comes first on the path."""
    shutil.copytree(PACKAGE, tmp_path / "sglang_pat", ignore=shutil.ignore_patterns("_C.*.so"))
    run = subprocess.run(
        [sys.executable, "-m", "sglang_pat", "--version"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "PYTHONPATH")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("sglang-pat: its native module does not load: No module")
    assert run.stderr.count("\n") == 1 and "run it outside the folder" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--tp", "2"], "--tp 2: doctor looks at server flags only with --model MODEL"),
        (["doctor", "--gpu", "H100"], "--gpu: doctor looks at server flags only with --model"),
        (["explain", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as usage:
        cli.main(arguments)
    assert usage.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: sglang-pat") and message in said
