# SPDX-License-Identifier: Apache-2.0
"""Sleep, wake and new weights with SGLang's memory saver, as trainers use them.

The server's memory is released and mapped again at the same addresses, without its contents; the
graphs captured before go on.
"""

from __future__ import annotations

import re

from serving.server import Answer, ServingServer

from .agreement import LOADS, Distance, answers, forced_logprobs
from .fleet import Fleet
from .footprint import device_bytes
from .models import HEAD_DIM, LAYERS

OURS, OTHER = "ratio4-pat-sleeper", "ratio4b-fa3"
SERVERS = (OURS, OTHER)
LOAD = LOADS["multi_level"]
KV_HEADS = 2
MB = 1 << 20


def sleep(server: ServingServer, *tags: str) -> None:
    server.post("/flush_cache?timeout=30")  # once it is idle, as it must be to sleep
    server.post("/release_memory_occupation", {"tags": list(tags) or None})


def wake(server: ServingServer, *tags: str) -> None:
    server.post("/resume_memory_occupation", {"tags": list(tags) or None})


def _said(pattern: str, server: ServingServer) -> int:
    found = re.search(pattern, server.text())
    assert found is not None, pattern
    return int(found[1].replace(",", ""))


def check_packed_and_equal(
    server: ServingServer, texts: list[Answer], expected: list[float]
) -> None:
    before = server.counters()
    found = Distance.between(forced_logprobs(server, LOAD, texts), expected)
    counted = server.counters() - before
    print(found, counted)
    assert found.small
    assert counted.packed_steps > 0
    assert not counted.fallbacks


def test_asleep_and_awake(server: Fleet) -> None:
    ours = server(OURS)
    texts = answers(ours, LOAD)
    expected = forced_logprobs(ours, LOAD, texts)
    check_packed_and_equal(ours, texts, expected)  # from run to run, awake

    tokens = _said(r"max_total_num_tokens=(\d+)", ours)
    pool_bytes = 2 * LAYERS * tokens * KV_HEADS * HEAD_DIM * 2
    workspace_bytes = _said(r"workspace: ([\d,]+) MB on the GPU", ours) * MB
    assert workspace_bytes > 50 * MB  # so that it is seen beside the rest

    ours.post("/flush_cache?timeout=30")
    awake = device_bytes()
    sleep(ours, "kv_cache")
    released = awake - device_bytes()
    print(f"released {released // MB} MB, {workspace_bytes // MB} of them the workspace's")
    assert released > pool_bytes + 0.9 * workspace_bytes
    wake(ours, "kv_cache")
    check_packed_and_equal(ours, texts, expected)

    sleep(ours)
    assert awake - device_bytes() > released
    # In parts, as trainers do: what is not back yet must not be touched.
    wake(ours, "weights")
    wake(ours, "kv_cache", "cuda_graph")
    check_packed_and_equal(ours, texts, expected)


def test_new_weights_after_a_sleep(server: Fleet) -> None:
    ours, other = server(OURS), server(OTHER)
    texts = answers(other, LOAD)
    expected = forced_logprobs(other, LOAD, texts)
    assert not Distance.between(forced_logprobs(ours, LOAD, texts), expected).small

    sleep(ours, "kv_cache", "weights")
    wake(ours, "weights")
    told = ours.post("/update_weights_from_disk", {"model_path": str(server.model("ratio4b"))})
    assert told["success"], told
    wake(ours, "kv_cache")
    check_packed_and_equal(ours, texts, expected)
