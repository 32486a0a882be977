# SPDX-License-Identifier: Apache-2.0
"""Prompts, as token ids, and how many tokens to generate for each. Fixed seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

VOCAB = 2048

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Prompts sent at once, and the tokens to generate for each."""

    prompts: tuple[Prompt, ...]
    new_tokens: tuple[int, ...]
    ignore_eos: bool = True


def text_of(rng: Random, length: int) -> Prompt:
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


def random_prompt(seed: int, length: int) -> Prompt:
    """A prompt that no workload has anything in common with."""
    return text_of(Random(seed), length)


def _under(rng: Random, prompt: Prompt, lengths: Iterable[int]) -> list[Prompt]:
    """Prompts that begin with ``prompt`` and have ``lengths`` tokens of their own."""
    return [prompt + text_of(rng, length) for length in lengths]


def _system(seed: int, tokens: int, lengths: Iterable[int]) -> list[Prompt]:
    rng = Random(seed)
    return _under(rng, text_of(rng, tokens), lengths)


def _same_length(prompts: list[Prompt], new_tokens: int, **options: bool) -> Workload:
    return Workload(tuple(prompts), (new_tokens,) * len(prompts), **options)


def _multi_level() -> list[Prompt]:
    """System prompt, two tools, three users each; one prompt twice, one that ends inside others."""
    rng = Random(2)
    system = text_of(rng, 200)
    prompts = []
    for tool in _under(rng, system, (130, 130)):
        users = _under(rng, tool, (40, 40, 40))
        prompts += [*users, *_under(rng, users[0], (25,))]
    return [*prompts, prompts[0], system]


def _crowd() -> list[Prompt]:
    """64 requests: eight agents of eight turns each."""
    rng = Random(7)
    agents = _under(rng, text_of(rng, 96), (48,) * 8)
    return [turn for agent in agents for turn in _under(rng, agent, (12,) * 8)]


def _hungry() -> list[Prompt]:
    """More tokens than a small cache holds: some shared prefixes, much of their own."""
    rng = Random(9)
    systems = [text_of(rng, 40) for _ in range(3)]
    return [systems[i % 3] + text_of(rng, 20) for i in range(12)]


WORKLOADS = {
    "shared": _same_length(_system(1, 300, range(10, 66, 7)), 24),
    "multi_level": _same_length(_multi_level(), 24),
    "disjoint": _same_length(_system(3, 0, (1, 2, 17, 64, 150, 333)), 24),
    "identical": _same_length([random_prompt(4, 210)] * 6, 24),
    # Prefixes that are split over threads, and prefilled in chunks where those are small.
    "long": _same_length([*_system(5, 1500, (30,) * 3), random_prompt(50, 900)], 16),
    # Requests that leave the batch one after another.
    "ragged": Workload(tuple(_system(6, 120, range(5, 29, 3))), tuple(range(3, 75, 9))),
    "crowd": _same_length(_crowd(), 16),
    # Long answers, to be interfered with while they come.
    "patient": _same_length(_system(8, 150, (20,) * 8), 320),
    "hungry": _same_length(_hungry(), 110, ignore_eos=False),
}
PATIENT = WORKLOADS["patient"]
