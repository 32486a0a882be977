# SPDX-License-Identifier: Apache-2.0
"""The servers of all modules that run, started at once on one GPU (``fleet.py``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_pat import _C

pytest.importorskip("sglang", reason="the GPU serving tests need SGLang 0.5.23")

from .fleet import Fleet


def _why_not() -> str:
    if not hasattr(_C, "decode_cuda"):
        return "sglang_pat was built without CUDA kernels (PAT_CUDA=OFF)"
    if not torch.cuda.is_available():
        return "no CUDA device on this machine"
    if importlib.util.find_spec("sgl_kernel") is None:
        return "no sgl_kernel, so no fa3 to compare with"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Servers by name: those of the ``SERVERS`` of every module of which a test runs."""
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    names = {name for module in modules for name in getattr(module, "SERVERS", ())}
    fleet = Fleet(sorted(names), tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
