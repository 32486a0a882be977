# SPDX-License-Identifier: Apache-2.0
"""One server per backend, all alive at the same time on the same GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.serving.client import ClientError
from sglang_pat.demo.counters import Counters, parse_counters
from sglang_pat.demo.server import Server, ServerError
from sglang_pat.srt import BACKEND
from sglang_pat.srt.metrics import FLUSH_SECONDS

PAGE = 256  # tokens of the largest page
DYING_S = 2.0  # between a failed scheduler and the end of its server


class Served:
    """A running server and what the benchmark asks of it."""

    def __init__(self, backend: str, server: Server) -> None:
        self.backend = backend
        self.server = server
        self._counted = Counters()

    def flush(self) -> None:
        """Empty the prefix cache, once the last request is gone."""
        self.server.post("/flush_cache?timeout=10")

    def step_notes(self) -> dict[str, list[float]]:
        """The scheduler's own step times so far, by batch size: see ``table.step_ms``."""
        state: dict[str, Any] = self.server.get("/server_info")["internal_states"][0]
        notes: dict[str, list[float]] = state["step_time_dict"]
        return notes

    def counted(self, idle_since: float) -> Counters | None:
        """What pat counted since the last call; None for another backend.

        Waits until the server, idle since then (``time.monotonic``), has written its counters: once
        a second.
        """
        if self.backend != BACKEND:
            return None
        time.sleep(max(0.0, idle_since + 1.25 * FLUSH_SECONDS - time.monotonic()))
        with urlopen(f"{self.server.url}/metrics", timeout=10) as answer:
            now = parse_counters(answer.read().decode())
        since, self._counted = now - self._counted, now
        return since


@contextmanager
def serve(
    model: Path,
    backends: Sequence[str],
    arguments: Sequence[str],
    *,
    device: str,
    pool_tokens: int,
    logs: Path,
    ready_s: float,
) -> Iterator[list[Served]]:
    """A server of ``model`` for each backend, started at the same time with the same arguments.

    Raises:
        ServerError: one did not start, its K/V pool has not ``pool_tokens``, or it ended while a
            request to it failed.
    """
    env = {"SGLANG_RECORD_STEP_TIME": "1"}
    # While they start, servers of several GPUs take each other's growth for ranks out of balance.
    env |= {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    if device == "cpu":
        env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads would starve the other servers
    servers = [
        Server(
            model,
            backend=backend,
            device=device,
            log=logs / f"server-{backend}.log",
            args=arguments,
            env=env,
            ready_s=ready_s,
        )
        for backend in backends
    ]
    try:
        for server in servers:
            server.start()
        import_module("sglang.benchmark.steady_state_serving")  # takes seconds: meanwhile
        for server in servers:
            server.wait_until_ready()
        for backend, server in zip(backends, servers, strict=True):
            pool = server.get("/server_info")["max_total_num_tokens"]
            if pool + PAGE <= pool_tokens:  # SGLang rounds it down to whole pages
                raise ServerError(
                    f"{backend} has a K/V pool of {pool} tokens instead of {pool_tokens}: not all "
                    "servers fit the GPU; lower --pool-tokens, name fewer --backends or raise --tp"
                )
        yield [Served(backend, server) for backend, server in zip(backends, servers, strict=True)]
    except (ClientError, OSError):
        time.sleep(DYING_S)
        for server in servers:
            server.check_alive()
        raise
    finally:
        with ThreadPoolExecutor() as pool_of_threads:
            list(pool_of_threads.map(Server.stop, servers))
