# SPDX-License-Identifier: Apache-2.0
"""Prompts, as token ids, and how many tokens to generate for each. Fixed seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .server import Prompt

VOCAB = 2048


@dataclass(frozen=True)
class Workload:
    """Prompts sent at once, and the tokens to generate for each."""

    prompts: tuple[Prompt, ...]
    new_tokens: tuple[int, ...]
    ignore_eos: bool = True


def _text(rng: random.Random, length: int) -> Prompt:
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


def _same_length(prompts: list[Prompt], new_tokens: int) -> Workload:
    return Workload(tuple(prompts), (new_tokens,) * len(prompts))


def _shared() -> Workload:
    rng = random.Random(1)
    system = _text(rng, 300)
    return _same_length([system + _text(rng, 10 + 7 * i) for i in range(8)], 24)


def _multi_level() -> Workload:
    """System prompt, two tools, three users each; one prompt twice, one that ends inside others."""
    rng = random.Random(2)
    system = _text(rng, 200)
    prompts = []
    for _ in range(2):
        tool = system + _text(rng, 130)
        users = [tool + _text(rng, 40) for _ in range(3)]
        prompts += [*users, users[0] + _text(rng, 25)]
    return _same_length([*prompts, prompts[0], system], 24)


def _disjoint() -> Workload:
    rng = random.Random(3)
    return _same_length([_text(rng, length) for length in (1, 2, 17, 64, 150, 333)], 24)


def _identical() -> Workload:
    prompt = _text(random.Random(4), 210)
    return _same_length([prompt] * 6, 24)


def _long() -> Workload:
    """Prefixes that are split over threads, and prefilled in chunks where those are small."""
    rng = random.Random(5)
    system = _text(rng, 1500)
    return _same_length([system + _text(rng, 30) for _ in range(3)] + [_text(rng, 900)], 16)


def _ragged() -> Workload:
    """Requests that leave the batch one after another."""
    rng = random.Random(6)
    system = _text(rng, 120)
    prompts = tuple(system + _text(rng, 5 + 3 * i) for i in range(8))
    return Workload(prompts, tuple(3 + 9 * i for i in range(8)))


def _crowd() -> Workload:
    """64 requests: eight agents of eight turns each."""
    rng = random.Random(7)
    system = _text(rng, 96)
    agents = [system + _text(rng, 48) for _ in range(8)]
    return _same_length([agent + _text(rng, 12) for agent in agents for _ in range(8)], 16)


def _patient() -> Workload:
    """Long answers, to be interfered with while they come."""
    rng = random.Random(8)
    system = _text(rng, 150)
    return _same_length([system + _text(rng, 20) for _ in range(8)], 500)


def _hungry() -> Workload:
    """More tokens than a small cache holds: some shared prefixes, much of their own."""
    rng = random.Random(9)
    systems = [_text(rng, 40) for _ in range(3)]
    prompts = tuple(systems[i % 3] + _text(rng, 20) for i in range(12))
    return Workload(prompts, (110,) * 12, ignore_eos=False)


WORKLOADS = {
    "shared": _shared(),
    "multi_level": _multi_level(),
    "disjoint": _disjoint(),
    "identical": _identical(),
    "long": _long(),
    "ragged": _ragged(),
    "crowd": _crowd(),
    "patient": _patient(),
    "hungry": _hungry(),
}


def random_prompt(seed: int, length: int) -> Prompt:
    """A prompt that no workload has anything in common with."""
    return _text(random.Random(seed), length)
