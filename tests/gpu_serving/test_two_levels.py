# SPDX-License-Identifier: Apache-2.0
"""A hierarchical cache with write-back: nodes are evicted to host memory and loaded back."""

from __future__ import annotations

from typing import Any

from serving.server import ServingServer
from serving.workloads import random_prompt

from .agreement import NEW_TOKENS, Distance, Load, answers, forced_logprobs
from .fleet import SMALL_POOL, Fleet

OURS, STOCK = "ratio4-pat-two-levels", "ratio4-fa3"
SERVERS = (OURS, STOCK)
SYSTEM = random_prompt(seed=51, length=1000)
LOAD = Load(tuple(SYSTEM + random_prompt(seed=60 + i, length=30) for i in range(8)))
STRANGER = 1000  # tokens of a prompt that only takes room


def _drive_out(server: ServingServer) -> None:
    """Fill the pool with other prompts, one after the other."""
    for i in range(SMALL_POOL // STRANGER + 1):
        server.generate([random_prompt(seed=70 + i, length=STRANGER)], 1)


def _from_host(server: ServingServer) -> int:
    """Tokens of the first prompt of the load that come back from host memory."""
    parameters = {"temperature": 0, "max_new_tokens": 1}
    body = {"input_ids": list(LOAD.prompts[0]), "sampling_params": parameters}
    answer: dict[str, Any] = server.post("/generate", body)
    details: dict[str, int] | None = answer["meta_info"]["cached_tokens_details"]
    return details["host"] if details else 0


def test_loaded_back_nodes_answer_right_and_pack(server: Fleet) -> None:
    ours, theirs = server(OURS), server(STOCK)
    texts = answers(theirs, LOAD)
    wanted = forced_logprobs(theirs, LOAD, texts)
    cold = Distance.between(forced_logprobs(ours, LOAD, texts), wanted)
    for turn in range(2):
        _drive_out(ours)
        assert _from_host(ours) >= len(SYSTEM), f"turn {turn}: not evicted, or not loaded back"
        before = ours.counters()
        found = Distance.between(forced_logprobs(ours, LOAD, texts), wanted)
        counted = ours.counters() - before
        print(f"turn {turn}: {found}, cold {cold}, {counted}")
        assert cold.small and found.small
        assert counted.packed_steps >= NEW_TOKENS - 8  # requests do not all begin at once
        assert counted.kv_tokens_read < 0.5 * counted.kv_tokens_unpacked
        assert not counted.fallbacks
