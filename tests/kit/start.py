# SPDX-License-Identifier: Apache-2.0
"""How the tests start servers on a CPU: sooner, and without keeping the cores from others."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent.parent
SERVING = TESTS / "serving"
STARTUP = SERVING / "startup"  # what a CPU server's processes run before all else
PLUGINS = SERVING / "plugins"  # of the tests, for SGLang
# Threads that spin while they wait starve the server on a small or busy machine.
NO_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE"}


def search_path(*folders: Path) -> dict[str, str]:
    """Environment that puts folders before those that Python searches here, and the tests' own, out
    of which a server loads ``kit.forcing``."""
    paths = [*map(str, (*folders, TESTS)), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cpu_server(*, fork: bool = True, plugins: bool = False) -> dict[str, str]:
    """Environment of a CPU server. ``fork``: its scheduler and detokenizer are forks of a process
    that has imported SGLang (``startup``), which is not for servers that are to die. ``plugins``:
    load the tests' own into it."""
    env = NO_SPINNING | search_path(STARTUP, *[PLUGINS] * plugins)
    return env | {"PAT_TESTS_FORK": "1"} if fork else env
