# SPDX-License-Identifier: Apache-2.0
"""The servers of these tests, all started at once on one GPU: a start takes a minute of imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sglang_pat import _C

pytest.importorskip("sglang", reason="the GPU serving tests need SGLang 0.5.23")

from serving.server import Config, ServingServer

from .models import make_gemma2, make_llama

# Logits in fp32 leave the attention as the main thing that rounds.
COMPARED = ("--enable-fp32-lm-head", "--enable-custom-logit-processor")
WINDOW = 64

MODELS: dict[str, Callable[[Path], Path]] = {
    "ratio4": lambda path: make_llama(path, q_heads=8, kv_heads=2),
    "ratio5": lambda path: make_llama(path, q_heads=10, kv_heads=2),
    "ratio7": lambda path: make_llama(path, q_heads=14, kv_heads=2),
    "gemma2": lambda path: make_gemma2(path, window=WINDOW),
}


def _config(model: str, backend: str, *args: str) -> tuple[str, Config]:
    name = "-".join([model, backend, *(arg.strip("-") for arg in args)])
    return model, Config(name, backend=backend, args=(*COMPARED, *args), device="cuda")


# Servers that must not start, and what they say.
REFUSED = {
    _config("ratio4", "pat", "--kv-cache-dtype", "fp8_e5m2"): "on cuda pat reads bfloat16, float16",
    _config("ratio4", "pat", "--enable-torch-compile"): "it would freeze a plan",
    _config("ratio4", "pat", "--enable-deterministic-inference"): "deterministic",
}
# The servers of the tests by name, which begins with the model's: MODEL-BACKEND[-ARGUMENTS].
FLEET = {
    config.name: (model, config)
    for model, config in (
        *REFUSED,
        _config("ratio4", "fa3"),
        _config("ratio4", "flashinfer"),
        _config("ratio4", "pat"),
        _config("ratio4", "pat", "--page-size", "16"),
        _config("ratio4", "pat", "--disable-cuda-graph"),
        *(_config(model, backend) for model in ("ratio5", "ratio7") for backend in ("fa3", "pat")),
        *(_config("gemma2", backend) for backend in ("fa3", "pat")),
    )
}

Server = Callable[[str], ServingServer]


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
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name) for name, make in MODELS.items()}


@pytest.fixture(scope="session")
def fleet(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServingServer]]:
    """All servers by name, started, not yet ready."""
    servers = {
        name: ServingServer(models[model], config, tmp_path_factory.mktemp(name))
        for name, (model, config) in FLEET.items()
    }
    try:
        for server in servers.values():
            server.start()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture(scope="session")
def server(fleet: dict[str, ServingServer]) -> Server:
    """A server by name, once it is ready."""
    ready: set[str] = set()

    def get(name: str) -> ServingServer:
        if name not in ready:
            fleet[name].wait_until_ready()
            ready.add(name)
        return fleet[name]

    return get
