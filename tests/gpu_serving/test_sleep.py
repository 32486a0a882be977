# SPDX-License-Identifier: Apache-2.0
"""Sleep, wake and new weights with SGLang's memory saver, as trainers use them.

The server's memory is released and mapped again at the same addresses, without its contents; the
graphs captured before go on. Two servers of their own, beside the fleet of the other tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving.server import Answer, Config, ServingServer
from serving.workloads import VOCAB

from sglang_pat.demo.model import make_model

from .agreement import LOADS, Distance, answers, forced_logprobs
from .fleet import COMPARED
from .footprint import device_bytes
from .models import HEAD_DIM, HIDDEN, LAYERS

LOAD = LOADS["multi_level"]
KV_HEADS, TOKENS, REQUESTS, CONTEXT = 2, 60_000, 2048, 8192
ARGS = (
    *COMPARED,
    *("--max-total-tokens", str(TOKENS), "--mem-fraction-static", "0.85"),
    *("--max-running-requests", str(REQUESTS)),
)
# Of the same tokens' log-probabilities before and after: one batch's rounding against another's.
MEAN, LARGEST = 0.02, 0.5


def _model(path: Path, seed: int) -> Path:
    return make_model(
        path,
        hidden=HIDDEN,
        layers=LAYERS,
        q_heads=4 * KV_HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        max_positions=CONTEXT,
        dtype="bfloat16",
        seed=seed,
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return _model(folder / "first", 0), _model(folder / "second", 1)


@pytest.fixture(scope="module")
def servers(
    weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServingServer, ServingServer]]:
    """Ours of the first weights, which may sleep, and fa3 of the second."""
    folder = tmp_path_factory.mktemp("sleep")
    saver = ("--enable-memory-saver", "--enable-weights-cpu-backup")
    ours = Config("sleep-pat", backend="pat", args=(*ARGS, *saver), device="cuda")
    theirs = Config("sleep-fa3", backend="fa3", args=ARGS, device="cuda")
    made = (
        ServingServer(weights[0], ours, folder / "pat"),
        ServingServer(weights[1], theirs, folder / "fa3"),
    )
    try:
        for server in made:
            server.start()
        for server in made:
            server.wait_until_ready()
        yield made
    finally:
        for server in made:
            server.stop()


def sleep(server: ServingServer, *tags: str) -> None:
    server.post("/flush_cache?timeout=30")  # once it is idle, as it must be to sleep
    server.post("/release_memory_occupation", {"tags": list(tags) or None})


def wake(server: ServingServer, *tags: str) -> None:
    server.post("/resume_memory_occupation", {"tags": list(tags) or None})


def check_packed_and_equal(
    server: ServingServer, texts: list[Answer], expected: list[float]
) -> None:
    before = server.counters()
    found = Distance.between(forced_logprobs(server, LOAD, texts), expected)
    print(found)
    assert found.mean < MEAN and found.largest < LARGEST
    counted = server.counters() - before
    assert counted.packed_steps > 0
    assert set(counted.fallbacks) <= {"extend", "idle"}


def test_asleep_and_awake(servers: tuple[ServingServer, ServingServer]) -> None:
    server, _ = servers
    texts = answers(server, LOAD)
    expected = forced_logprobs(server, LOAD, texts)
    check_packed_and_equal(server, texts, expected)  # from run to run, awake

    workspace = re.search(r"workspace: ([\d,]+) MB on the GPU", server.text())
    assert workspace is not None
    workspace_bytes = int(workspace[1].replace(",", "")) << 20
    assert workspace_bytes > 100 << 20  # large enough to be seen beside the rest
    pool_bytes = 2 * LAYERS * TOKENS * KV_HEADS * HEAD_DIM * 2 + 4 * REQUESTS * CONTEXT

    server.post("/flush_cache?timeout=30")
    awake = device_bytes()
    sleep(server, "kv_cache")
    released = awake - device_bytes()
    print(f"released {released >> 20} MB, of which the workspace has {workspace_bytes >> 20}")
    assert released > pool_bytes + 0.9 * workspace_bytes
    wake(server, "kv_cache")
    check_packed_and_equal(server, texts, expected)

    sleep(server)
    assert awake - device_bytes() > released
    # In parts, as trainers do: what is not back yet must not be touched.
    wake(server, "weights")
    wake(server, "kv_cache", "cuda_graph")
    check_packed_and_equal(server, texts, expected)
    assert device_bytes() > awake - (64 << 20)


def test_new_weights_after_a_sleep(
    weights: tuple[Path, Path], servers: tuple[ServingServer, ServingServer]
) -> None:
    server, reference = servers
    texts = answers(reference, LOAD)
    expected = forced_logprobs(reference, LOAD, texts)
    old = Distance.between(forced_logprobs(server, LOAD, texts), expected)
    assert not old.mean < 10 * MEAN  # other weights: far away, or NaN

    sleep(server, "kv_cache", "weights")
    wake(server, "weights")
    answer = server.post("/update_weights_from_disk", {"model_path": str(weights[1])})
    assert answer["success"], answer["message"]
    wake(server, "kv_cache")
    check_packed_and_equal(server, texts, expected)
