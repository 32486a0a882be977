# SPDX-License-Identifier: Apache-2.0
"""examples/Dockerfile, without a container: what it pins, what its one RUN installs and takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
DOCKERFILE = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def test_it_is_sglangs_image_of_the_version_that_is_tested() -> None:
    (version,) = re.findall(r'"sglang==([\d.]+)"', PROJECT)
    assert f"\nARG SGLANG_TAG=v{version}\nFROM lmsysorg/sglang:${{SGLANG_TAG}}\n" in DOCKERFILE


@pytest.mark.parametrize(
    ("pat", "expected"), [(".", "."), ("dist/*-cp312-*.whl", "dist/sglang_pat-1-cp312-a.whl")]
)
def test_it_installs_the_sources_or_the_wheel_of_the_images_python(
    pat: str, expected: str, tmp_path: Path
) -> None:
    """Its one RUN, with a python3 that only says how it was called."""
    (command,) = re.findall(
        r"^RUN --mount=type=bind,target=/mnt/pat,rw +(.*)$", DOCKERFILE, re.MULTILINE
    )
    (tmp_path / "dist").mkdir()
    for python in ("cp311", "cp312"):
        (tmp_path / "dist" / f"sglang_pat-1-{python}-a.whl").touch()
    python3 = tmp_path / "python3"
    python3.write_text('#!/bin/sh\necho "$@"\n')
    python3.chmod(0o755)
    install, check = subprocess.run(
        ["sh", "-c", command.replace("/mnt/pat", str(tmp_path))],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PAT": pat},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    # SGLang's packages stay; pip fetches the compiler, as pyproject.toml asks for it.
    assert "--no-deps" in install and "--no-build-isolation" not in install
    assert install.split()[-1] == f"{tmp_path}/{expected}"
    assert check == "-c from sglang_pat import _C"


def test_what_a_build_of_the_sources_takes_is_not_ignored() -> None:
    rules = (EXAMPLES / "Dockerfile.dockerignore").read_text().splitlines()
    ignored, *let_in = [rule for rule in rules if not rule.startswith("#")]
    fields = r"readme|license-files|cmake\.source-dir|wheel\.packages"
    needed = set(re.findall(rf'^(?:{fields}) = \[?"(.+)"\]?$', PROJECT, re.M))
    assert ignored == "*" and len(needed) == 4
    assert {rule[1:] for rule in let_in if rule[0] == "!"} == needed | {"pyproject.toml", "dist"}
