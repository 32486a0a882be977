# SPDX-License-Identifier: Apache-2.0
"""The demo's real model: its folder is made once, whole, and holds what the package brings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.forks import Fork

from sglang_pat.demo import smollm2


def test_two_processes_make_one_folder(tmp_path: Path, smollm2_folder: Path) -> None:
    """That answers: tests/commands/test_examples.py."""
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    logs, errors = ([tmp_path / f"{n}.{kind}" for n in range(2)] for kind in ("log", "errors"))
    places = zip(logs, errors, strict=True)
    asked = [Fork(["sglang_pat.demo.smollm2"], env, tmp_path, *place) for place in places]
    assert [process.wait(300) for process in asked] == [0, 0]
    (name,) = {log.read_text().strip() for log in logs}
    (folder,) = (tmp_path / "cache" / "sglang_pat").iterdir()  # nothing half made stays
    assert Path(name) == folder
    made, known = (
        {file.name: file.stat().st_size for file in each.iterdir()}
        for each in (folder, smollm2_folder)
    )
    assert made == known


def test_without_the_package_the_line_that_fetches_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(smollm2.NoPackage, match=smollm2.FETCH):
        smollm2.model_folder()
    assert not list(tmp_path.iterdir())
    made = tmp_path / "sglang_pat" / "smollm2-135m-instruct"
    made.mkdir(parents=True)
    assert smollm2.model_folder() == made  # what was made once needs no package
