# SPDX-License-Identifier: Apache-2.0
"""Programs of the tests as forks of one process that has imported SGLang: servers on a CPU, and
commands of ours.

Each of a server's processes would import some 9,000 modules, which takes longer than all that a
test does with the server. So multiprocessing's fork server imports them once (``imported.py``) and
forks the program, and, when the program asks for new processes, the scheduler and the detokenizer.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_pat.config import CPU_PLATFORM
from sglang_pat.demo.counters import Counters, read_counters
from sglang_pat.demo.server import Server

TESTS = Path(__file__).parent.parent
PLUGINS = TESTS / "serving" / "plugins"  # of the tests, for SGLang
# How variables begin that SGLang, pat and the tests' plugins read when they need them, not when
# they are imported.
READ_LATE = (
    *("SGLANG_PAT_", "PAT_", "TMPDIR", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"),
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_MAMBA_CONV_DTYPE", "PYTEST_"),
    *("SGLANG_PLUGINS", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
)
# Threads that spin while they wait starve the server on a small or busy machine.
NO_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE"}
# Seconds between two times that forks write pat's counters: who reads them waits for as long.
FLUSH_S = 0.05
_prepare: Any = multiprocessing.spawn.prepare
_server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]


def search_path(*folders: Path) -> dict[str, str]:
    """Environment that puts folders before those that Python searches here, and the tests' own, out
    of which a server loads ``kit.forcing``."""
    paths = [*map(str, (*folders, TESTS)), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cpu_server(*, plugins: bool = False) -> dict[str, str]:
    """Environment of a CPU server. ``plugins``: load the tests' own into it."""
    return NO_SPINNING | search_path(*[PLUGINS] * plugins)


class Fork:
    """A forked ``python -m`` with the arguments ``program``: what ``subprocess.Popen`` would be for
    a started one. ``log`` gets its output, and its errors without a file ``errors``. ``group``: of
    processes, instead of one of its own."""

    def __init__(
        self,
        program: Sequence[str],
        env: Mapping[str, str],
        cwd: Any,
        log: Path,
        errors: Any = "",
        group: int = 0,
    ) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kit.imported"])
        early = {"SGLANG_PLATFORM": CPU_PLATFORM, "PYTHONSAFEPATH": "1"} | cpu_server()
        with pytest.MonkeyPatch.context() as patch:
            for name, text in early.items():
                patch.setenv(name, text)
            _server.ensure_running()
        given = (list(program), dict(env), str(cwd), group, str(log), str(errors or log))
        self._process: Any = context.Process(target=_become, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_server(server: Server) -> Any:
    """What ``Server._spawn`` does, by a fork: not for variables beyond ``READ_LATE`` that other
    servers do not have."""
    program = server._command[2:]  # without the interpreter and its -m
    return Fork(program, server._env, server._tmp.name, server.log)


def start_server_apart(server: Server) -> Any:
    """The same for any variables: the fork of a process which imports SGLang with them."""
    with server.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _APART, str(server.log), *server._command[2:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=server._env,
            cwd=server._tmp.name,
            start_new_session=True,
        )


_APART = """
import os, signal, sys
from kit.forks import Fork
fork = Fork(sys.argv[2:], os.environ, os.getcwd(), sys.argv[1], group=os.getpgrp())
try:
    fork.wait()
except KeyboardInterrupt:
    fork.send_signal(signal.SIGINT)
sys.exit(fork.wait())
"""


def counters_of(server: Server) -> Counters:
    """What ``Server.counters`` reads, of a fork. As there, a flush may be late by a quarter of a
    second."""
    return read_counters(server.url, flush_s=FLUSH_S + 0.25)


def run(
    program: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of ``python -m`` with the arguments ``program``.

    Raises subprocess.TimeoutExpired, and then kills what it has started."""
    with tempfile.TemporaryDirectory() as folder:
        log, errors = Path(folder, "output"), Path(folder, "errors")
        fork = Fork(program, env, cwd, log, errors)
        try:
            code = fork.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(fork.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(program, code, log.read_text(), errors.read_text())


def _become(
    program: list[str], env: dict[str, str], cwd: str, group: int, log: str, errors: str
) -> None:
    """Make this fork what a new process with that environment would be, run the program, and
    end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for file in (log, errors):
        Path(file).write_bytes(b"")
    place = (env, group or os.getpid(), log, errors)
    _enter(*place)
    os.chdir(cwd)
    tempfile.tempdir = None  # it may have been looked up with another TMPDIR
    random.seed()
    _fork_what_is_spawned(place)
    code: object = 0
    sys.argv = program
    try:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # SGLang kills the processes that it has started, and does not find those of the fork server.
    for child in multiprocessing.active_children():
        child.kill()
    # Python would then free all that was imported, which copies the memory that forks share.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _enter(env: dict[str, str], group: int, log: str, errors: str) -> None:
    """Make environment, process group and files those of a program."""
    os.setpgid(0, group)
    for number, name in ((1, log), (2, errors)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    asked = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in asked if folder and folder not in sys.path]
    importlib.invalidate_caches()


def _fork_what_is_spawned(place: tuple[Any, ...]) -> None:
    """Have the fork server make this program's new processes, too, each of which enters ``place``,
    with the environment that the program has by then."""
    context: Any = multiprocessing.context._default_context  # type: ignore[attr-defined]
    data_of: Any = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return data_of(name) | {"place": (dict(os.environ), *place[1:])}

    def set_start_method(method: str, force: bool = False) -> None:
        context.set_start_method("forkserver" if method == "spawn" else method, force)

    spawn: Any = multiprocessing.spawn
    spawn.get_preparation_data = get_preparation_data
    multiprocessing.set_start_method = set_start_method  # type: ignore[assignment]
    _server.ensure_running = lambda: None  # it does, though this process has not started it


def prepare(data: dict[str, Any]) -> None:
    """``multiprocessing.spawn.prepare`` in a fork: of a test's process, or of a program."""
    if place := data.pop("place", None):
        _enter(*place)
        # Where SGLang sends word that a process dies.
        psutil.Process.parent = lambda self: psutil.Process(place[1])
    _prepare(data)
