# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate`` run in the tests' own process."""

from __future__ import annotations

import pytest

from sglang_pat import cli


def estimated(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What it prints."""
    assert cli.main(["estimate", *map(str, arguments)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that it ends with instead."""
    assert cli.main(["estimate", *map(str, arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sglang-pat estimate: ") and said.err.count("\n") == 1
    return said.err
