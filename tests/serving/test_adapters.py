# SPDX-License-Identifier: Apache-2.0
"""Two LoRA adapters and the bare model in one batch: they share no K/V, and pack by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from .adapters import TARGETS, make_adapter
from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config
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
    """Equal prompts under other adapters are other nodes, and nothing of them is packed; under the
    same adapter they are one."""
    server = serve(adapted)
    prompt = random_prompt(seed=21, length=250)
    colours = ("red", "blue", None)
    for colour in colours:
        (cold,) = server.generate([prompt], 1, adapters=[colour])
        assert cold.cached_tokens == 0
    before = server.counters()
    answers = server.generate([prompt] * 3, 24, adapters=colours)
    counted = server.counters() - before
    assert all(answer.cached_tokens > 200 for answer in answers)
    assert len({answer.tokens for answer in answers}) == 3  # the adapters do make a difference
    assert counted.packed_steps == 0 and counted.kv_tokens_read == counted.kv_tokens_unpacked
    before = server.counters()
    server.generate([prompt] * 3, 24, adapters=["red"] * 3)
    assert (server.counters() - before).packed_steps >= 20


def test_a_batch_of_several_adapters(
    adapted: Config, serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """The same as one request after another, each from an empty cache; the bare model's as ever."""
    server = serve(adapted)
    colours = [("red", "blue", None)[i % 3] for i in range(len(WORK.prompts))]
    alone = []
    for prompt, new, colour in zip(WORK.prompts, WORK.new_tokens, colours, strict=True):
        server.post("/flush_cache")
        alone += server.generate([prompt], new, adapters=[colour])
    bare = [i for i, colour in enumerate(colours) if colour is None]
    assert disagreements([alone[i] for i in bare], [stock["multi_level"][i] for i in bare]) == []
    server.post("/flush_cache")
    before = server.counters()
    for _ in range(2):  # cold and warm
        together = server.generate(WORK.prompts, WORK.new_tokens, adapters=colours)
        assert disagreements(together, alone) == []
    assert (server.counters() - before).packed_steps > 0
