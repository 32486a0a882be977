# SPDX-License-Identifier: Apache-2.0
"""Two servers behind SGLang's router: with its cache-aware policy requests that share land together
and are packed; with round robin, the control, each prompt is read on both servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "sglang_router",
    reason="needs SGLang's router: make install, or pip install sglang-router==0.3.2",
)

from sglang_pat.bench.common.counters import Counters
from sglang_pat.bench.common.server import LOG_REQUESTS
from sglang_pat.bench.serving import __main__ as bench
from sglang_pat.bench.serving.fleet import FleetConfig, Served
from sglang_pat.bench.serving.routed import Routed
from sglang_pat.bench.serving.router_rows import RouterRow

from .router import WatchedRouter
from .server import Config, ServingServer
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


def test_the_benchmark_measures_each_policy(
    routers: dict[str, WatchedRouter],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command, on the servers that run already."""
    servers = [Served("pat", server) for server in routers[POLICIES[0]].servers]
    fleet = {policy: [Routed(servers, router)] for policy, router in routers.items()}

    @contextmanager
    def running(config: FleetConfig, backends: list[str], **_: Any) -> Iterator[Any]:
        assert backends == ["pat"] and config.pool_tokens <= 20_000
        yield fleet

    monkeypatch.setattr(bench, "serve_routed", running)
    file = tmp_path / "rows.json"
    workload = f"{SYSTEM_PROMPTS}*{SYSTEM_TOKENS}x{USERS}"
    options = ["--router", workload, "--new-tokens", str(USER_TOKENS), "--output-tokens", "400"]
    options += ["--runs", "2", "--device", "cpu", "--model", str(model), "--backends", "pat"]
    assert bench.main([*options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["kind"] == "router" and written["left_out"] == []
    rows = [RouterRow(**row) for row in written["rows"]]
    assert [(row.run, row.policy) for row in rows] == [
        (run, policy) for run, order in enumerate((POLICIES, POLICIES[::-1])) for policy in order
    ]
    for row in rows:
        assert sum(row.by_server) == SYSTEM_PROMPTS * USERS and row.itl_p99_ms > 0
        assert 0 < row.ttft_p50_ms <= row.ttft_p99_ms and row.tokens_per_s > 0
        assert row.packed_steps and not row.fallbacks
    together, spread = ([row for row in rows if row.policy == policy] for policy in POLICIES)
    for row in together:
        assert row.together == 1 and min(row.by_server) > 0
        assert row.cached > 0.9 * SYSTEM_TOKENS / (SYSTEM_TOKENS + USER_TOKENS)
    for row, other in zip(spread, together, strict=True):
        assert row.together < 1 and row.by_server[0] == row.by_server[1]
        assert (row.saved or 0) < (other.saved or 0)
    assert "pat, cache_aware / round_robin: " in capsys.readouterr().out
