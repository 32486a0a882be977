# SPDX-License-Identifier: Apache-2.0
"""One model, the stock server's answers, and one server of ours at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_pat.demo.model import make_model

from .server import Answer, Config, ServingServer, disagreements
from .workloads import VOCAB, WORKLOADS

pytest.importorskip("sglang", reason="the serving tests need SGLang 0.5.23")

Serve = Callable[[Config], ServingServer]
Stock = dict[str, list[Answer]]  # by workload


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", vocab=VOCAB)


@pytest.fixture(scope="session")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A running server of a configuration: the last test's if that is the same and lives."""
    running: dict[Config, ServingServer] = {}

    def stop() -> None:
        while running:
            running.popitem()[1].stop()

    def get(config: Config) -> ServingServer:
        if config not in running or not running[config].alive():
            stop()
            server = ServingServer(model, config, tmp_path_factory.mktemp(config.name))
            server.__enter__()
            running[config] = server
        return running[config]

    yield get
    stop()


@pytest.fixture(scope="session")
def stock(serve: Serve) -> Stock:
    """SGLang's own answers to all workloads, from ``torch_native``."""
    server = serve(Config("stock", backend="torch_native"))
    return {name: server.ask(work) for name, work in WORKLOADS.items()}


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    return make_model(tmp_path_factory.mktemp("other") / "model", vocab=VOCAB, seed=1)


@pytest.fixture(scope="session")
def stock_other(
    other_model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    """SGLang's own answers with the other weights, to ``multi_level``."""
    config = Config("stock-other", backend="torch_native")
    with ServingServer(other_model, config, tmp_path_factory.mktemp(config.name)) as server:
        answers = server.ask(WORKLOADS["multi_level"])
    assert disagreements(answers, stock["multi_level"]) != []
    return answers


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the fault that a server of plugins/pat_teeth.py commits from now on."""
    return tmp_path_factory.mktemp("fault") / "fault"
