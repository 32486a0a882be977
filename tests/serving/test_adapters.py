# SPDX-License-Identifier: Apache-2.0
"""Two LoRA adapters and the bare model in one batch: they share no K/V, and pack by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from .adapters import TARGETS, make_adapter
from .conftest import Serve, Stock
from .server import Config, check_adapters_share_no_kv, disagreements
from .workloads import WORKLOADS, random_prompt

WORK = WORKLOADS["multi_level"]


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a server with the adapters ``red`` and ``blue``."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [
        f"{name}={make_adapter(folder / name, model, seed=seed)}"
        for seed, name in enumerate(("red", "blue"))
    ]
    args = ("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "3")
    args += ("--max-lora-rank", "8", "--lora-target-modules", *TARGETS, "--lora-paths", *paths)
    unpinned = (("PAT_TEETH_UNPINNED", "1"),)
    return Config("adapters", args=args, env=unpinned, plugins=True)


def test_adapters_share_no_kv(adapted: Config, serve: Serve) -> None:
    check_adapters_share_no_kv(serve(adapted), random_prompt(seed=21, length=250), 3)


def test_a_batch_of_several_adapters(adapted: Config, serve: Serve, stock: Stock) -> None:
    """The same as one request after another, each from an empty cache; the bare model's as ever."""
    server = serve(adapted)
    colours = [("red", "blue", None)[i % 3] for i in range(len(WORK.prompts))]
    alone = []
    for prompt, new, colour in zip(WORK.prompts, WORK.new_tokens, colours, strict=True):
        server.post("/flush_cache")
        alone += server.generate([prompt], new, lora_path=[colour])
    bare = [i for i, colour in enumerate(colours) if colour is None]
    assert disagreements([alone[i] for i in bare], [stock["multi_level"][i] for i in bare]) == []
    server.post("/flush_cache")
    for _ in range(2):  # cold and warm
        options = {"lora_path": colours}
        found = server.counted(server.generate, WORK.prompts, WORK.new_tokens, **options)
        assert disagreements(found[0], alone) == []
    assert found[1].packed_steps > 0
