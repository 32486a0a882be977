# SPDX-License-Identifier: Apache-2.0
"""Small models of latents (MLA), and of state spaces beside attention, in the same layer or in
layers of their own: the tokens of SGLang's own backend, packed, and states that come back from the
prefix cache.

State spaces run in plain torch (plugins/pat_states.py), and a model of latents gives these in
prefills (plugins/pat_latents.py), as on a CPU SGLang's attention runs no other; decode steps, the
hybrid backend, the pools and the trees are SGLang's. Delta nets are for tests/gpu_serving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kit.hybrid_models import make_hybrid

from sglang_pat.demo.counters import Counters

from .server import Answer, Config, ServingServer, disagreements, running
from .workloads import WORKLOADS, Prompt, random_prompt

LATENTS = (("PAT_TEETH_CPU", "pat_latents"),)
PARTS = (("PAT_TEETH_PARTS", "1"),)  # q and K come in two, as to fa3
OF_LATENTS = (
    Config("stock", "torch_native", env=LATENTS, plugins=True),
    Config("whole", env=LATENTS, plugins=True),
    # On larger pages, and a request alone is pat's, too.
    Config(
        "parts",
        args=("--page-size", "16"),
        env=(*LATENTS, *PARTS, ("SGLANG_PAT_MIN_BATCH", "1")),
        plugins=True,
    ),
    # What was answered before is drafted, in trees (test_verify.py).
    Config(
        "drafts",
        args=(
            *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
            *("--speculative-ngram-max-bfs-breadth", "4"),
        ),
        env=(("PAT_TEETH_CPU", "pat_latents,pat_verify"), *PARTS),
        plugins=True,
    ),
)
STATES: dict[str, Any] = {
    "args": (
        *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
        *("--max-mamba-cache-size", "24", "--max-running-requests", "12"),
    ),
    # States in fp32 do not depend on where a prefill was cut.
    "env": (("PAT_TEETH_CPU", "pat_states"), ("SGLANG_MAMBA_CONV_DTYPE", "float32")),
    "plugins": True,
}
OF_STATES = (Config("pat", **STATES), Config("stock", "torch_native", **STATES))
TURN_TOKENS = 16
Servers = dict[str, ServingServer]


def of_a_model(
    factory: pytest.TempPathFactory, family: str, configs: Sequence[Config], **layers: int
) -> Iterator[Servers]:
    """Servers of one model, side by side, by name."""
    folder = factory.mktemp(family)
    model = make_hybrid(folder / "model", family, dtype="float32", **layers)
    made = {each.name: ServingServer(model, each, folder / each.name) for each in configs}
    with running(*made.values()):
        yield made


@pytest.fixture(scope="module")
def of_latents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    yield from of_a_model(tmp_path_factory, "deepseek_v2", OF_LATENTS, **layers)


@pytest.fixture(scope="module", params=["falcon_h1", "granite_hybrid"])
def of_states(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    yield from of_a_model(tmp_path_factory, request.param, OF_STATES)


def compared(
    servers: Servers, name: str, prompts: Sequence[Prompt], new_tokens: int, *, packs: bool = True
) -> tuple[list[Answer], Counters]:
    """A server's answers, which must be the stock one's, and what it counted."""
    found, counted = servers[name].counted(servers[name].generate, prompts, new_tokens)
    assert disagreements(found, servers["stock"].generate(prompts, new_tokens)) == []
    assert not counted.fallbacks and not counted.base_layers
    assert counted.packed_steps >= new_tokens - 3 if packs else counted.packed_steps == 0
    return found, counted


@pytest.mark.parametrize("name", ["whole", "parts"])
def test_answers_of_latents(name: str, of_latents: Servers) -> None:
    for work, packs in (("multi_level", True), ("disjoint", False)):
        prompts, new_tokens = WORKLOADS[work].prompts, WORKLOADS[work].new_tokens[0]
        _, counted = compared(of_latents, name, prompts, new_tokens, packs=packs)
        assert counted.decode_steps > 0
        assert not packs or counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert "serves all 2 attention layers" in of_latents[name].text()


def test_verified_drafts_of_latents(of_latents: Servers) -> None:
    """Cold and warm, when nearly all drafts are accepted. So many packed rows a request, 64, are
    not worth packing."""
    prompts, new_tokens = WORKLOADS["multi_level"].prompts, WORKLOADS["multi_level"].new_tokens[0]
    for _ in range(2):
        answers, counted = compared(of_latents, "drafts", prompts, new_tokens, packs=False)
        assert counted.verify_steps > 0
    steps = sum(answer.verify_steps for answer in answers)
    assert 0 < steps < 0.6 * len(prompts) * (new_tokens - 1)
    assert "verification of drafts runs on pat" in of_latents["drafts"].text()


def test_answers_of_state_spaces(of_states: Servers) -> None:
    """Of two agents with three turns each; the second time from cached states."""
    prompts, new_tokens = WORKLOADS["crowd"].prompts[5:11], 24
    for _ in range(2):
        _, counted = compared(of_states, "pat", prompts, new_tokens)
        assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    text = of_states["pat"].text()
    assert "serves all 3 attention layers" in text and "radix cache (rust tree core)" in text


def test_a_second_turn_starts_from_the_state_of_the_first(of_states: Servers) -> None:
    """Until states are evicted by more prompts than the pool has: then they are made anew."""
    system = random_prompt(seed=7, length=100)
    prompts = tuple(system + random_prompt(seed=20 + i, length=20) for i in range(4))
    for turn in range(3):
        if turn == 2:
            others = [random_prompt(seed=100 + i, length=12) for i in range(24)]
            for server in of_states.values():
                server.generate(others, 2)
        answers, _ = compared(of_states, "pat", prompts, TURN_TOKENS)
        cached = [answer.cached_tokens for answer in answers]
        assert turn == 0 or (min(cached) >= len(system) if turn == 1 else not any(cached))
        prompts = tuple(
            prompt + answer.tokens + random_prompt(seed=40 + 10 * turn + i, length=9)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        )
