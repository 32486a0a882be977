# SPDX-License-Identifier: Apache-2.0
"""The servers of all tests that run, started at once on one GPU (``fleet.py``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_pat import _C

pytest.importorskip("sglang", reason="the GPU serving tests need SGLang 0.5.23")

from .fleet import Fleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not hasattr(_C, "decode_cuda"):
        reason = "sglang_pat was built without CUDA kernels (PAT_CUDA=OFF)"
    elif not torch.cuda.is_available():
        reason = "no CUDA device on this machine"
    elif importlib.util.find_spec("sgl_kernel") is None:
        reason = "no sgl_kernel, so no fa3 to compare with"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def _servers_of(item: pytest.Item) -> tuple[str, ...]:
    """Of the row of a table that the test runs, or of its module."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    of = params.get("row", item.module if isinstance(item, pytest.Function) else None)
    return tuple(getattr(of, "servers", getattr(of, "SERVERS", ())))


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Servers by name: those that some test names which runs."""
    names = {name for item in request.session.items for name in _servers_of(item)}
    fleet = Fleet(sorted(names), tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
