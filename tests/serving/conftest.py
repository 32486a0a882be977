# SPDX-License-Identifier: Apache-2.0
"""One model, the stock server's answers, and one server of ours at a time."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from sglang_pat.demo.model import make_model

from .server import Answer, Config, ServingServer, disagreements
from .workloads import VOCAB, WORKLOADS

pytest.importorskip("sglang", reason="the serving tests need SGLang 0.5.23")

Serve = Callable[[Config], ServingServer]
Stock = dict[str, list[Answer]]  # by workload, or "other weights"


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
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    return make_model(tmp_path_factory.mktemp("other") / "model", vocab=VOCAB, seed=1)


@pytest.fixture(scope="session")
def stock(model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """SGLang's own answers to all workloads, from ``torch_native``, and to ``multi_level`` with the
    weights of ``other_model``. One process of the tests asks for them, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    kept = folder / "stock"
    with (folder / "stock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            config = Config("stock", backend="torch_native")
            with ServingServer(model, config, tmp_path_factory.mktemp(config.name)) as server:
                answers = {name: server.ask(work) for name, work in WORKLOADS.items()}
                server.update_weights(other_model)
                answers["other weights"] = server.ask(WORKLOADS["multi_level"])
            assert disagreements(answers["other weights"], answers["multi_level"]) != []
            kept.write_bytes(pickle.dumps(answers))
    return cast(Stock, pickle.loads(kept.read_bytes()))


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the fault that a server of plugins/pat_teeth.py commits from now on."""
    return tmp_path_factory.mktemp("fault") / "fault"
