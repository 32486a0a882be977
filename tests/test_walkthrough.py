# SPDX-License-Identifier: Apache-2.0
"""docs/walkthrough.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "walkthrough.md"

# A row of the table of stops: number, links to its files, what to read in them.
ROW = re.compile(r"^\| (\d) \| (.*?) \| (.*) \|$", re.M)
LINK = re.compile(r"\]\(\.\./([^)]+)\)")


def is_defined(name: str, path: Path) -> bool:
    """Whether a source file defines a class or function of this name, and does not only use it."""
    definition = rf"^\s*(def|class|struct) {name}\b"
    if path.suffix != ".py":
        # What is not indented is no call; a long declaration has its name on a line of its own.
        definition += rf"|^((?!//|#)\S.*[\w>&)] (\w+::)*|    ){name}\("
    return re.search(definition, path.read_text(), re.M) is not None


def test_what_to_read_stands_in_the_stop_s_files() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 8
    for _, links, read in rows:
        paths = [ROOT / path for path in LINK.findall(links)]
        for name in re.findall(r"`([\w.:]+)`", read):
            assert any(is_defined(re.split(r"\.|::", name)[-1], path) for path in paths), name


def test_the_page_names_files_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#]+)\)", page):
        assert (PAGE.parent / path).exists(), path
    sources = [p for p in [*ROOT.glob("csrc/**/*"), *ROOT.glob("sglang_pat/**/*")] if p.is_file()]
    for name in re.findall(r"`([\w/]+\.(?:py|cpp|cuh|cu|h))`", page):
        assert any(str(path).endswith("/" + name) for path in sources), name
