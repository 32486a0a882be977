# SPDX-License-Identifier: Apache-2.0
"""Every option of every program says what it is for."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from kit.parsers import with_commands

import sglang_pat
from sglang_pat import cli

PACKAGE = Path(sglang_pat.__file__).parent
ROOT = Path(__file__).parent.parent


def _programs() -> Iterator[Path]:
    """Files that are run by themselves and parse arguments."""
    beside = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for path in sorted([*PACKAGE.rglob("*.py"), *beside]):
        source = path.read_text()
        if '__name__ == "__main__"' in source and ".parse_args(" in source:
            yield path


class _Caught(Exception):
    """What a program parses its arguments with."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _catch(parser: argparse.ArgumentParser, *_args: object, **_options: object) -> NoReturn:
    raise _Caught(parser)


def _without_help(parser: argparse.ArgumentParser) -> list[str]:
    """Arguments without a help text, those of subcommands included."""
    missing = []
    for command in with_commands(parser):
        for action in command._actions:
            named = action.option_strings or [action.dest]
            if not isinstance(action, argparse._SubParsersAction) and not action.help:
                missing.append(f"{command.prog}: {' '.join(named)}")
    return missing


@pytest.fixture(autouse=True)
def same_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("program", _programs(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_option_of_a_program_has_a_help_text(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", _catch)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.syspath_prepend(str(program.parent))  # as for a script
    with pytest.raises(_Caught) as caught:
        runpy.run_path(str(program), run_name="__main__")
    assert _without_help(caught.value.parser) == []
    assert caught.value.parser.description
    assert caught.value.parser.format_help()


@pytest.mark.parametrize(
    "command", list(with_commands(cli.make_parser())), ids=lambda parser: parser.prog
)
def test_help_of_a_command_can_be_printed(command: argparse.ArgumentParser) -> None:
    """A help text with a single % ends --help with a traceback."""
    assert command.format_help().startswith(f"usage: {command.prog}")
    assert command.description and _without_help(command) == []


def _run_module(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m sglang_pat`` in a folder, which comes first on its path."""
    return subprocess.run(
        [sys.executable, "-m", "sglang_pat", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_version(tmp_path: Path) -> None:
    run = _run_module(tmp_path, "--version")
    assert (run.returncode, run.stdout) == (0, f"sglang-pat {sglang_pat.__version__}\n")


@pytest.mark.parametrize("command", ["--version", "doctor", "explain"])
def test_a_native_module_that_does_not_load_is_one_line(tmp_path: Path, command: str) -> None:
    """As in a checkout, whose folder has the sources only."""
    sources = Path(sglang_pat.__file__).parent
    shutil.copytree(sources, tmp_path / "sglang_pat", ignore=shutil.ignore_patterns("_C.*.so"))
    run = _run_module(tmp_path, command)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("sglang-pat: its native module does not load: No module")
    assert run.stderr.count("\n") == 1 and "run it outside the folder" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--tp", "2"], "--tp 2: doctor looks at server flags only with --model MODEL"),
        (["doctor", "--gpu", "H100"], "--gpu: doctor looks at server flags only with --model"),
        (["demo", "--model", "M"], "unrecognized arguments: --model M"),
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


def test_a_demo_without_its_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sglang-pat demo: --device cuda: there is no CUDA device")
    assert said.count("\n") == 1 and "give cpu" in said
