# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive over time: a recorded trace and two synthetic ones.

Only the order and the content of the prompts come from a trace. As in the PAT paper's runs,
requests arrive as a Poisson process at the rate asked for, and each gets the same number of output
tokens. A prompt is a path of segments; a segment's name decides its tokens, so equal beginnings
are shared prefixes, and every backend gets the same requests.

``mooncake``: the prompts of a Mooncake trace (FAST'25), block by block; requests that do not fit
the context are left out, as in the paper. Fewer tokens a block scale all prompts down.

``conversation``: the paper's chat workload. A system prompt of three levels (46 tokens common to
all, 348 by country, 2,123 by country and language; four variants), then a question. Lengths of
questions are drawn from the first non-empty requests of BurstGPT (Wang et al., CC-BY-4.0).

``toolagent``: a model of Mooncake's tool-and-agent trace, of which the published figures are used:
system prompts of 16 tasks, popular ones far more often, and private blocks such that 59 % of the
blocks repeat an earlier one at the same place.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from sglang_pat.bench.serving.workload import Prompt

Segment = tuple[str, int]  # a name that stands for the content, and the number of tokens
Segments = tuple[Segment, ...]

TRACES = ("mooncake", "conversation", "toolagent")
MOONCAKE_BLOCK = 512
SYSTEM_TOKENS = (46, 348, 2123)
VARIANTS = (("US", "English"), ("US", "Spanish"), ("Canada", "English"), ("China", "Chinese"))
# fmt: off
BURSTGPT_TOKENS = (
    472, 1087, 417, 1360, 185, 586, 37, 54, 1528, 89, 549, 172, 969, 97, 1574, 253, 23, 974, 387,
    1072, 1305, 17, 601, 1327, 1437, 1336, 19, 92, 507, 938, 1544, 92, 1840, 991, 1109, 1476, 14,
    1741, 1306, 614,
)
# fmt: on
TASKS = 16
TASK_BLOCKS = (3, 8)  # of a task's system prompt
HIT_FRACTION = 0.59


def arrivals(rate: float, duration_s: float, seed: str) -> list[float]:
    """Times of a Poisson process of ``rate`` requests a second, in seconds; at least one."""
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    while (after := times[-1] + rng.expovariate(rate)) < duration_s:
        times.append(after)
    return times


def paths(
    name: str, count: int, *, context: int, block: int, file: Path | None, seed: str
) -> list[Segments]:
    """The first ``count`` prompts of a trace, of at most ``context`` tokens each.

    Raises:
        ValueError: no file for ``mooncake``, too few of its requests fit, or the context is too
            small for the system prompts.
    """
    if name == "mooncake":
        if file is None:
            raise ValueError("mooncake is a recorded trace: give its file with --trace-file")
        found = list(islice(mooncake(file, context, block), count))
        if len(found) < count:
            raise ValueError(
                f"{len(found)} requests of {file} fit a context of {context} tokens at {block} "
                f"tokens a block, but {count} are needed: raise --context, or lower "
                "--block-tokens, the rate or --duration-s"
            )
        return found
    if name == "conversation":
        return _conversation(count, context, seed)
    return _toolagent(count, context, block, seed)


def tokens(path: Segments, vocab: int, seed: str) -> Prompt:
    """The token ids of a path."""
    return [token for name, length in path for token in _segment(f"{seed} {name}", length, vocab)]


def repeated(prompts: list[Segments]) -> float:
    """The fraction of segments that an earlier prompt had at the same place after the same ones."""
    seen: set[Segments] = set()
    total = hits = 0
    for path in prompts:
        for end in range(1, len(path) + 1):
            total += 1
            hits += path[:end] in seen
            seen.add(path[:end])
    return hits / total if total else 0.0


@lru_cache(maxsize=20_000)
def _segment(name: str, length: int, vocab: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(vocab), k=length))


def mooncake(file: Path, context: int, block: int) -> Iterator[Segments]:
    """Prompts of a Mooncake trace that fit ``context`` tokens, at ``block`` tokens a block."""
    with file.open() as lines:
        for line in lines:
            request = json.loads(line)
            blocks = [(f"block {one}", block) for one in request["hash_ids"]]
            # The last block is only partly filled.
            filled = request["input_length"] - MOONCAKE_BLOCK * (len(blocks) - 1)
            last = max(1, filled * block // MOONCAKE_BLOCK)
            if (len(blocks) - 1) * block + last <= context:
                yield (*blocks[:-1], (blocks[-1][0], last))


def _conversation(count: int, context: int, seed: str) -> list[Segments]:
    rng = random.Random(f"conversation {seed}")
    room = context - sum(SYSTEM_TOKENS)
    lengths = [length for length in BURSTGPT_TOKENS if length <= room]
    if not lengths:
        raise ValueError(
            f"a context of {context} tokens has no room for a question after a system prompt of "
            f"{sum(SYSTEM_TOKENS)}: raise --context"
        )
    found = []
    for number in range(count):
        country, language = rng.choice(VARIANTS)
        names = ("system", f"system {country}", f"system {country} {language}")
        levels = tuple(zip(names, SYSTEM_TOKENS, strict=True))
        found.append((*levels, (f"question {number}", rng.choice(lengths))))
    return found


def _toolagent(count: int, context: int, block: int, seed: str) -> list[Segments]:
    rng = random.Random(f"toolagent {seed}")
    most = context // block  # blocks of a prompt
    if most <= TASK_BLOCKS[1]:
        raise ValueError(
            f"a context of {context} tokens holds {most} blocks of {block}, but system prompts "
            f"have up to {TASK_BLOCKS[1]}: raise --context or lower --block-tokens"
        )
    system = [rng.randint(*TASK_BLOCKS) for _ in range(TASKS)]
    popularity = [1 / (task + 1) for task in range(TASKS)]
    found = []
    seen: set[int] = set()
    total = hits = 0
    for number, task in enumerate(rng.choices(range(TASKS), popularity, k=count)):
        shared = system[task]
        hits += shared if task in seen else 0
        seen.add(task)
        # Private blocks bring the hits so far to the fraction; a random part of them stays for
        # later requests, so that lengths vary.
        due = hits / HIT_FRACTION - total - shared
        private = min(most - shared, max(1, round(due * rng.uniform(0.2, 1.8))))
        total += shared + private
        blocks = [(f"task {task} {place}", block) for place in range(shared)]
        blocks += [(f"call {number} {place}", block) for place in range(private)]
        found.append(tuple(blocks))
    return found
