# SPDX-License-Identifier: Apache-2.0
"""A server that sleeps, wakes and gets other weights answers as one that started with them."""

from __future__ import annotations

from pathlib import Path

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config, ServingServer
from .workloads import WORKLOADS

SLEEPER = Config("sleeper", env=(("PAT_TEETH_SLEEP", "1"),), plugins=True)
AWAKE = "sglang_pat: awake, the next plan is loaded anew"
MULTI_LEVEL = WORKLOADS["multi_level"]


def ask(server: ServingServer) -> list[Answer]:
    return server.generate(MULTI_LEVEL.prompts, MULTI_LEVEL.new_tokens)


def test_a_server_that_slept_answers_as_before(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """Without the memory saver no memory is released, but the plan is forgotten and made anew."""
    server = serve(SLEEPER)
    assert disagreements(ask(server), stock["multi_level"]) == []
    for tags in (None, ["kv_cache"]):
        server.post("/flush_cache?timeout=30")  # once it is idle, as it must be to sleep
        server.post("/release_memory_occupation", {"tags": tags})
        server.post("/resume_memory_occupation", {"tags": tags})
        before = server.counters()
        assert disagreements(ask(server), stock["multi_level"]) == []
        assert (server.counters() - before).packed_steps > 0
    assert server.text().count(AWAKE) == 2


def test_a_server_that_slept_answers_by_its_new_weights(
    model: Path,
    other_model: Path,
    serve: Serve,
    stock: dict[str, list[Answer]],
    stock_other: list[Answer],
) -> None:
    """SGLang flushes the cache that the old weights filled, and no plan over it is used again."""
    server = serve(SLEEPER)
    assert disagreements(ask(server), stock["multi_level"]) == []
    for weights, expected in (
        (model, stock["multi_level"]),
        (other_model, stock_other),
        (model, stock["multi_level"]),
    ):
        answer = server.post("/update_weights_from_disk", {"model_path": str(weights)})
        assert answer["success"], answer["message"]
        before = server.counters()
        assert disagreements(ask(server), expected) == []
        assert disagreements(ask(server), expected) == []  # cached
        counted = server.counters() - before
        assert counted.packed_steps > 0
        assert not counted.fallbacks
