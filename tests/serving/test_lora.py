# SPDX-License-Identifier: Apache-2.0
"""Adapters: requests of two, and of the bare model, in one batch get the stock server's tokens, and
share K/V with their own alone."""

from __future__ import annotations

from pathlib import Path

from .adapters import RANK, TARGETS, make_adapter
from .server import Config, ServingServer, check_adapters_share_no_kv, disagreements
from .workloads import WORKLOADS, random_prompt

PATHS = ("red", "blue", None)


def test_answers_equal_the_stock_backends(model: Path, tmp_path: Path) -> None:
    args = ["--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "3"]
    args += ["--max-lora-rank", str(RANK), "--lora-target-modules", *TARGETS, "--lora-paths"]
    for seed, name in enumerate(PATHS[:2]):
        args.append(f"{name}={make_adapter(tmp_path / name, model, seed=seed)}")
    work = WORKLOADS["shared"]
    fields = {"lora_path": [PATHS[i % 3] for i in range(len(work.prompts))]}
    found = []
    for backend in ("torch_native", "pat"):
        env = (("PAT_TEETH_UNPINNED", "1"),)
        config = Config(backend, backend, tuple(args), env, plugins=True)
        with ServingServer(model, config, tmp_path / f"of_{backend}") as server:
            found.append(server.generate(work.prompts, work.new_tokens, **fields))
            if backend == "pat":
                counted = server.counters()
                assert counted.packed_steps > 0 and not counted.fallbacks
                check_adapters_share_no_kv(server, random_prompt(seed=21, length=250), 3)
    assert disagreements(found[1], found[0]) == []
