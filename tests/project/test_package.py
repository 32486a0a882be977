# SPDX-License-Identifier: Apache-2.0
"""The installed distribution, as SGLang's plugin loader and a user without a GPU see it."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import sglang_pat
from sglang_pat import _C

ROOT = Path(__file__).resolve().parents[2]

SYSTEM = {b"dev", b"proc", b"sys"}

# What a server process does before it parses its arguments, and what that left behind.
REPORT = """
import argparse, json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
chosen = parser.parse_args(["--model-path", "none", "--attention-backend", "pat"])
print(json.dumps([type(current_platform).__module__, chosen.attention_backend]))
"""
# Importing a module must neither import these, nor load the driver's libraries.
HEAVY = """
import importlib, json, sys
importlib.import_module({module!r})
heavy = [m for m in ("sglang", "torch", "triton") if m in sys.modules]
mapped = open("/proc/self/maps").read()
print(json.dumps(heavy + [lib for lib in ("libcudart", "libcuda.so") if lib in mapped]))
"""


def last_json(code: str, cwd: Path) -> object:
    """What ``code`` prints last in a process without SGLANG_* variables, outside the sources."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=clean, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_tests_run_against_the_installed_package() -> None:
    assert sglang_pat.__file__ is not None
    installed = Path(sglang_pat.__file__).parent
    assert installed != ROOT / "sglang_pat", "the source tree shadows the installed package"
    recorded = {str(f) for f in metadata.files("sglang-pat") or ()}
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    assert {"sglang_pat/py.typed", "sglang_pat/_C.pyi", f"sglang_pat/_C{suffix}"} <= recorded
    sources = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "sglang_pat").rglob("*")
        if p.is_file() and p.suffix not in {".pyc", ".so"}
    }
    assert sources <= recorded, "files of the package that the wheel lacks"


def test_the_extension_names_no_path_of_the_machine_that_built_it() -> None:
    """Of all absolute paths only those that programs open at run time: /proc/self and the like."""
    extension = Path(_C.__file__).read_bytes()
    paths = re.findall(rb"(?:/[\w.+-]{2,})+/[\w.+-]{3,}", extension)
    own = {path for path in paths if len(path) > 9 and path.split(b"/")[1] not in SYSTEM}
    assert not own
    assert bytes(ROOT) not in extension and b"site-packages" not in extension


def test_pat_is_registered_on_the_stock_platform(tmp_path: Path) -> None:
    """SGLang skips the plugins of a distribution whose platform is not the selected one. On ours:
    commands/test_doctor.py, and every server on a CPU."""
    report = last_json(REPORT, tmp_path)
    assert isinstance(report, list)
    assert report[0].startswith("sglang.srt.platforms.") and report[1] == "pat"


@pytest.mark.parametrize("module", ["sglang_pat", "sglang_pat._C", "sglang_pat.srt.plugin"])
def test_importing_touches_neither_sglang_nor_cuda(module: str, tmp_path: Path) -> None:
    assert last_json(HEAVY.format(module=module), tmp_path) == []


def test_cuda_probe_answers_on_every_machine() -> None:
    assert isinstance(_C.cuda_probe(0), str)
    assert _C.cuda_probe(4096).startswith("cuda")  # the call that failed
