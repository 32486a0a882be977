# SPDX-License-Identifier: Apache-2.0
"""Batches of requests that share declared prefixes and nothing else."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

Prompt = list[int]

_SPEC = re.compile(r"(?:(\d+)\*)?(\d+)(?:\+(\d+))?x(\d+)")


@dataclass(frozen=True, slots=True)
class Workload:
    """``[GROUPS*]PREFIX[+PRIVATE]xREQUESTS``, as ``8192x128``, ``8*2048x16``, ``1024+512x256``.

    GROUPS groups (default 1) of REQUESTS requests each; the requests of a group share PREFIX
    tokens. PRIVATE tokens of each request follow that are in the cache beforehand, too, as of an
    earlier turn of a conversation. The new tokens of the run come on top of both: a request of
    ``1024+512x256`` with 128 new tokens has a prompt of 1,664 tokens, 1,536 of them cached.
    ``0x64``: 64 requests that share nothing.
    """

    groups: int
    prefix: int
    private: int
    per_group: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Raises ValueError for what is not a workload, with an example of one."""
        found = _SPEC.fullmatch(text)
        if not found:
            raise ValueError(
                f"{text!r} is not a workload: write [GROUPS*]PREFIX[+PRIVATE]xREQUESTS, "
                "as 8192x128, 8*2048x16 or 1024+512x256"
            )
        groups, prefix, private, per_group = (int(number or 0) for number in found.groups())
        workload = cls(groups if found[1] else 1, prefix, private, per_group)
        if not workload.requests:
            raise ValueError(f"{text!r} has no requests")
        return workload

    def __str__(self) -> str:
        groups = f"{self.groups}*" if self.groups > 1 else ""
        private = f"+{self.private}" if self.private else ""
        return f"{groups}{self.prefix}{private}x{self.per_group}"

    @property
    def requests(self) -> int:
        return self.groups * self.per_group

    @property
    def cached(self) -> int:
        """Tokens of each prompt that are in the cache when the run begins."""
        return self.prefix + self.private

    def kv_tokens(self, *, new: int, output: int) -> int:
        """K/V tokens of all requests at their end, shared ones once."""
        return self.groups * self.prefix + self.requests * (self.private + new + output)


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """Token ids of one run. ``prime``: prompts to cache beforehand, level after level."""

    prime: list[list[Prompt]]
    prompts: list[Prompt]


def make_prompts(workload: Workload, *, new: int, vocab: int, seed: str) -> RunPrompts:
    """Fresh random tokens for every seed; equal arguments give equal batches."""
    rng = random.Random(seed)
    ids = range(vocab)

    def text(length: int) -> Prompt:
        return rng.choices(ids, k=length)

    prefixes = [text(workload.prefix) for _ in range(workload.groups)]
    cached = [
        prefix + text(workload.private) for prefix in prefixes for _ in range(workload.per_group)
    ]
    levels = [prefixes] if workload.prefix else []
    if workload.private:
        levels.append(cached)
    return RunPrompts(levels, [prompt + text(new) for prompt in cached])


# The goals, for one H200: model, new tokens and output tokens, and how much of the inter-token time
# of the better of fa3 and flashinfer is allowed, by tensor-parallel size and workload.
LIMITS_SHAPE = ("llama3-8b", 128, 256)
LIMITS = {
    1: {
        "8192x128": 0.40,
        "4096x64": 0.72,
        "8*2048x16": 0.78,
        "1024+512x256": 0.75,
        "0x64": 1.02,
        "0x256": 1.02,
    },
    2: {"8192x128": 0.55, "0x64": 1.03, "0x256": 1.03},
}
DEFAULT_WORKLOADS = tuple(LIMITS[1])
