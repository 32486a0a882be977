# SPDX-License-Identifier: Apache-2.0
"""Models with state spaces beside attention, in the same layer or in layers of their own: the
tokens of SGLang's own backend, packed, and states that come back from the prefix cache. State
spaces run in plain torch (plugins/pat_states.py); the hybrid backend, the pools and the unified
tree with its Mamba component are SGLang's. Delta nets are for tests/gpu_serving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.hybrid_models import make_hybrid

from .server import Answer, Config, ServingServer, disagreements
from .workloads import WORKLOADS, Prompt, random_prompt

FAMILIES = ("falcon_h1", "granite_hybrid")
STATES = 24  # fewer than the tests leave in the tree, so that some are evicted
ARGS = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--max-mamba-cache-size", str(STATES), "--max-running-requests", "12"),
)
# States in fp32 do not depend on where a prefill was cut.
ENV = (("PAT_TEETH_CPU", "pat_states"), ("SGLANG_MAMBA_CONV_DTYPE", "float32"))
TURN_TOKENS = 16


@dataclass(frozen=True)
class Pair:
    ours: ServingServer
    stock: ServingServer

    def compare(self, prompts: tuple[Prompt, ...], new_tokens: int) -> list[Answer]:
        """The answers of both, which must be the same."""
        wanted = self.stock.generate(prompts, new_tokens)
        found = self.ours.generate(prompts, new_tokens)
        assert disagreements(found, wanted) == []
        return found


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
        yield Pair(*servers)


def test_answers_equal_the_stock_backends(pair: Pair) -> None:
    prompts, tokens = WORKLOADS["multi_level"].prompts[::2], WORKLOADS["multi_level"].new_tokens[0]
    before = pair.ours.counters()
    cold = pair.compare(prompts, tokens)
    assert disagreements(pair.ours.generate(prompts, tokens), cold) == []  # from cached states
    counted = pair.ours.counters() - before
    assert counted.packed_steps >= 2 * (tokens - 3)
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert not counted.fallbacks and not counted.base_layers
    text = pair.ours.text()
    assert "serves all 3 attention layers" in text and "radix cache (rust tree core)" in text


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
    pair.compare(tuple(random_prompt(seed=100 + i, length=12) for i in range(STATES)), 2)
    again = tuple(
        prompt + answer.tokens + (5, 6, 7) for prompt, answer in zip(first, answers, strict=True)
    )
    before = pair.ours.counters()
    assert not any(answer.cached_tokens for answer in pair.compare(again, TURN_TOKENS))
    counted = pair.ours.counters() - before
    assert counted.packed_steps >= TURN_TOKENS - 3 and not counted.fallbacks
