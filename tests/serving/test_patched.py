# SPDX-License-Identifier: Apache-2.0
"""A server on SGLang with our patch in it: the same tokens, with no hook on its forward batches.

All token tests on such a copy: ``python patches/apply.py COPY``, then ``PYTHONPATH=COPY pytest
tests/serving/test_tokens.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config
from .workloads import WORKLOADS

APPLY = Path(__file__).parents[2] / "patches" / "apply.py"

pytestmark = pytest.mark.skipif(
    version("sglang") != "0.5.23", reason="the patch is for SGLang 0.5.23"
)


def test_a_patched_server_answers_the_same_without_the_hook(
    serve: Serve, stock: dict[str, list[Answer]], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, APPLY, tmp_path], check=True, capture_output=True)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    debug = ("--log-level", "debug")
    server = serve(Config("patched", args=debug, env=(("PYTHONPATH", path),)))
    assert "takes the requests of a step from SGLang's forward batch" in server.text()
    before = server.counters()
    work = WORKLOADS["multi_level"]
    for _ in range(2):
        answers = server.generate(work.prompts, work.new_tokens)
        assert disagreements(answers, stock["multi_level"]) == []
    counted = server.counters() - before
    assert counted.packed_steps >= 2 * (max(work.new_tokens) - 1 - 2)
    assert not counted.fallbacks
