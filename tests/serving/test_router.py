# SPDX-License-Identifier: Apache-2.0
"""Two servers behind SGLang's router: with its cache-aware policy requests that share land together
and are packed; with round robin, the control, each prompt is read on both servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip(
    "sglang_router",
    reason="needs SGLang's router: make install, or pip install sglang-router==0.3.2",
)

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.server import Server, reserve_port

from .server import LOG_REQUESTS, Config, ServingServer, greedy, running, wait_until
from .workloads import Prompt, random_prompt

NAMES = ("0", "1")  # of the servers, in their answers
POLICIES = ("cache_aware", "round_robin")
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 600
USERS, USER_TOKENS = 4, 20  # of each system prompt
NEW_TOKENS = 40


class Router(Server):
    """``sglang_router.launch_router``, ready when it knows that all servers are healthy."""

    def __init__(self, policy: str, servers: list[ServingServer], log: Path) -> None:
        super().__init__("", backend=None, device="cpu", log=log)
        self.servers = servers
        self._command = [
            *(sys.executable, "-m", "sglang_router.launch_router", "--policy", policy),
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

        def arrived() -> int:
            return sum(server.arrived() for server in self.servers)

        with ThreadPoolExecutor(len(prompts)) as pool, ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.paused())
            answers = []
            for count, prompt in enumerate(prompts, 1 + arrived()):
                body = {"input_ids": prompt, "sampling_params": greedy(NEW_TOKENS)}
                answers.append(pool.submit(self.post, "/generate", body))
                wait_until(lambda count=count: arrived() >= count, "no server got the request")
        return [answer.result()["meta_info"]["weight_version"] for answer in answers]


@pytest.fixture(scope="module")
def routers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Router]]:
    """A router of each policy, all before the same two servers."""
    folder = tmp_path_factory.mktemp("router")
    servers = [
        ServingServer(
            model, Config(name, args=(*LOG_REQUESTS, "--weight-version", name)), folder / name
        )
        for name in NAMES
    ]
    found = {policy: Router(policy, servers, folder / f"{policy}.log") for policy in POLICIES}
    with running(*servers, *found.values()):
        yield found


def _serve(router: Router, seed: int) -> tuple[list[list[str]], list[Counters]]:
    """The servers that the users of each system prompt came to, and what each server counted."""
    prompts = []
    for i in range(SYSTEM_PROMPTS):
        system = random_prompt(seed + i, SYSTEM_TOKENS)
        prompts += [
            system + random_prompt(seed + 100 + USERS * i + j, USER_TOKENS) for j in range(USERS)
        ]
    before = [server.counters() for server in router.servers]
    chosen = router.server_of_each(prompts)
    counted = [server.counters() - old for server, old in zip(router.servers, before, strict=True)]
    return [chosen[i : i + USERS] for i in range(0, len(chosen), USERS)], counted


def _read_share(counted: list[Counters]) -> float:
    """K/V tokens read, as a part of what would be read if nothing were packed."""
    return sum(one.kv_tokens_read for one in counted) / sum(
        one.kv_tokens_unpacked for one in counted
    )


def test_requests_that_share_land_together_and_pack(routers: dict[str, Router]) -> None:
    together, counted = _serve(routers["cache_aware"], seed=1000)
    for servers in together:
        assert len(set(servers)) == 1, together
    # Both work: a new system prompt goes to the server with fewer requests.
    assert {servers[0] for servers in together} == set(NAMES)
    for one in counted:
        assert one.packed_steps > 0 and not one.fallbacks

    spread, control = _serve(routers["round_robin"], seed=2000)
    for servers in spread:
        assert servers.count("0") == servers.count("1") == USERS // 2, spread
    # A system prompt is read once a step, and with round robin on each server: about 760 and 1360
    # of 2560 tokens that its four users have.
    assert _read_share(counted) < 0.4 < 0.48 < _read_share(control)
