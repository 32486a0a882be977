# SPDX-License-Identifier: Apache-2.0
"""Two servers behind SGLang's router: with its cache-aware policy requests that share land together
and are packed; with round robin, the control, each prompt is read on both servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip(
    "sglang_router",
    reason="needs SGLang's router: make install, or pip install sglang-router==0.3.2",
)

from sglang_pat.demo.counters import Counters

from .router import WatchedRouter
from .server import LOG_REQUESTS, Config, ServingServer
from .workloads import random_prompt

NAMES = ("0", "1")  # of the servers, in their answers
SERVERS = [
    Config(f"behind-router-{name}", args=(*LOG_REQUESTS, "--weight-version", name))
    for name in NAMES
]
POLICIES = ("cache_aware", "round_robin")
SYSTEM_PROMPTS = 4
USERS = 4  # of each system prompt
SYSTEM_TOKENS = 600
USER_TOKENS = 20
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def routers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, WatchedRouter]]:
    """A router of each policy, all before the same two servers."""
    folder = tmp_path_factory.mktemp("router")
    with ExitStack() as stack:
        servers = [ServingServer(model, config, folder / config.name) for config in SERVERS]
        for server in servers:
            stack.callback(server.stop)
            server.start()
        found = {}
        for policy in POLICIES:
            found[policy] = WatchedRouter(policy, servers, folder / f"{policy}.log")
            stack.callback(found[policy].stop)
        for process in (*servers, *found.values()):
            process.wait_until_ready()
        yield found


def _serve(router: WatchedRouter, seed: int) -> tuple[list[list[int]], list[Counters]]:
    """The servers that the users of each system prompt came to, and what each server counted."""
    prompts = []
    for i in range(SYSTEM_PROMPTS):
        system = random_prompt(seed + i, SYSTEM_TOKENS)
        prompts += [
            system + random_prompt(seed + 100 + USERS * i + j, USER_TOKENS) for j in range(USERS)
        ]
    before = router.counters()
    servers = router.generate_in_turn(prompts, NEW_TOKENS)
    counted = [after - start for after, start in zip(router.counters(), before, strict=True)]
    return [servers[i : i + USERS] for i in range(0, len(servers), USERS)], counted


def _read_share(counted: list[Counters]) -> float:
    """K/V tokens read, as a part of what would be read if nothing were packed."""
    return sum(one.kv_tokens_read for one in counted) / sum(
        one.kv_tokens_unpacked for one in counted
    )


def test_requests_that_share_land_together_and_pack(routers: dict[str, WatchedRouter]) -> None:
    together, counted = _serve(routers["cache_aware"], seed=1000)
    for servers in together:
        assert len(set(servers)) == 1, together
    # Both work: a new system prompt goes to the server with fewer requests.
    assert {servers[0] for servers in together} == {0, 1}
    for one in counted:
        assert one.packed_steps > 0 and not one.fallbacks

    spread, control = _serve(routers["round_robin"], seed=2000)
    for servers in spread:
        assert servers.count(0) == servers.count(1) == USERS // 2, spread
    # A system prompt is read once a step, and with round robin on each server: about 760 and 1360
    # of 2560 tokens that its four users have.
    assert _read_share(counted) < 0.4 < 0.48 < _read_share(control)
