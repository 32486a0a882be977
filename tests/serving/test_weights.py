# SPDX-License-Identifier: Apache-2.0
"""A server that sleeps, wakes and changes its weights answers as one that started so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pat.demo.model import make_model

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config, ServingServer
from .workloads import VOCAB, WORKLOADS

SLEEPER = Config("sleeper", env=(("PAT_TEETH_SLEEP", "1"),), plugins=True)
AWAKE = "sglang_pat: awake, the next plan is loaded anew"
MULTI_LEVEL = WORKLOADS["multi_level"]


def ask(server: ServingServer) -> list[Answer]:
    return server.generate(MULTI_LEVEL.prompts, MULTI_LEVEL.new_tokens)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other") / "model", vocab=VOCAB, seed=1)


@pytest.fixture(scope="module")
def other_answers(other_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """SGLang's own, with the other weights."""
    config = Config("stock-other", backend="torch_native")
    with ServingServer(other_model, config, tmp_path_factory.mktemp("stock-other")) as server:
        return ask(server)


def test_asleep_and_awake(serve: Serve, stock: dict[str, list[Answer]]) -> None:
    """Without the memory saver nothing is released; the plan is forgotten all the same."""
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


def test_new_weights(
    model: Path,
    other_model: Path,
    serve: Serve,
    stock: dict[str, list[Answer]],
    other_answers: list[Answer],
) -> None:
    """The cache that the old weights filled is flushed, and so is what was planned over it."""
    server = serve(SLEEPER)
    assert disagreements(ask(server), stock["multi_level"]) == []
    assert disagreements(other_answers, stock["multi_level"]) != []
    for weights, expected in (
        (model, stock["multi_level"]),
        (other_model, other_answers),
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
