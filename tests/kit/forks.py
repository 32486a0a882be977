# SPDX-License-Identifier: Apache-2.0
"""Programs of the tests as forks of one process that has imported SGLang (``forker.py``): servers
on a CPU, and commands of ours.

Each of a server's processes would import some 9,000 modules, which takes longer than all that a
test does with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from kit.start import STARTUP, search_path
from sglang_pat.demo.server import Server

PROGRAM = Path(__file__).with_name("forker.py")
STARTED_S = 300.0  # until SGLang is imported
POLL_S = 0.05  # between two looks at whether a fork has ended
# How variables begin that SGLang, pat and the tests' plugins read when they need them, not when
# they are imported.
READ_LATE = (
    *("SGLANG_PAT_", "PAT_", "TMPDIR", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"),
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_MAMBA_CONV_DTYPE", "PYTEST_"),
    *("SGLANG_PLUGINS", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
)
LOST = -1  # exit code of a fork of which nothing is known any more


class Forked:
    """A forked program: what ``subprocess.Popen`` would give for a started one."""

    def __init__(self, pid: int, ended: Path, forker: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        self._ended, self._forker = ended, forker

    def poll(self) -> int | None:
        lost = self._forker.poll() is not None  # before: the last code may come meanwhile
        if self._ended.exists():
            return int(self._ended.read_text())
        return LOST if lost else None  # nobody waits for it any more; who asks kills its group

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forker:
    """The process that has imported SGLang, with environment ``env``."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**env, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        theirs.close()
        self._socket.settimeout(STARTED_S)
        self._answers = self._socket.makefile("r")
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory()
        self._forks = 0

    def start(
        self,
        program: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path,
        log: Path,
        errors: Path | None = None,
    ) -> Forked:
        """Fork ``python -m`` with the arguments ``program``, a module and its own.

        ``log``: where its standard output goes, and its errors too without a file ``errors``.

        Raises:
            RuntimeError: the process has ended, or SGLang is not imported in ``STARTED_S``.
        """
        with self._lock:
            self._forks += 1
            ended = Path(self._folder.name, str(self._forks))
            files = {"log": str(log), "errors": str(errors or log), "ended": str(ended)}
            request = {"program": [*program], "env": {**env}, "cwd": str(cwd), **files}
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                pid = int(self._answers.readline())
            except (OSError, ValueError) as error:
                self.stop()  # or it would fork for nobody later
                raise RuntimeError(
                    f"{PROGRAM} ended, or did not fork in {STARTED_S:g} s"
                ) from error
            return Forked(pid, ended, self._process)

    def stop(self) -> None:
        """End the process; its forks go on."""
        self._socket.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@cache
def forker(env: tuple[tuple[str, str], ...]) -> Forker:
    """The one of this process with that environment; it ends with this process."""
    made = Forker(dict(env))
    atexit.register(made.stop)
    return made


def _forker_for(env: Mapping[str, str]) -> Forker:
    """One whose environment is all of ``env`` that matters when SGLang is imported."""
    early = {name: text for name, text in env.items() if not name.startswith(READ_LATE)}
    return forker(tuple(sorted((early | search_path(STARTUP)).items())))


def start_server(server: Server) -> Forked:
    """What ``Server._spawn`` does, by a fork."""
    program = server._command[2:]  # without the interpreter and its -m
    env = server._env
    return _forker_for(env).start(program, env=env, cwd=server._tmp.name, log=server.log)


def run(
    program: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of ``python -m`` with the arguments ``program``.

    Raises subprocess.TimeoutExpired, and then kills what it has started."""
    with tempfile.TemporaryDirectory() as folder:
        log, errors = Path(folder, "output"), Path(folder, "errors")
        fork = _forker_for(env).start(program, env=env, cwd=cwd, log=log, errors=errors)
        try:
            code = fork.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(fork.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(program, code, log.read_text(), errors.read_text())
