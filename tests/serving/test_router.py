# SPDX-License-Identifier: Apache-2.0
"""Two servers behind SGLang's router: with its cache-aware policy requests that share land together
and are packed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip(
    "sglang_router",
    reason="needs SGLang's router: make install, or pip install sglang-router==0.3.2",
)

from sglang_pat.demo.server import Server, reserve_port

from .server import LOG_REQUESTS, WAIT_S, Config, ServingServer, greedy
from .workloads import Prompt, random_prompt

NAMES = ("0", "1")  # of the servers, in their answers
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 600
USERS, USER_TOKENS = 4, 20  # of each system prompt
NEW_TOKENS = 40


class Router(Server):
    """``sglang_router.launch_router``, ready when it knows that all servers are healthy."""

    def __init__(self, servers: list[ServingServer], log: Path) -> None:
        super().__init__("", backend=None, device="cpu", log=log)
        self.servers = servers
        self._command = [
            *(sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(reserve_port())),
            *("--worker-urls", *(server.url for server in servers)),
            *("--worker-startup-check-interval", "1"),  # seconds; the default is 30
        ]

    def _answers(self) -> bool:
        with suppress(OSError):  # not listening yet, or 503: knows no healthy server
            return bool(self.get("/readiness")["healthy_workers"] == len(self.servers))
        return False

    def server_of_each(self, prompts: list[Prompt]) -> list[str]:
        """Decode all prompts at the same time; by which server each.

        Each is sent when the one before it has arrived, so the router chooses in this order. The
        servers are paused until all have: how many requests decode together does not depend on how
        fast they were sent.
        """

        with ThreadPoolExecutor(len(prompts)) as pool, ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.paused_until_arrived(0))
            answers, deadline = [], time.monotonic() + WAIT_S
            first = sum(server.arrived() for server in self.servers)
            for count, prompt in enumerate(prompts, first + 1):
                body = {"input_ids": prompt, "sampling_params": greedy(NEW_TOKENS)}
                answers.append(pool.submit(self.post, "/generate", body))
                while sum(server.arrived() for server in self.servers) < count:
                    assert time.monotonic() < deadline, "no server got the request"
                    time.sleep(0.01)
        return [answer.result()["meta_info"]["weight_version"] for answer in answers]


@pytest.fixture
def router(model: Path, tmp_path: Path) -> Iterator[Router]:
    """Before two servers."""
    with ExitStack() as stack:
        servers = []
        for name in NAMES:
            config = Config(name, args=(*LOG_REQUESTS, "--weight-version", name))
            servers.append(ServingServer(model, config, tmp_path / name))
        found = Router(servers, tmp_path / "router.log")
        for process in (*servers, found):
            stack.callback(process.stop)
            process.start()
        for process in (*servers, found):
            process.wait_until_ready()
        yield found


def test_requests_that_share_land_together_and_pack(router: Router) -> None:
    prompts = []
    for i in range(SYSTEM_PROMPTS):
        system = random_prompt(1000 + i, SYSTEM_TOKENS)
        prompts += [system + random_prompt(1100 + USERS * i + j, USER_TOKENS) for j in range(USERS)]
    chosen = router.server_of_each(prompts)
    together = [set(chosen[i : i + USERS]) for i in range(0, len(chosen), USERS)]
    # Both work: a new system prompt goes to the server with fewer requests.
    assert all(len(each) == 1 for each in together) and set.union(*together) == set(NAMES)
    for server in router.servers:
        counted = server.counters()
        assert counted.packed_steps > 0 and not counted.fallbacks
        # A system prompt is read once a step: about 760 of 2560 tokens of its four users.
        assert counted.kv_tokens_read < 0.4 * counted.kv_tokens_unpacked
