# SPDX-License-Identifier: Apache-2.0
"""One server per backend, all alive at the same time on the same GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from benchmarks.serving.client import ClientError
from benchmarks.serving.model import GIB, Model
from sglang_pat.demo.counters import Counters, parse_counters
from sglang_pat.demo.server import Server, ServerError
from sglang_pat.srt import BACKEND
from sglang_pat.srt.metrics import FLUSH_SECONDS

# Of a server's memory, what is neither weights nor K/V: the CUDA context, decode graphs, workspaces
# and the activations of a prefill of 8,192 tokens. An estimate.
OVERHEAD_GIB = 3.5
MEM_FRACTION = 0.95  # of a GPU, for all servers together
# How many steps the engine's own step times are means of; 256 output tokens give a dozen.
LOG_INTERVAL = 20
PAGE = 256  # a multiple of every page size
DYING_S = 2.0  # between a failed scheduler and the end of its server


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What every server gets. Sizes are in tokens; memory is per GPU."""

    model: Model
    device: str
    dtype: str
    tp: int
    pool_tokens: int  # of the K/V pool; a multiple of PAGE, else SGLang rounds it down
    max_requests: int  # that decode at the same time, so also the largest decode graph
    stream_interval: int = 1
    kv_cache_dtype: str = "auto"
    args: tuple[str, ...] = ()  # any others

    @property
    def server_gib(self) -> float:
        """Of one server, on each of its GPUs."""
        kv = self.pool_tokens * self.model.kv_bytes_per_token
        return (self.model.weight_bytes + kv) / self.tp / GIB + OVERHEAD_GIB

    def check_memory(self, servers: int, gpu_gib: float) -> None:
        """Raise ValueError, with what does fit, if not all servers fit into a GPU.

        SGLang takes ``--mem-fraction-static`` of what was free when it started, less what is not
        free any more, as room for the pool, and caps that by ``--max-total-tokens``. Servers that
        start at the same time see each other's growth as their own. They all get the pool they ask
        for if everything together stays within the fraction of the whole GPU, and only then.
        """
        room = gpu_gib * MEM_FRACTION
        if servers * self.server_gib <= room:
            return
        left = self.tp * (room / servers - OVERHEAD_GIB) * GIB - self.model.weight_bytes
        pool = int(left // self.model.kv_bytes_per_token)
        raise ValueError(
            f"{servers} servers of {self.server_gib:.1f} GiB a GPU (pools of {self.pool_tokens} "
            f"tokens) do not fit {room:.1f} GiB, {MEM_FRACTION:.2f} of it. What fits: "
            f"{int(room / self.server_gib)} of the --backends, "
            + (f"--pool-tokens {pool}, " if pool > 0 else "")
            + "or more GPUs with --tp"
        )

    def arguments(self) -> list[str]:
        """Of ``sglang.launch_server``."""
        found = [
            *("--dtype", self.dtype, "--kv-cache-dtype", self.kv_cache_dtype),
            *("--max-total-tokens", str(self.pool_tokens)),
            *("--max-running-requests", str(self.max_requests)),
            *("--decode-log-interval", str(LOG_INTERVAL)),
            *("--stream-interval", str(self.stream_interval)),
            *(() if self.model.has_weights else ("--load-format", "dummy")),
            *(("--tp-size", str(self.tp)) if self.tp > 1 else ()),
        ]
        if self.device == "cuda":
            found += [
                # Exceptions to SGLang's defaults: several servers share a GPU, and graphs of more
                # requests than ever run would only take memory and time to start.
                *("--mem-fraction-static", str(MEM_FRACTION)),
                *("--cuda-graph-max-bs-decode", str(self.max_requests)),
            ]
        return [*found, *self.args]


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
    config: FleetConfig, backends: Sequence[str], *, logs: Path, ready_s: float
) -> Iterator[list[Served]]:
    """A server for each backend, started at the same time.

    Raises:
        ServerError: one did not start, its K/V pool is smaller than planned, or it ended while a
            request to it failed.
    """
    env = {"SGLANG_RECORD_STEP_TIME": "1"}
    if config.device == "cpu":
        env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads would starve the other servers
    if config.tp > 1:
        # The other servers' growth makes ranks look unbalanced while they start.
        env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    servers = [
        Server(
            config.model.folder,
            backend=backend,
            device=config.device,
            log=logs / f"server-{backend}.log",
            args=config.arguments(),
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
            if pool < config.pool_tokens:
                raise ServerError(
                    f"{backend} has a K/V pool of {pool} tokens instead of {config.pool_tokens}: "
                    "something else uses the GPU, or a server needs more than "
                    f"{OVERHEAD_GIB} GiB beside weights and pool; lower --pool-tokens"
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


def device_of(device: str, gpus: int) -> tuple[str, float]:
    """Name and memory of a GPU, in GiB; the memory of a CPU is not looked at, so without a limit.

    Raises:
        ValueError: there are fewer than ``gpus``.
    """
    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads", math.inf
    if (count := torch.cuda.device_count()) < gpus:
        raise ValueError(f"torch can use {count} GPUs here, but {gpus} are needed, or --device cpu")
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory / GIB
