# SPDX-License-Identifier: Apache-2.0
"""SGLang's router in front of the tests' servers, and where it sends each request."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.router import Router

from sglang_pat.demo.counters import Counters

from .server import ARRIVED_S, Prompt, ServingServer


class WatchedRouter(Router):
    """A router before ``servers``, which log their requests, so that it is known who got which."""

    def __init__(self, policy: str, servers: Sequence[ServingServer], log: Path) -> None:
        self.servers = tuple(servers)
        super().__init__(policy, [server.url for server in servers], log)

    def generate_in_turn(self, prompts: Sequence[Prompt], new_tokens: int) -> list[int]:
        """Decode all prompts at the same time, and return for each the index of its server.

        Each prompt is sent when the one before it has arrived at a server, so the order in which
        the router chooses is that of ``prompts``. The servers are paused until all have arrived:
        how many requests decode together does not depend on how fast they were sent.
        """
        self._post_to_servers("/pause_generation", {"mode": "in_place"})
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            try:
                answers, chosen = [], []
                for prompt in prompts:
                    before = self._arrived()
                    answers.append(pool.submit(self._generate, prompt, new_tokens))
                    chosen.append(self._wait_for_arrival(before))
            finally:
                self._post_to_servers("/continue_generation", {})
            for answer in answers:
                answer.result()
        return chosen

    def counters(self) -> list[Counters]:
        """What pat counted on each server since its start; call it when no request runs."""
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:  # each takes seconds
            return list(pool.map(ServingServer.counters, self.servers))

    def _generate(self, prompt: Prompt, new_tokens: int) -> None:
        parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
        request = urllib.request.Request(
            f"{self.url}/generate",
            data=json.dumps({"input_ids": prompt, "sampling_params": parameters}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert len(json.load(answer)["output_ids"]) == new_tokens

    def _arrived(self) -> list[int]:
        """How many requests have arrived at each server since its start."""
        return [server.arrived() for server in self.servers]

    def _wait_for_arrival(self, before: Sequence[int]) -> int:
        """The index of the server that gets a request more than ``before``."""
        deadline = time.monotonic() + ARRIVED_S
        while (now := self._arrived()) == list(before):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server got the request in {ARRIVED_S:.0f} s")
            time.sleep(0.01)
        (chosen,) = [i for i, count in enumerate(now) if count > before[i]]
        return chosen

    def _post_to_servers(self, path: str, body: dict[str, str]) -> None:
        for server in self.servers:
            server.post(path, body)
