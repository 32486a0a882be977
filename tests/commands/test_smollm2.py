# SPDX-License-Identifier: Apache-2.0
"""The demo's real model: its folder is made once, whole, and holds what the package brings."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest

from sglang_pat.demo import smollm2


def test_the_slower_of_two_processes_takes_the_others_folder(
    tmp_path: Path, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That answers: tests/commands/test_examples.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, convert = tmp_path / "sglang_pat" / smollm2_folder.name, smollm2._convert

    def overtaken(source: Path, made: Path) -> None:
        convert(source, made)
        copytree(made, folder)

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    assert smollm2.model_folder() == smollm2.model_folder() == folder  # once it is there
    assert [*folder.parent.iterdir()] == [folder]  # nothing half made stays
    made, known = (
        {file.name: file.stat().st_size for file in each.iterdir()}
        for each in (folder, smollm2_folder)
    )
    assert made == known
