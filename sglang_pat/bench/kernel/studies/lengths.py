# SPDX-License-Identifier: Apache-2.0
"""Batches that the studies of schedules draw: long contexts that share nothing, and the mixes of
short requests that PackInfer serves.

``GENERATOR``, the name of a batch and the constants below decide all of it. Whoever changes one
gives ``GENERATOR`` another name.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from sglang_pat.bench.common.forests import LENGTHS, Forest, PrefixPath

GENERATOR = "studies-1"
LONG_SCALE = 8192  # of long contexts: the mean of `uniform`, of which the other kinds have others

# Mixes of requests. PackInfer names Alpaca, LMSYS and Text2SQL and gives one figure, that more than
# 60 % of the requests have inputs below 128 tokens; all else here is assumed. Inputs are
# log-normal: the median in tokens and the deviation of the logarithm.
ALPACA_INPUT, LMSYS_INPUT, QUESTION_INPUT = (60, 0.6), (90, 1.3), (30, 0.5)
MOST_INPUT = 8192
# Tokens answered so far: uniform from 1 on.
ALPACA_ANSWERED, LMSYS_ANSWERED, TEXT2SQL_ANSWERED = 256, 512, 128
# A question of Text2SQL comes behind the schema of one of so many databases, which all questions
# about that database share.
DATABASES, SCHEMA = 8, (200, 1500)


def _random(name: str) -> random.Random:
    return random.Random(f"{GENERATOR} {name}")


def long_contexts(kind: str, count: int, seed: int) -> Forest:
    """``count`` requests that share nothing, with lengths of ``kind``."""
    name = f"{kind}-b{count}-{seed}"
    rng = _random(name)
    return Forest(name, [[] for _ in range(count)], _drawn(rng, kind, count))


def _drawn(rng: random.Random, kind: str, count: int) -> list[int]:
    return [LENGTHS[kind](rng, LONG_SCALE) for _ in range(count)]


def _input(rng: random.Random, median_and_sigma: tuple[int, float]) -> int:
    median, sigma = median_and_sigma
    return min(MOST_INPUT, max(1, round(median * rng.lognormvariate(0, sigma))))


def _alone(name: str, inputs: tuple[int, float], answered: int, count: int) -> Forest:
    rng = _random(name)
    lengths = [_input(rng, inputs) + rng.randint(1, answered) for _ in range(count)]
    return Forest(name, [[] for _ in range(count)], lengths)


def alpaca(count: int) -> Forest:
    return _alone(f"alpaca-b{count}", ALPACA_INPUT, ALPACA_ANSWERED, count)


def lmsys(count: int) -> Forest:
    return _alone(f"lmsys-b{count}", LMSYS_INPUT, LMSYS_ANSWERED, count)


def text2sql(count: int) -> Forest:
    name = f"text2sql-b{count}"
    rng = _random(name)
    schemas = [rng.randint(*SCHEMA) for _ in range(DATABASES)]
    paths: list[PrefixPath] = []
    lengths = []
    for _ in range(count):
        database = rng.randrange(DATABASES)
        paths.append([(database, 0, schemas[database])])
        own = _input(rng, QUESTION_INPUT) + rng.randint(1, TEXT2SQL_ANSWERED)
        lengths.append(schemas[database] + own)
    return Forest(name, paths, lengths)


MIXES: dict[str, Callable[[int], Forest]] = {
    "alpaca": alpaca,
    "lmsys": lmsys,
    "text2sql": text2sql,
}


def even(forest: Forest) -> Forest:
    """As many requests with as many tokens in all, equally long and without sharing: the batch that
    PackInfer's figure 1 compares with."""
    count, tokens = forest.num_queries, sum(forest.seq_lens)
    lengths = [tokens // count + (place < tokens % count) for place in range(count)]
    return Forest(f"{forest.name}-even", [[] for _ in range(count)], lengths)
