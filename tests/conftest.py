# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests in several files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

import hypothesis
import pytest
import torch

# For `benchmarks`; last, so that the installed sglang_pat comes before the checkout's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# A run of the tests takes the same examples every time, and none has a time limit of its own, so
# that it fails for a change and not by chance or on a busy machine.
# ``pytest --hypothesis-profile default`` draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Files that take longest, about the longest first. With the others that start servers they come
# before the rest, so that two processes (``make test``) end at about the same time. The second
# needs no answers of the stock server, which the first is asking for.
LONGEST = (
    *("test_tokens.py", "test_examples.py", "test_real.py", "test_life.py"),
    *("test_kinds.py", "test_verify.py", "test_demo.py"),
)
SERVER_TESTS = ("serving", "test_demo.py", "test_examples.py", "test_bench_serving.py")


def place(path: PurePath) -> int:
    """Of a file of tests in the order of all."""
    if path.name in LONGEST:
        return LONGEST.index(path.name)
    return len(LONGEST) + set(SERVER_TESTS).isdisjoint(path.parts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path))


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For small tensors: torch's threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No options of ours in the environment."""
    for name in [name for name in os.environ if name.startswith("SGLANG_PAT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that a command starts on a CPU are forks, which take a fifth of the time."""
    from kit import forks

    from sglang_pat.demo.server import Server

    monkeypatch.setattr(Server, "_spawn", forks.start_server)
    monkeypatch.setattr(Server, "counters", forks.counters_of)
    for name, value in forks.cpu_server().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, a real model, in the user's cache."""
    from sglang_pat.demo.smollm2 import NoPackage, model_folder

    try:
        return model_folder()
    except NoPackage as error:
        pytest.skip(str(error))
