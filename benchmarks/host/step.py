# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step's planning on SGLang's own caches:
``python -m benchmarks.host.step``, a JSON object a line. Needs SGLang, no server.

Unchanged: what a step costs whose batch and tree are those of the step before. Changed: what it
costs when one request of the batch is another, paths, plan and all. Cold: the same after something
else has filled the CPU's caches, as the rest of a server's step does.

Turns: conversations of so many turns on one system prompt, each two nodes of the tree; in every
step one leaves and the next turn of another arrives. Deep: requests at the end of a text of which
ever longer beginnings were prompts, a node each; the first plan, and those after one left and came.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.host.live import CACHES, LiveCache, changing_batches, text
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats
from sglang_pat.target import Target

REPEATS, COLD_REPEATS, ARRIVALS = 400, 40, 60
FLUSH_BYTES = 128 << 20  # more than a core has of a CPU's last cache

Row = dict[str, float | int | str]


def measure(kind: str, queries: int) -> Row:
    """Median microseconds for ``queries`` requests: a system prompt, eight tools, own tails."""
    _, batches = changing_batches(kind, queries)
    steps, flush = _steps(queries), np.ones(FLUSH_BYTES, dtype=np.uint8)
    found: dict[str, list[float]] = defaultdict(list)

    def us(index: int, others: int) -> float:
        """Microseconds of a step of a batch after ``others`` forwards that were not decodes."""
        batch, lens = batches[index % len(batches)]
        live = dataclasses.replace(batch, others=others)
        start = time.perf_counter_ns()
        steps.plan(live, known(lens))
        return (time.perf_counter_ns() - start) / 1e3

    found["settled_us"] = [us(0, 0) for _ in range(REPEATS)]
    for repeat in range(1, REPEATS + COLD_REPEATS):
        cold = "" if repeat < REPEATS else "cold_"
        for name, others in (("changed_us", repeat), ("unchanged_us", repeat + 1)):
            if cold:
                flush.sum()
            found[cold + name].append(us(repeat, others))
            assert steps.made == (name == "changed_us")
    medians = {name: round(statistics.median(times), 1) for name, times in found.items()}
    return {"cache": kind, "queries": queries, **medians}


def _steps(queries: int) -> StepPlanner:
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=queries)
    return StepPlanner(target, Stats())


def _new_plan(steps: StepPlanner, cache: LiveCache, reqs: list[Any]) -> float:
    """Microseconds of the first step of a batch, which makes a plan. Two more keep it."""
    batch, lens = cache.batch(reqs)
    start = time.perf_counter_ns()
    plan = steps.plan(batch, known(lens))
    us = (time.perf_counter_ns() - start) / 1e3
    assert steps.made and plan is not None and plan.num_shared_items
    for others in (1, 2):
        steps.plan(dataclasses.replace(batch, others=others), known(lens))
        assert not steps.made
    return us


def _row(kind: str, what: str, queries: int, depth: int, times: list[float]) -> Row:
    return {
        "cache": kind,
        "queries": queries,
        what: depth,
        "first_us": round(times[0], 1),
        "changed_us": round(statistics.median(times[1:]), 1),
        "most_us": round(max(times[1:]), 1),
    }


def measure_turns(kind: str, queries: int, turns: int) -> Row:
    """Microseconds of a plan when one conversation leaves and the next turn of another arrives."""
    rng = random.Random(0)
    turn = 900 // turns  # tokens, so that the plans of all rows are alike
    output = turn // 3
    context = 2304
    talks = queries + ARRIVALS
    cache = LiveCache(kind, slots=1300 * talks, rows=talks, context=context)
    histories = [text(rng, 1000)] * talks
    for _ in range(turns - 1):
        histories = [
            cache.end(cache.admit(one + text(rng, turn - output)), text(rng, output))
            for one in histories
        ]
    reqs = [cache.admit(history + text(rng, turn)) for history in histories[:queries]]
    steps = _steps(queries)
    times = [_new_plan(steps, cache, reqs)]
    for history in histories[queries:]:
        cache.end(reqs.pop(rng.randrange(queries)), text(rng, output))
        reqs.append(cache.admit(history + text(rng, turn)))
        times.append(_new_plan(steps, cache, reqs))
    return _row(kind, "turns", queries, turns, times)


def measure_deep(kind: str, queries: int, depth: int) -> Row:
    """Microseconds of a plan for requests at the end of a path of ``depth`` nodes."""
    rng = random.Random(0)
    context = depth + 64
    cache = LiveCache(
        kind, slots=8 * context + 8 * (queries + ARRIVALS), rows=queries + 1, context=context
    )
    deep = text(rng, depth + 1)
    for length in range(2, depth + 1):
        cache.end(cache.admit(deep[:length]), [])
    steps = _steps(queries)
    reqs = [cache.admit([*deep, 1 << 16, own]) for own in range(queries)]
    times = [_new_plan(steps, cache, reqs)]
    for own in range(ARRIVALS):
        cache.end(reqs.pop(rng.randrange(queries)), [])
        reqs.append(cache.admit([*deep, 1 << 16, queries + own]))
        times.append(_new_plan(steps, cache, reqs))
    return _row(kind, "deep", queries, depth, times)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for row in _rows():
        print(json.dumps(row), flush=True)


def _rows() -> Iterator[Row]:
    for kind in CACHES:
        for queries in (64, 256):
            yield measure(kind, queries)
        for queries, turns in ((64, 1), (64, 10), (256, 1), (256, 10), (256, 30)):
            yield measure_turns(kind, queries, turns)
        yield measure_deep(kind, 256, 2000)


if __name__ == "__main__":
    main()
