# SPDX-License-Identifier: Apache-2.0
"""examples/Dockerfile, without a container: what it pins, what its one RUN installs and takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "examples" / "Dockerfile"
IGNORED = ROOT / "examples" / "Dockerfile.dockerignore"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [
        (name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)
    ]


@pytest.fixture(scope="module")
def command(instructions: list[tuple[str, str]]) -> str:
    """What its one RUN runs."""
    (run,) = [rest for name, rest in instructions if name == "RUN"]
    mount, command = run.split(" ", 1)
    assert mount == "--mount=type=bind,target=/mnt/pat,rw"
    return command


def test_it_is_sglangs_image_of_the_version_that_is_tested(
    instructions: list[tuple[str, str]],
) -> None:
    (version,) = re.findall(r'"sglang==([\d.]+)"', PROJECT)
    assert [name for name, _ in instructions] == ["ARG", "FROM", "ARG", "RUN"]
    assert [rest for _, rest in instructions[:3]] == [
        f"SGLANG_TAG=v{version}",
        "lmsysorg/sglang:${SGLANG_TAG}",
        "PAT=.",
    ]


def test_its_command_is_one_that_a_shell_reads(command: str) -> None:
    subprocess.run(["sh", "-n", "-c", command], check=True)
    assert command.startswith("python3 -m pip install ")
    # SGLang's packages stay; pip fetches the compiler, as pyproject.toml asks for it.
    assert "--no-deps" in command and "--no-build-isolation" not in command
    assert re.search(r'"nvidia-cuda-nvcc==', PROJECT.partition("[project]")[0])


@pytest.mark.parametrize(
    ("pat", "expected"), [(".", "."), ("dist/*-cp312-*.whl", "dist/sglang_pat-1-cp312-a.whl")]
)
def test_it_installs_the_sources_or_the_wheel_of_the_images_python(
    pat: str, expected: str, command: str, tmp_path: Path
) -> None:
    """Run with a python3 that only says how it was called."""
    (tmp_path / "dist").mkdir()
    for python in ("cp311", "cp312"):
        (tmp_path / "dist" / f"sglang_pat-1-{python}-a.whl").touch()
    python3 = tmp_path / "python3"
    python3.write_text('#!/bin/sh\necho "$@"\n')
    python3.chmod(0o755)
    ran = subprocess.run(
        ["sh", "-c", command.replace("/mnt/pat", str(tmp_path))],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PAT": pat},
        capture_output=True,
        text=True,
        check=True,
    )
    install, check = ran.stdout.splitlines()
    assert install.split()[-1] == f"{tmp_path}/{expected}"
    assert check == "-c from sglang_pat import _C"


def test_what_a_build_of_the_sources_takes_is_not_ignored() -> None:
    rules = [line for line in IGNORED.read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    fields = (
        r'^readme = "(.+)"',
        r'^license-files = \["(.+)"\]',
        r'^cmake\.source-dir = "(.+)"',
        r'^wheel\.packages = \["(.+)"\]',
    )
    needed = {name for field in fields for name in re.findall(field, PROJECT, re.M)}
    assert len(needed) == len(fields)
    assert let_in == needed | {"pyproject.toml", "dist"}
