# SPDX-License-Identifier: Apache-2.0
"""Wheels as a user gets them: named for manylinux, small, and at work in an empty venv on a machine
without a compiler.

The suite looks at the wheel that ``make install`` built. ``make test-wheel`` sets PAT_WHEELS to the
Pythons of a release: then it is those in dist/, and the doctor and the CPU server too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = os.environ.get("PAT_WHEELS", "").split()
RELEASE = bool(VERSIONS)
of_a_release = pytest.mark.skipif(not RELEASE, reason="make test-wheel asks for it")
# What SGLang's CPU server calls of the system; compilers are not among it.
SYSTEM_TOOLS = ("lscpu",)
# The glibc of SGLang's own wheel: an older system cannot install that one.
GLIBC = (2, 34)


def _release_module() -> Any:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "release" / "wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheels = _release_module()


@pytest.fixture(scope="module", params=VERSIONS or [OURS])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tag = f"cp{version.replace('.', '')}"
    if RELEASE:
        (found,) = wheels.DIST.glob(f"*-{tag}-manylinux_*.whl")
        return Path(found)
    built = list((wheels.BUILD / "wheel").glob(f"*-{tag}-linux_*.whl"))
    if not built or not (wheels.TOOLS / "auditwheel").is_file():
        pytest.skip("make install builds a wheel and installs auditwheel, and did not run here")
    return Path(wheels.repair(built[0], tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def venv(wheel: Path, version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv of that Python with the wheel. For the Python that runs the tests, all other packages
    are those of its environment, SGLang among them; others get numpy."""
    python = sys.executable if version == OURS else wheels.find_python(version)
    folder = tmp_path_factory.mktemp(f"venv{version}")
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    if version == OURS:
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    else:
        subprocess.run([*pip, "--only-binary=:all:", "numpy"], check=True)
    return folder


@pytest.fixture(scope="module")
def venv_with_sglang(venv: Path, version: str) -> Path:
    if version != OURS:
        pytest.skip("only the venv of this Python has torch and SGLang, which are 11 GB")
    for tool in SYSTEM_TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (venv / "bin" / tool).symlink_to(found)
    return venv


def _run(venv: Path, *command: str | Path, seconds: float = 300) -> str:
    """What a program of the venv prints, with nothing else on PATH: no compiler for one."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CUDACXX", "CXX") and not name.startswith("SGLANG_")
    }
    run = subprocess.run(
        [venv / "bin" / command[0], *command[1:]],
        cwd=venv,
        env=kept | {"PATH": str(venv / "bin")},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_wheel_is_named_for_the_systems_that_run_sglang_and_small(wheel: Path) -> None:
    oldest = re.search(r"-manylinux_(\d+)_(\d+)_", wheel.name)
    assert oldest is not None and (int(oldest[1]), int(oldest[2])) <= GLIBC, wheel.name
    assert wheel.stat().st_size <= wheels.MAX_BYTES == 30_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert len([name for name in names if name.endswith(".so")]) == 1
    assert not [name for name in names if ".libs/" in name]  # nothing had to be added


def test_planning_and_decode_on_the_cpu(venv: Path) -> None:
    printed = _run(venv, "python", ROOT / "tests" / "kit" / "installed.py")
    where, worst = printed.split()
    assert Path(where).is_relative_to(venv)
    assert 0 < float(worst) < 1e-5


def test_explain_draws_a_plan(venv_with_sglang: Path) -> None:
    printed = _run(venv_with_sglang, "sglang-pat", "explain")
    assert printed.startswith("<Plan: 3 queries") and "tree:\n" in printed


@of_a_release
def test_the_doctor_finds_nothing_to_repair(venv_with_sglang: Path) -> None:
    report = _run(venv_with_sglang, "sglang-pat", "doctor")
    assert str(venv_with_sglang) in report
    assert "entry point pat " in report and "entry point pat_cpu" in report


@of_a_release
@pytest.mark.timeout(1800)
def test_a_cpu_server(venv_with_sglang: Path) -> None:
    """SGLang's default combination: tokens are the stock server's, and prefixes are packed."""
    tests = ROOT / "tests" / "serving" / "test_tokens.py"
    command = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
    _run(venv_with_sglang, *command, "-k", "page1-overlap-rust", seconds=1700)


def test_a_wheel_that_is_too_large_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "MAX_BYTES", 10**6)
    with pytest.raises(wheels.ReleaseError, match="bytes, at most 1000000 are allowed"):
        wheels.repair(wheel, tmp_path)
    assert not list(tmp_path.iterdir())
