# SPDX-License-Identifier: Apache-2.0
"""A spawned SGLang server: started, waited for, stopped with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_pat.config import CPU_PLATFORM
from sglang_pat.demo.counters import Counters, read_counters

_LOG_LINES_SHOWN = 30
_STOP_S = 15.0


class ServerError(RuntimeError):
    """The server ended, or was not ready in time; the message has the end of its log."""


def own_device() -> str:
    """``cuda`` if pat serves this machine's GPU, else ``cpu``."""
    import torch

    from sglang_pat.srt.support import reason_against_gpu

    return "cuda" if torch.cuda.is_available() and not reason_against_gpu() else "cpu"


class Server:
    """``python -m sglang.launch_server`` in a process group of its own; a context manager.

    On a CPU it runs under the platform ``pat_cpu`` that this package brings, whatever the backend.
    ``backend``: None leaves SGLang's own choice. ``device``: ``cpu`` or ``cuda``. ``log``: file
    that gets the server's output; it is kept. ``args``: further ones of ``sglang.launch_server``.
    ``env``: variables on top of this process's. ``ready_s``: seconds to wait for ``/health``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str | None,
        device: str,
        log: str | Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready_s: float = 300.0,
    ) -> None:
        self.log = Path(log).resolve()
        self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            # A name that is no folder here is one on a model hub.
            *("--model-path", str(Path(model).resolve() if Path(model).exists() else model)),
            *("--device", device, "--host", "127.0.0.1", "--port", str(self.port)),
            # SGLang's own choice may be that of another server that starts right now.
            *("--nccl-port", str(reserve_port())),
            *(("--attention-backend", backend) if backend else ()),
            "--enable-metrics",
            "--sleep-on-idle",  # a scheduler without work would keep a core busy
            *args,
        ]
        # SGLang leaves its temporary files (sockets, metrics) behind; here they go with the server.
        self._tmp = tempfile.TemporaryDirectory(prefix="sglang_pat_", ignore_cleanup_errors=True)
        self._env = {
            **os.environ,
            # /health answers from the server's state then, instead of generating a token of its
            # own, which takes a second and would appear in the counters.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            **({"SGLANG_PLATFORM": CPU_PLATFORM} if device == "cpu" else {}),
            "TMPDIR": self._tmp.name,
            **(env or {}),
        }

    def __enter__(self) -> Server:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process, so that several servers can start at the same time."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._tmp.name,  # a checkout as cwd would shadow the installed package
                start_new_session=True,  # its own group: schedulers and detokenizer end with it
            )

    def wait_until_ready(self) -> None:
        """Return when ``/health`` answers; a server that does not get there is stopped.

        Raises ServerError if it ended before, or is not ready ``ready_s`` after this call.
        """
        deadline = time.monotonic() + self._ready_s
        try:
            while not self._answers():
                self.check_alive()
                if time.monotonic() > deadline:
                    raise self._error(f"is not ready after {self._ready_s:.0f} s")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False  # not listening yet, or 503: still starting

    def stop(self) -> None:
        """End the server and every process it started; harmless when it has ended already."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)  # SIGTERM is looked at every 5 s only
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):  # the group has no process any more
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._tmp.cleanup()

    @property
    def pid(self) -> int:
        """Of its first process, so of its process group. Raises ServerError if it has ended."""
        self.check_alive()
        assert self._process is not None
        return self._process.pid

    def text(self) -> str:
        """All that the server has logged."""
        return self.log.read_text(errors="replace")

    def check_alive(self) -> None:
        """Raise ServerError, with the end of the log, if the server has ended."""
        code = 0 if self._process is None else self._process.poll()
        if code is not None:
            raise self._error(f"ended with code {code}")

    def _error(self, what: str) -> ServerError:
        tail = "\n".join(self.text().splitlines()[-_LOG_LINES_SHOWN:])
        return ServerError(f"the server {what}; the last lines of {self.log}:\n{tail}")

    def get(self, path: str) -> Any:
        """JSON of ``GET path``."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any = None, *, timeout: float = 300.0) -> Any:
        """JSON of ``POST path``; None where the answer is empty or plain text. Raises
        urllib.error.HTTPError, whose body says why, if the server refuses."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps({} if body is None else body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            is_json = "json" in answer.headers.get("Content-Type", "")
            return json.load(answer) if is_json else None

    def counters(self) -> Counters:
        """What pat counted since the start; call it when no request runs."""
        return read_counters(self.url)


# A port belongs to this process until it ends: two servers that start side by side bind theirs a
# minute after they were chosen.
_reserved: list[socket.socket] = []


def reserve_port() -> int:
    """A TCP port of this machine on which nobody listens, and which no process is given again by
    this function as long as the caller's lives: below the range from which Linux gives ports to
    whoever asks for any. Raises OSError if 100 ports, drawn at random, are all in use or reserved.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        # Bound, the port is refused to whoever asks as above. With this option from now on, a
        # server that sets it too, as all of SGLang's do, may bind the port and listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.append(holder)
        return port
    raise OSError("100 ports between 20000 and 32000 are all in use: end servers, and try again")
