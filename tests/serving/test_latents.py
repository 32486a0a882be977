# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek-V2 (MLA): the tokens of SGLang's own backend, packed. In prefills it gives
latents (plugins/pat_latents.py), as on a CPU SGLang's attention runs no other; the model's decode
steps, the pool and the tree are SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.hybrid_models import make_hybrid

from .server import Answer, Config, ServingServer, disagreements
from .workloads import WORKLOADS

LAYERS = 2
WORKS = ("multi_level", "disjoint")
ENV = (("PAT_TEETH_CPU", "pat_latents"),)
CONFIGS = {
    "stock": Config("stock", "torch_native", env=ENV, plugins=True),
    "whole": Config("whole", env=ENV, plugins=True),
    # On larger pages, and a request alone is pat's, too.
    "parts": Config(
        "parts",
        args=("--page-size", "16"),
        env=(*ENV, ("PAT_TEETH_PARTS", "1"), ("SGLANG_PAT_MIN_BATCH", "1")),
        plugins=True,
    ),
    # What was answered before is drafted, in trees (test_verify.py).
    "drafts": Config(
        "drafts",
        args=(
            *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
            *("--speculative-ngram-max-bfs-breadth", "4"),
        ),
        env=(("PAT_TEETH_CPU", "pat_latents,pat_verify"), ("PAT_TEETH_PARTS", "1")),
        plugins=True,
    ),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServingServer]]:
    folder: Path = tmp_path_factory.mktemp("latents")
    layers = {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS}
    model = make_hybrid(folder / "model", "deepseek_v2", dtype="float32", **layers)
    with ExitStack() as stack:
        made = {name: ServingServer(model, each, folder / name) for name, each in CONFIGS.items()}
        for server in made.values():
            stack.callback(server.stop)
            server.start()
        for server in made.values():
            server.wait_until_ready()
        yield made


@pytest.fixture(scope="module")
def stock(servers: dict[str, ServingServer]) -> dict[str, list[Answer]]:
    return {name: servers["stock"].ask(WORKLOADS[name]) for name in WORKS}


@pytest.mark.parametrize("queries", ["whole", "parts"])
def test_answers_equal_the_stock_backends(
    servers: dict[str, ServingServer], stock: dict[str, list[Answer]], queries: str
) -> None:
    server = servers[queries]
    for name in WORKS:
        work = WORKLOADS[name]
        answers, counted = server.counted(server.ask, work)
        assert disagreements(answers, stock[name]) == []
        assert not counted.fallbacks and not counted.base_layers
        if name == "multi_level":
            assert counted.packed_steps >= work.new_tokens[0] - 3
            assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
        else:
            assert counted.packed_steps == 0 < counted.decode_steps
    assert f"serves all {LAYERS} attention layers" in server.text()


def test_verified_drafts_are_those_of_the_stock_backend(
    servers: dict[str, ServingServer], stock: dict[str, list[Answer]]
) -> None:
    """Cold and warm, when nearly all drafts are accepted. So many packed rows a request, 64, are
    not worth packing."""
    server, work = servers["drafts"], WORKLOADS["multi_level"]
    (cold, warm), counted = server.counted(lambda: (server.ask(work), server.ask(work)))
    assert disagreements(cold + warm, stock["multi_level"] * 2) == []
    steps = sum(answer.verify_steps for answer in warm)
    assert 0 < steps < 0.6 * sum(len(answer.tokens) - 1 for answer in warm)
    assert counted.verify_steps > 0 == counted.packed_steps
    assert not counted.fallbacks and not counted.base_layers
    assert "verification of drafts runs on pat" in server.text()
