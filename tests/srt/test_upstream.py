# SPDX-License-Identifier: Apache-2.0
"""The patch to SGLang: it fits, it works on a copy, and without it the plugin is as it was."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

import sglang

from sglang_pat.srt import hook

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "0.5.23-pat.patch"
TOOL = runpy.run_path(str(ROOT / "patches" / "apply.py"))

pytestmark = pytest.mark.skipif(
    metadata.version("sglang") != "0.5.23", reason="the patch is for SGLang 0.5.23"
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched SGLang."""
    folder: Path = TOOL["unpack"](tmp_path_factory.mktemp("copy") / "patched")
    return folder


def test_the_copy_is_the_installed_sglang_but_for_the_patched_files(copy: Path) -> None:
    """Without the patch the plugin does as before, as all other tests have it."""
    found = [Path(folder) / name for folder, _, names in os.walk(copy) for name in names]
    changed = {str(file.relative_to(copy)) for file in found if not file.is_symlink()}
    assert changed == set(re.findall(r"^\+\+\+ b/(.+)$", PATCH.read_text(), re.MULTILINE))
    installed = Path(sglang.__path__[0]).parent
    linked = copy / "sglang" / "version.py"
    assert linked.is_symlink() and linked.samefile(installed / "sglang" / "version.py")
    assert not hook.carries_requests()


def test_a_patch_for_another_sglang_is_refused(tmp_path: Path) -> None:
    text = PATCH.read_text()
    other = tmp_path / "other.patch"
    text = text.replace("target=work_func,", "target=another,", 1)
    other.write_text(text)
    with pytest.raises(TOOL["DoesNotFit"], match=r"one_batch\.py, line \d+: .*0\.5\.23"):
        TOOL["unpack"](tmp_path / "copy", other)
    assert not (tmp_path / "copy").exists()


def test_the_patched_copy_does_what_the_plugin_takes_it_for(copy: Path, tmp_path: Path) -> None:
    """``patched/checks.py``, and the tests of what reads SGLang's caches, on the copy."""
    tests = [ROOT / "tests" / name for name in ("srt/patched/checks.py", "srt/test_radix.py")]
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *tests],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
