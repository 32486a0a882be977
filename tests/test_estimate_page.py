# SPDX-License-Identifier: Apache-2.0
"""docs/estimate.md shows what its program and commands print.

``python tests/test_estimate_page.py`` rewrites the outputs of the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from kit.shell import fresh_shell

from sglang_pat import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "estimate.md"
COMMAND = re.compile(r"^```console\n\$ (sglang-pat [^\n]*)\n(.*?)^```", re.M | re.S)
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def printed(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.main(shlex.split(command)[1:])
    return out.getvalue()


def rewritten(page: str, folder: Path) -> str:
    """The page with what its commands print in ``folder``, where its program has run."""
    (program,) = PROGRAM.findall(page)
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(program, str(PAGE), "exec"), {})
        return COMMAND.sub(lambda m: f"```console\n$ {m[1]}\n{printed(m[1])}```", page)
    finally:
        os.chdir(before)


def test_the_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(COMMAND.findall(page)) == 2
    with fresh_shell(monkeypatch):
        assert rewritten(page, tmp_path) == page


def test_the_page_names_files_that_exist() -> None:
    for path in re.findall(r"\]\(([^)#]+)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / path).exists(), path


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), Path(scratch)), "utf-8")
    sys.exit(0)
