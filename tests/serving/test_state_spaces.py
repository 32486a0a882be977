# SPDX-License-Identifier: Apache-2.0
"""Models with state spaces or delta nets beside attention: the tokens of SGLang's own backend,
packed, and states that come back from the prefix cache. State spaces and delta nets run in plain
torch (plugins/pat_states.py); the hybrid backend, the pools and the unified tree with its Mamba
component are SGLang's. ``PAT_HYBRIDS=all`` runs the families that differ by layers of other kinds
alone as well, which takes minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.hybrid_models import make_hybrid

from .compare import disagreements
from .server import Answer, Config, Prompt, ServingServer
from .workloads import WORKLOADS, random_prompt

FAMILIES = {"qwen3_5": 1, "falcon_h1": 3}  # layers with attention
if os.environ.get("PAT_HYBRIDS") == "all":
    FAMILIES |= {"nemotron_h": 3, "granite_hybrid": 3}
STATES = 24  # fewer than the tests leave in the tree, so that some are evicted
ARGS = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--max-mamba-cache-size", str(STATES), "--max-running-requests", "12"),
)
# States in fp32 do not depend on where a prefill was cut.
ENV = (("PAT_STATES", "1"), ("SGLANG_MAMBA_CONV_DTYPE", "float32"))
TURN_TOKENS = 16


@dataclass(frozen=True)
class Pair:
    ours: ServingServer
    stock: ServingServer
    attention_layers: int

    def compare(self, prompts: tuple[Prompt, ...], new_tokens: int) -> list[Answer]:
        """The answers of both, which must be the same."""
        wanted = self.stock.generate(prompts, new_tokens)
        found = self.ours.generate(prompts, new_tokens)
        assert disagreements(found, wanted) == []
        return found


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family: str = request.param
    folder: Path = tmp_path_factory.mktemp(family)
    model = make_hybrid(folder / "model", family, dtype="float32")
    servers = [
        ServingServer(
            model, Config(backend, backend, ARGS, ENV, plugins=True), folder_of(folder, backend)
        )
        for backend in ("pat", "torch_native")
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield Pair(*servers, FAMILIES[family])
    finally:
        for server in servers:
            server.stop()


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def test_answers_equal_the_stock_backends(pair: Pair) -> None:
    work = WORKLOADS["multi_level"]
    before = pair.ours.counters()
    for _ in range(2):  # cold and cached
        pair.compare(work.prompts, work.new_tokens[0])
    counted = pair.ours.counters() - before
    steps = work.new_tokens[0] - 1
    assert counted.packed_steps >= 2 * (steps - 2)
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert not counted.fallbacks and not counted.base_layers


def test_a_second_turn_starts_from_the_state_of_the_first(pair: Pair) -> None:
    system = random_prompt(seed=7, length=150)
    prompts = tuple(system + random_prompt(seed=20 + i, length=20) for i in range(6))
    for turn in range(3):
        before = pair.ours.counters()
        answers = pair.compare(prompts, TURN_TOKENS)
        counted = pair.ours.counters() - before
        assert counted.packed_steps >= TURN_TOKENS - 3 and not counted.fallbacks
        if turn:  # all but the last answer's last token, which was never fed
            assert min(answer.cached_tokens for answer in answers) >= len(system)
        prompts = tuple(
            prompt + answer.tokens + random_prompt(seed=40 + 10 * turn + i, length=9)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        )


def test_states_are_evicted_and_made_anew(pair: Pair) -> None:
    """More prompts than the pool has states, and then the first ones again."""
    system = random_prompt(seed=8, length=90)
    first = tuple(system + random_prompt(seed=60 + i, length=15) for i in range(4))
    answers = pair.compare(first, TURN_TOKENS)
    for i in range(STATES):
        pair.compare((random_prompt(seed=100 + i, length=12),), 2)
    again = tuple(
        prompt + answer.tokens + (5, 6, 7) for prompt, answer in zip(first, answers, strict=True)
    )
    before = pair.ours.counters()
    assert not any(answer.cached_tokens for answer in pair.compare(again, TURN_TOKENS))
    counted = pair.ours.counters() - before
    assert counted.packed_steps >= TURN_TOKENS - 3 and not counted.fallbacks


def test_the_log_names_what_is_served(pair: Pair) -> None:
    text = pair.ours.text()
    assert f"serves all {pair.attention_layers} attention layers" in text
    assert "looks for shared prefixes in SGLang's radix cache (rust tree core)" in text
