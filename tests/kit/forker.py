# SPDX-License-Identifier: Apache-2.0
"""A program that imports SGLang once and forks others: ``forks.py`` starts and asks it.

It reads requests from the socket whose descriptor is its argument, a JSON object a line:
``program`` (what would follow ``python -m``), ``env``, ``cwd``, ``log`` and ``errors`` (files for
its standard output and its errors, or one for both) and ``ended``, a file that gets its exit code.
It answers with a line for each, its process id. It ends when the other side closes the socket, and
its forks go on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

SERVER = "sglang.launch_server"
# What a server's processes import, each by itself if SGLang starts them: most when they start, all
# models when one is looked up. Not prometheus_client, which reads when it is imported whether
# several processes count.
IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
POLL_S = 0.05  # between two looks at which servers have ended


def _requests(asked: socket.socket) -> dict[str, Any] | None:
    """Answers requests until there are no more, which gives None. In a fork it returns its own."""
    ends: dict[int, Path] = {}  # by process
    unread = b""
    while True:
        if select.select([asked], [], [], POLL_S if ends else None)[0]:
            got = asked.recv(1 << 20)
            if not got:
                return None
            *lines, unread = (unread + got).split(b"\n")
            for request in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    asked.close()
                    return request
                ends[pid] = Path(request["ended"])
                asked.sendall(f"{pid}\n".encode())
        for pid in list(ends):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                file = ends.pop(pid)
                part = file.with_suffix(".part")
                with contextlib.suppress(FileNotFoundError):  # nobody asks any more
                    part.write_text(str(os.waitstatus_to_exitcode(status)))
                    part.rename(file)


def _become(request: dict[str, Any]) -> None:
    """Make this fork what a new process with the request's environment would be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()  # a process group of its own
    with open(request["log"], "wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if request["errors"] != request["log"]:
        with open(request["errors"], "wb") as errors:
            os.dup2(errors.fileno(), 2)
    os.chdir(request["cwd"])
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in asked if folder and folder not in known]
    importlib.invalidate_caches()
    tempfile.tempdir = None  # it may have been looked up with another TMPDIR
    random.seed()


def _fork_a_fork_server() -> None:
    """Fork the process from which multiprocessing will fork the scheduler and the detokenizer.

    Python would start a new program for it, which imports everything once more. It is forked here,
    before there are threads and before SGLang loads plugins. So the environment that the server
    has later is sent along with what the scheduler and the detokenizer are to run.
    """
    context = multiprocessing.context._default_context  # type: ignore[attr-defined]
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive, alive_here = os.pipe()
    _carry_environment()
    pid = os.fork()
    if pid == 0:
        os.close(alive_here)
        try:
            multiprocessing.forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_here
    server._forkserver_pid = pid

    def set_start_method(method: str, force: bool = False) -> None:
        context.set_start_method("forkserver" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_start_method  # type: ignore[assignment]


def _carry_environment() -> None:
    spawn: Any = multiprocessing.spawn
    data_of, prepare = spawn.get_preparation_data, spawn.prepare

    def get_preparation_data(name: str) -> dict[str, Any]:
        return data_of(name) | {"environ": dict(os.environ)}

    def prepare_with(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop("environ"))
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = get_preparation_data, prepare_with


def _run(program: list[str]) -> None:
    """Be ``python -m`` with these arguments, and end."""
    sys.argv = program
    code: object = 0
    try:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Python would then free all that was imported, which copies the memory that forks share.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then stops servers
    for name in IMPORTED:
        importlib.import_module(name)
    # It finds the place of a process's title beside the environment, which forks replace.
    importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()  # or the first collection of each fork would copy all that was imported
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        request = _requests(asked)
    if request is not None:
        _become(request)
        if request["program"][0] == SERVER:
            _fork_a_fork_server()
        _run(request["program"])


if __name__ == "__main__":
    main()
