# SPDX-License-Identifier: Apache-2.0
"""Models with state spaces beside attention, in the same layer or in layers of their own: the
tokens of SGLang's own backend, packed, and states that come back from the prefix cache. State
spaces run in plain torch (plugins/pat_states.py); the hybrid backend, the pools and the unified
tree with its Mamba component are SGLang's. Delta nets are for tests/gpu_serving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.hybrid_models import make_hybrid

from sglang_pat.demo.counters import Counters

from .server import Answer, Config, ServingServer, disagreements
from .workloads import WORKLOADS, Prompt, random_prompt

FAMILIES = ("falcon_h1", "granite_hybrid")
ARGS = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--max-mamba-cache-size", "24", "--max-running-requests", "12"),
)
# States in fp32 do not depend on where a prefill was cut.
ENV = (("PAT_TEETH_CPU", "pat_states"), ("SGLANG_MAMBA_CONV_DTYPE", "float32"))
TURN_TOKENS = 16


Pair = tuple[ServingServer, ServingServer]  # ours and the stock one


def compared(
    pair: Pair, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[list[Answer], Counters]:
    """The answers of both, which must be the same, and what ours counted."""
    ours, stock = pair
    found, counted = ours.counted(ours.generate, prompts, new_tokens)
    assert disagreements(found, stock.generate(prompts, new_tokens)) == []
    assert counted.packed_steps >= new_tokens - 3
    assert not counted.fallbacks and not counted.base_layers
    return found, counted


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = make_hybrid(folder / "model", request.param, dtype="float32")
    with ExitStack() as stack:
        servers = []
        for name in ("pat", "torch_native"):
            config = Config(name, name, ARGS, ENV, plugins=True)
            servers.append(ServingServer(model, config, folder / name))
            stack.callback(servers[-1].stop)
            servers[-1].start()
        for server in servers:
            server.wait_until_ready()
        yield servers[0], servers[1]


def test_answers_equal_the_stock_backends(pair: Pair) -> None:
    """The second time from cached states."""
    prompts, tokens = WORKLOADS["multi_level"].prompts[::2], WORKLOADS["multi_level"].new_tokens[0]
    for _ in range(2):
        _, counted = compared(pair, prompts, tokens)
        assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    text = pair[0].text()
    assert "serves all 3 attention layers" in text and "radix cache (rust tree core)" in text


def test_a_second_turn_starts_from_the_state_of_the_first(pair: Pair) -> None:
    """Until states are evicted by more prompts than the pool has: then they are made anew."""
    system = random_prompt(seed=7, length=150)
    prompts = tuple(system + random_prompt(seed=20 + i, length=20) for i in range(6))
    for turn in range(3):
        if turn == 2:
            others = [random_prompt(seed=100 + i, length=12) for i in range(24)]
            pair[0].generate(others, 2)
            pair[1].generate(others, 2)
        answers, _ = compared(pair, prompts, TURN_TOKENS)
        cached = [answer.cached_tokens for answer in answers]
        assert turn == 0 or (min(cached) >= len(system) if turn == 1 else not any(cached))
        prompts = tuple(
            prompt + answer.tokens + random_prompt(seed=40 + 10 * turn + i, length=9)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        )
