# SPDX-License-Identifier: Apache-2.0
"""A spawned router of SGLang's in front of several servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from sglang_pat.demo.server import ServerError, reserve_port

READY_S = 300.0
_LOG_CHARACTERS_SHOWN = 3000


class Router:
    """``python -m sglang_router.launch_router`` in a process group of its own; it starts at once.

    Args:
        policy: ``--policy``.
        worker_urls: the servers that it routes to; they may still be starting.
        log: file that gets the router's output; it is kept.
    """

    def __init__(self, policy: str, worker_urls: Sequence[str], log: Path) -> None:
        self.policy = policy
        self.log = log.resolve()
        self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._workers = len(worker_urls)
        command = [
            *(sys.executable, "-m", "sglang_router.launch_router", "--policy", policy),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(reserve_port())),
            *("--worker-urls", *worker_urls),
            *("--worker-startup-check-interval", "1"),  # seconds; the default is 30
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,  # a checkout as cwd would shadow the installed package
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Return when the router knows that all servers are healthy.

        Raises:
            ServerError: it ended, or was not ready after ``READY_S`` seconds.
        """
        deadline = time.monotonic() + READY_S
        while self._healthy_servers() < self._workers:
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = self.log.read_text(errors="replace")[-_LOG_CHARACTERS_SHOWN:]
                raise ServerError(
                    f"the router ended or was not ready after {READY_S:.0f} s:\n{end}"
                )
            time.sleep(0.2)

    def stop(self) -> None:
        """End the router; requests that it has not answered fail."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _healthy_servers(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/readiness", timeout=5) as answer:
                return int(json.load(answer)["healthy_workers"])
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0  # not listening yet, or 503: knows no healthy server
