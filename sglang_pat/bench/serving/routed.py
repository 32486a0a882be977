# SPDX-License-Identifier: Apache-2.0
"""Two servers of each backend behind SGLang's router: ``python -m sglang_pat.bench.serving
--router``.

A workload is requests of several system prompts, as ``8*2048x16``. A run flushes both servers'
prefix caches. Then each system prompt is sent once through the router, which so learns, or does not
learn, which server has it. These requests come some milliseconds apart and are in flight together,
so that a policy that looks at the servers' load spreads them. Then all requests are sent at once,
in random order. Each has a question of its own behind its system prompt.

Each policy has a router of its own before the same two servers, and every run has fresh tokens, so
no router knows a prompt from an earlier run. The backends take turns under one policy, then under
the next.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.common.counters import Counters
from sglang_pat.bench.common.router import Router
from sglang_pat.bench.serving.client import AnswerTimes, body, stream
from sglang_pat.bench.serving.fleet import FleetConfig, Place, Served, serve_places
from sglang_pat.bench.serving.router_rows import RouterRow, row_of
from sglang_pat.bench.serving.run import (
    REQUEST_TIMEOUT_S,
    WARM_UP_TOKENS,
    Log,
    RunOptions,
    make_workload_batch,
    prepare,
    rotated,
    turn,
    warm_up,
)
from sglang_pat.bench.serving.workload import RunPrompts, Workload

POLICIES = ("cache_aware", "round_robin")
SERVERS = 2  # of a backend
# With these the last request of the priming comes while all others still decode.
PRIME_EVERY_S, PRIME_TOKENS = 0.02, 64


class Routed:
    """The servers of one backend behind a router."""

    def __init__(self, servers: Sequence[Served], router: Router) -> None:
        self.backend = servers[0].backend
        self.policy = router.policy
        self.servers = tuple(servers)
        self._router = router

    def flush(self) -> None:
        """Empty the prefix caches."""
        for served in self.servers:
            served.flush()

    def stream(
        self, bodies: Sequence[bytes], *, at_s: Sequence[float] | None = None
    ) -> list[AnswerTimes]:
        """``client.stream`` to the router."""
        answers = stream(self._router.port, bodies, at_s=at_s, timeout_s=REQUEST_TIMEOUT_S)
        for served in self.servers:
            served.rest()
        return answers

    def counted(self) -> Counters | None:
        """What pat counted on all servers since the last call; None for another backend."""
        found = [counted for served in self.servers if (counted := served.counted())]
        return sum(found, Counters()) if found else None


@contextmanager
def serve_routed(
    config: FleetConfig, backends: Sequence[str], *, logs: Path, ready_s: float
) -> Iterator[dict[str, list[Routed]]]:
    """By policy, the servers of all backends behind a router. Servers of a backend are on GPUs of
    their own, those of different backends share them. Raises as ``serve_places`` does, and
    ServerError if a router does not start."""
    places = [
        Place(backend, f"{backend}-{i}", _arguments(config, i))
        for backend in backends
        for i in range(SERVERS)
    ]
    with (
        serve_places(config, places, logs=logs, ready_s=ready_s) as fleet,
        ExitStack() as stack,
    ):
        found: dict[str, list[Routed]] = {policy: [] for policy in POLICIES}
        routers = []
        for first in range(0, len(fleet), SERVERS):
            servers = fleet[first : first + SERVERS]
            urls = [served.server.url for served in servers]
            for policy, of_policy in found.items():
                router = Router(policy, urls, logs / f"router-{servers[0].backend}-{policy}.log")
                stack.callback(router.stop)
                routers.append(router)
                of_policy.append(Routed(servers, router))
        for router in routers:
            router.wait_until_ready()
        yield found


def _arguments(config: FleetConfig, server: int) -> tuple[str, ...]:
    """Of the server with this number: its name in its answers, and its first GPU."""
    name = ("--weight-version", str(server))
    gpu = ("--base-gpu-id", str(server * config.tp))
    return (*name, *gpu) if config.device == "cuda" else name


def run_router(
    fleet: Mapping[str, Sequence[Routed]],
    workloads: Sequence[Workload],
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> None:
    """All backends on a workload under one policy, then under the next, then the next workload;
    then all again, in another order.

    Raises:
        RequestError: a request failed.
    """
    _warm_up(fleet, workloads, settings, budget)
    for run in range(settings.runs):
        for workload in workloads:
            batch = make_workload_batch(workload, settings, str(run))
            for policy in rotated(list(fleet), run):
                measure = partial(
                    _measure, workload=workload, batch=batch, settings=settings, run=run
                )
                kind = f"{workload} {policy}"
                turn(rotated(fleet[policy], run), kind, measure, settings, budget, log)


def _warm_up(
    fleet: Mapping[str, Sequence[Routed]],
    workloads: Sequence[Workload],
    settings: RunOptions,
    budget: Budget,
) -> None:
    """The largest workload on each server by itself: a server may get all requests."""
    largest = max(workloads, key=lambda workload: workload.requests)
    batch = make_workload_batch(largest, settings, "warm-up")
    bodies = [body(p, WARM_UP_TOKENS, settings.stream_interval) for p in batch.prompts]
    servers = [served for routed in fleet[POLICIES[0]] for served in routed.servers]
    warm_up(servers, bodies, None, budget, lambda served: prepare(served, batch))


def _measure(
    routed: Routed, workload: Workload, batch: RunPrompts, settings: RunOptions, run: int
) -> RouterRow:
    interval = settings.stream_interval
    routed.flush()
    for level in batch.prime:
        bodies = [body(prompt, PRIME_TOKENS, interval) for prompt in level]
        routed.stream(bodies, at_s=[PRIME_EVERY_S * i for i in range(len(bodies))])
    order = shuffled(workload.requests, f"{settings.seed} {workload} {run}")
    bodies = [body(batch.prompts[i], settings.output_tokens, interval) for i in order]
    answers = routed.stream(bodies)
    return row_of(
        answers,
        [i // workload.per_group for i in order],
        backend=routed.backend,
        policy=routed.policy,
        workload=workload,
        run=run,
        prompt_tokens=sum(map(len, batch.prompts)),
        servers=[str(i) for i in range(len(routed.servers))],
    )


def shuffled(requests: int, seed: str) -> list[int]:
    """In which order the requests are sent, the same for every backend and policy."""
    order = list(range(requests))
    random.Random(seed).shuffle(order)
    return order
