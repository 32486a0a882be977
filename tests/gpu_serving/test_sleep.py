# SPDX-License-Identifier: Apache-2.0
"""Sleep, wake and new weights with SGLang's memory saver, as trainers use them.

The server's memory is released and mapped again at the same addresses, without its contents; the
graphs captured before go on.
"""

from __future__ import annotations

import re

from serving.server import Answer, ServingServer

from .agreement import LOADS, Distance, answers, beside, forced_logprobs
from .fleet import Fleet
from .models import HEAD_DIM, KV_HEADS, LAYERS
from .soak import device_bytes

OURS, OTHER = "ratio4-pat-sleeper", "ratio4b-fa3"
SERVERS = (OURS, OTHER)
LOAD = LOADS["multi_level"]
MB = 1 << 20


def sleep(server: ServingServer, *tags: str) -> None:
    server.post("/flush_cache?timeout=30")  # once it is idle, as it must be to sleep
    server.post("/release_memory_occupation", {"tags": list(tags) or None})


def wake(server: ServingServer, *tags: str) -> None:
    server.post("/resume_memory_occupation", {"tags": list(tags) or None})


def check(server: ServingServer, texts: list[Answer], wanted: list[float]) -> None:
    """Packed, and as wanted."""
    found, counted = beside(server, LOAD, texts, wanted)
    assert found.small and counted.packed_steps > 0 and not counted.fallbacks


def test_asleep_and_awake(server: Fleet) -> None:
    ours = server(OURS)
    texts = answers(ours, LOAD)
    wanted = forced_logprobs(ours, LOAD, texts)
    check(ours, texts, wanted)  # from run to run, awake
    tokens, workspace_mb = (
        int(re.findall(pattern, ours.text())[0].replace(",", ""))
        for pattern in (r"max_total_num_tokens=(\d+)", r"workspace: ([\d,]+) MB on the GPU")
    )
    pool_bytes = 2 * LAYERS * tokens * KV_HEADS * HEAD_DIM * 2
    assert workspace_mb > 50  # so that it is seen beside the rest

    ours.post("/flush_cache?timeout=30")
    awake = device_bytes(ours.pid)
    sleep(ours, "kv_cache")
    released = awake - device_bytes(ours.pid)
    assert released > pool_bytes + 0.9 * workspace_mb * MB
    wake(ours, "kv_cache")
    check(ours, texts, wanted)

    sleep(ours)
    assert awake - device_bytes(ours.pid) > released
    # In parts, as trainers do: what is not back yet must not be touched.
    wake(ours, "weights")
    wake(ours, "kv_cache", "cuda_graph")
    check(ours, texts, wanted)


def test_new_weights_after_a_sleep(server: Fleet) -> None:
    ours, other = server(OURS), server(OTHER)
    texts = answers(other, LOAD)
    wanted = forced_logprobs(other, LOAD, texts)
    assert not Distance.between(forced_logprobs(ours, LOAD, texts), wanted).small

    sleep(ours, "kv_cache", "weights")
    wake(ours, "weights")
    ours.update_weights(server.model("ratio4b"))
    wake(ours, "kv_cache")
    check(ours, texts, wanted)
