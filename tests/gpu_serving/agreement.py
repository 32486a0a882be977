# SPDX-License-Identifier: Apache-2.0
"""How far two servers agree in half precision, where near-ties flip and texts part for good.

Free: the share of equal tokens of greedy answers. Forced: how much the log-probabilities of one
continuation differ, when each server decodes it token by token (``kit.forcing``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kit import forcing
from serving.server import Answer, ServingServer
from serving.workloads import WORKLOADS, Prompt, random_prompt

from sglang_pat.demo.counters import Counters

NEW_TOKENS = 48
PEERS = ("fa3", "flashinfer")


@dataclass(frozen=True)
class Load:
    """Prompts sent at once; ``adapters``: the LoRA adapter of each, None for the bare model."""

    prompts: tuple[Prompt, ...]
    samples: int = 1
    adapters: tuple[str | None, ...] | None = None


SYSTEM = random_prompt(seed=81, length=2100)
LOADS = {
    "shared": Load(WORKLOADS["crowd"].prompts),
    # Three requests a prompt, so that each of two data parallel ranks has some that share. Not
    # ``samples``: forced tokens are decoded once for each prompt.
    "multi_level": Load((WORKLOADS["multi_level"].prompts + WORKLOADS["shared"].prompts) * 3),
    "disjoint": Load(tuple(random_prompt(seed=1000 + i, length=20 + 11 * i) for i in range(48))),
    "long": Load((*WORKLOADS["long"].prompts, random_prompt(seed=5, length=5000))),
    "samples": Load(WORKLOADS["shared"].prompts, samples=4),
    "single": Load((random_prompt(seed=6, length=700),)),
    # No more at once than a chunk of a prefill holds (8,192 tokens), see ``forced_logprobs``:
    # models of states cache none of these prompts.
    "some": Load(WORKLOADS["crowd"].prompts[:48]),
    # For them: their trees hold a state every 64 to 256 tokens, so that 2,048 of these are shared.
    "turn": Load(tuple(SYSTEM + random_prompt(seed=82 + i, length=30 + i) for i in range(12))),
}


def answers(server: ServingServer, load: Load) -> list[Answer]:
    return server.generate(load.prompts, NEW_TOKENS, samples=load.samples, lora_path=load.adapters)


def equal_share(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Share of positions that hold the same token, 0 to 1."""
    pairs = [
        a == b
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one.tokens, other.tokens, strict=True)
    ]
    return sum(pairs) / len(pairs)


def forced_logprobs(server: ServingServer, load: Load, texts: Sequence[Answer]) -> list[float]:
    """Log-probabilities of the tokens of ``texts``, the first answer to each prompt, all decoded at
    once; NaN for a token that lost by so much that it could not be forced."""
    # Cached prompts: a prefill in chunks would ask for a forced token at the end of every chunk.
    server.generate(load.prompts, 1, lora_path=load.adapters)
    found = forcing.force_all(
        lambda body: server.post("/generate", body),
        load.prompts,
        [text.tokens for text in texts[:: load.samples]],
        [{"lora_path": name} if name else {} for name in load.adapters or ()],
    )
    return [value for values in found for value in values]


# A distance may be half as large again as another, for the one draw that each is, and these more.
FACTOR, MEAN_MORE, LARGEST_MORE = 1.5, 0.005, 0.1
# How far a backend may be from a peer on average and at most, where the other peer is not measured
# beside it, or has NaN. Another prompt's K/V differ by 2.2 on average.
MEAN_LIMIT, LARGEST_LIMIT = 0.05, 0.5


@dataclass(frozen=True)
class Distance:
    """Between log-probabilities of the same tokens, natural log; NaN if one of them is."""

    mean: float
    largest: float

    @classmethod
    def between(cls, some: Sequence[float], others: Sequence[float]) -> Distance:
        gaps = [abs(a - b) for a, b in zip(some, others, strict=True)]
        if any(gap != gap for gap in gaps):
            return cls(float("nan"), float("nan"))
        return cls(sum(gaps) / len(gaps), max(gaps))

    @property
    def small(self) -> bool:
        """Within the limits; not if a log-probability is NaN."""
        return self.mean <= MEAN_LIMIT and self.largest <= LARGEST_LIMIT

    def about_as_small_as(self, other: Distance) -> bool:
        """Not if one of the two is NaN."""
        return (
            self.mean <= FACTOR * other.mean + MEAN_MORE
            and self.largest <= FACTOR * other.largest + LARGEST_MORE
        )


def beside(
    server: ServingServer, load: Load, texts: Sequence[Answer], wanted: Sequence[float]
) -> tuple[Distance, Counters]:
    """How far a server's log-probabilities of ``texts`` are from those ``wanted``, and what it
    counted meanwhile."""
    logprobs, counted = server.counted(forced_logprobs, server, load, texts)
    return Distance.between(logprobs, wanted), counted


def check_forced(what: str, found: Mapping[str, Sequence[float]]) -> None:
    """Log-probabilities of fa3's tokens by pat and one or two peers: pat is about as near to each
    peer as the peers are to each other.

    Where one peer has a NaN, or is not there, nothing is known of the peers' distance. Then pat is
    compared with the other alone, by MEAN_LIMIT and LARGEST_LIMIT; a warning names the peer that
    has a NaN. A NaN of pat's fails, and one of each peer's.
    """
    nans = {name: sum(map(math.isnan, values)) for name, values in found.items()}
    sound = [name for name in found if name != "pat" and not nans[name]]
    assert not nans["pat"], f"{what}: {nans['pat']} NaN of pat"
    assert sound, f"{what}: NaN of both peers, {nans}"
    ours = {name: Distance.between(found["pat"], found[name]) for name in sound}
    limits = f"{MEAN_LIMIT:g} in the mean and {LARGEST_LIMIT:g} at most"
    if len(sound) == 2:
        of_peers = Distance.between(*(found[name] for name in sound))
        near = {name: each.about_as_small_as(of_peers) for name, each in ours.items()}
        limits = f"{of_peers} of the peers"
    else:
        near = {name: each.small for name, each in ours.items()}
    for name in found.keys() - {"pat", *sound}:
        warnings.warn(
            f"{what}: {nans[name]} of {len(found[name])} log-probabilities of {name} are NaN; pat "
            f"is compared with {sound[0]} alone, by fixed limits ({limits})",
            stacklevel=2,
        )
    for name, each in ours.items():
        print(f"{what}: pat to {name} {each}; {limits}")
        assert near[name], f"{what}: pat to {name} {each}, over {limits}"


def accepted(texts: list[Answer]) -> float:
    """Tokens that a verify step gives a request, from 1 to its draft tokens, on average."""
    steps = sum(text.verify_steps for text in texts)
    return sum(len(text.tokens) - 1 for text in texts) / max(1, steps)


def alike(one: Prompt, other: Prompt) -> int:
    """How many tokens two answers have in common before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def apart(some: list[Answer], others: list[Answer]) -> Distance:
    """Of the log-probabilities of all answers up to the first token that differs."""
    pairs: list[tuple[float, float]] = []
    for one, other in zip(some, others, strict=True):
        count = alike(one.tokens, other.tokens)
        pairs += zip(one.logprobs[:count], other.logprobs[:count], strict=True)
    return Distance.between([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
