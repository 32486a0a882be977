# SPDX-License-Identifier: Apache-2.0
"""docs/walkthrough.md shows what its commands print, and names what is there.

``python tests/test_walkthrough.py`` rewrites the outputs of the page.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.shell import fresh_shell

from sglang_pat import cli

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "walkthrough.md"

# A row of the table of stops: number, links to its files, what to read in them.
ROW = re.compile(r"^\| (\d) \| (.*?) \| (.*) \|$", re.M)
LINK = re.compile(r"\]\(\.\./([^)]+)\)")
COMMAND = re.compile(r"^```console\n\$ (sglang-pat [^\n]*)\n(.*?)^```", re.M | re.S)


def printed(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.main(shlex.split(command)[1:])
    return out.getvalue()


def is_defined(name: str, path: Path) -> bool:
    """Whether a source file defines a class or function of this name, and does not only use it."""
    definition = rf"^\s*(def|class|struct) {name}\b"
    if path.suffix != ".py":
        # What is not indented is no call; a long declaration has its name on a line of its own.
        definition += rf"|^((?!//|#)\S.*[\w>&)] (\w+::)*|    ){name}\("
    return re.search(definition, path.read_text(), re.M) is not None


def rewritten(page: str) -> str:
    """The page with true outputs."""
    return COMMAND.sub(lambda m: f"```console\n$ {m[1]}\n{printed(m[1])}```", page)


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def as_in_a_fresh_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_shell(monkeypatch):
        yield


def test_what_to_read_stands_in_the_stop_s_files(page: str) -> None:
    for _, links, read in (match.groups() for match in ROW.finditer(page)):
        paths = [ROOT / path for path in LINK.findall(links)]
        names = re.findall(r"`([\w.:]+)`", read)
        assert names
        for name in names:
            assert any(is_defined(re.split(r"\.|::", name)[-1], path) for path in paths), name


def test_the_page_names_files_that_exist(page: str) -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", page):
        if "://" not in path:
            assert (PAGE.parent / path).exists(), path
    sources = [p for p in [*ROOT.glob("csrc/**/*"), *ROOT.glob("sglang_pat/**/*")] if p.is_file()]
    for name in re.findall(r"`([\w/]+\.(?:py|cpp|cuh|cu|h))`", page):
        assert any(str(path).endswith("/" + name) for path in sources), name


@pytest.mark.parametrize("command", [m[1] for m in COMMAND.finditer(PAGE.read_text("utf-8"))])
def test_a_command_prints_what_the_page_shows(command: str, page: str) -> None:
    shown = {match[1]: match[2] for match in COMMAND.finditer(page)}
    assert printed(command) == shown[command]


def test_there_are_ten_questions_with_folded_answers(page: str) -> None:
    questions, folded = page.split("<details>")
    asked = re.findall(r"^(\d+)\. ", questions.split("## Ten questions")[1], re.M)
    answered = re.findall(r"^(\d+)\. ", folded.split("</details>")[0], re.M)
    assert asked == answered == [str(n + 1) for n in range(10)]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
