# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step, from SGLang's forward batch to the plan, on SGLang's own caches:
``python -m benchmarks.host.step``, a JSON object a line. Needs SGLang, no server. With a patched
SGLang (``python patches/apply.py COPY``) in ``PYTHONPATH`` it says what the patch buys.

Median microseconds. New: the first step of a batch in which one request is another, paths, plan and
all; young: the second; kept: a step whose batch is that of many before; cold: the same after
something else has filled the CPU's caches, as the rest of a server's step does. Handover is the
part from the forward batch to the planner.

Turns and deep: see ``measure_turns`` and ``measure_deep``. First: the first plan; changed and most:
the median and the longest of those after one left and came.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common.document import add_row, conditions
from benchmarks.host.live import LiveCache, changing_batches, text
from sglang_pat.srt import hook
from sglang_pat.srt.radix import SETTLE_STEPS
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats
from sglang_pat.target import Target

REPEATS, COLD_REPEATS, ARRIVALS = 400, 40, 60
FLUSH_BYTES = 128 << 20  # more than a core has of a CPU's last cache

Row = dict[str, float | int | str]


def hand_over_of(cache: LiveCache) -> Callable[..., Any]:
    """A function of a ``LiveBatch`` and a forward's mode that does what comes between SGLang's
    forward batch and the planner: with our hook, or with the requests in the forward batch."""
    runner = SimpleNamespace()
    source = hook.batches_of(runner)

    def hand_over(live: hook.LiveBatch, mode: Any) -> hook.LiveBatch | None:
        forward = SimpleNamespace(forward_mode=mode)
        if hook.carries_requests():
            from sglang.srt.model_executor.forward_batch_info import RequestHandles

            handles = RequestHandles(live.reqs, cache.tree, live.rows, mode, None)
            forward.request_handles = handles
        else:
            batch = SimpleNamespace(reqs=live.reqs, tree_cache=cache.tree, forward_mode=mode)
            batch.req_pool_indices_cpu, batch.decoding_reqs = live.rows, None
            hook.after_init_new(forward, SimpleNamespace, batch, runner)
        return source.take(forward)

    return hand_over


def measure(kind: str, queries: int) -> Row:
    """For ``queries`` requests: a system prompt, eight tools, own tails."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    cache, batches = changing_batches(kind, queries)
    hand_over, steps = hand_over_of(cache), _steps(queries)
    flush = np.ones(FLUSH_BYTES, dtype=np.uint8)
    found: dict[str, list[float]] = defaultdict(list)

    def step(live: hook.LiveBatch, lens: torch.Tensor) -> None:
        steps.plan(hand_over(live, ForwardMode.DECODE), known(lens))

    def note(name: str, call: Callable[..., Any], *given: Any) -> None:
        start = time.perf_counter_ns()
        call(*given)
        found[name].append((time.perf_counter_ns() - start) / 1e3)

    for repeat in range(REPEATS + COLD_REPEATS):
        # A request ends and another is prefilled: a change of the batch comes with both.
        if hook.carries_requests():
            cache.tree.anchor_version += 1
        hand_over(batches[0][0], ForwardMode.EXTEND)
        cold = "" if repeat < REPEATS else "cold_"
        for name, steps_before in (("new", 0), ("young", 0), ("kept", SETTLE_STEPS)):
            for _ in range(steps_before):
                step(*batches[repeat % len(batches)])
            if cold:
                flush.sum()
            note(f"{cold}{name}_us", step, *batches[repeat % len(batches)])
            assert steps.made == (name == "new")
        note("handover_us", hand_over, batches[0][0], ForwardMode.DECODE)
    medians = {name: round(statistics.median(times), 1) for name, times in found.items()}
    return {"cache": kind, "queries": queries, **medians}


def _steps(queries: int) -> StepPlanner:
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=queries)
    return StepPlanner(target, Stats())


def _arrivals(
    cache: LiveCache, queries: int, prompts: Iterator[list[int]], output: list[int]
) -> Row:
    """Microseconds of the step that makes a plan: the first one of ``queries`` requests, and those
    after one left with an ``output`` and the next came. Two more steps keep each plan."""
    rng, steps = random.Random(0), _steps(queries)
    reqs = [cache.admit(next(prompts)) for _ in range(queries)]
    times: list[float] = []
    while True:
        batch, lens = cache.batch(reqs)
        start = time.perf_counter_ns()
        plan = steps.plan(batch, known(lens))
        times.append((time.perf_counter_ns() - start) / 1e3)
        assert steps.made and plan is not None and plan.num_shared_items
        for others in (1, 2):
            steps.plan(dataclasses.replace(batch, others=others), known(lens))
            assert not steps.made
        if len(times) > ARRIVALS:
            break
        cache.end(reqs.pop(rng.randrange(queries)), output)
        reqs.append(cache.admit(next(prompts)))
    first, *later = times
    found = {"first_us": first, "changed_us": statistics.median(later), "most_us": max(later)}
    return {"queries": queries, **{name: round(us, 1) for name, us in found.items()}}


def measure_turns(kind: str, queries: int, turns: int) -> Row:
    """Conversations of so many turns on a system prompt, each two nodes of the tree; in every step
    one leaves and the next turn of another arrives."""
    rng = random.Random(0)
    turn = 900 // turns  # tokens, so that the plans of all rows are alike
    output = turn // 3
    talks = queries + ARRIVALS
    cache = LiveCache(kind, slots=1300 * talks, rows=talks, context=2304)
    histories = [text(rng, 1000)] * talks
    for _ in range(turns - 1):
        histories = [
            cache.end(cache.admit(one + text(rng, turn - output)), text(rng, output))
            for one in histories
        ]
    prompts = (history + text(rng, turn) for history in histories)
    return {"cache": kind, "turns": turns, **_arrivals(cache, queries, prompts, text(rng, output))}


def measure_deep(kind: str, queries: int, depth: int) -> Row:
    """Requests at the end of a text of which ever longer beginnings were prompts, a node each."""
    context = depth + 64
    slots = 8 * context + 8 * (queries + ARRIVALS)
    cache = LiveCache(kind, slots=slots, rows=queries + 1, context=context)
    deep = text(random.Random(0), depth + 1)
    for length in range(2, depth + 1):
        cache.end(cache.admit(deep[:length]), [])
    prompts = ([*deep, 1 << 16, own] for own in count())
    return {"cache": kind, "deep": depth, **_arrivals(cache, queries, prompts, [])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and conditions")
    file = parser.parse_args().json
    settings = {"patched": hook.carries_requests()}
    cores = f"CPU, {len(os.sched_getaffinity(0))} cores"
    document = conditions("host", "benchmarks.host.step", cores, settings) | {"rows": []}
    for kind in ("rust", "python"):  # those of SGLang's unified cache
        for queries in (64, 256):
            add_row(document, measure(kind, queries), file)
        for queries, turns in ((64, 1), (64, 10), (256, 1), (256, 10), (256, 30)):
            add_row(document, measure_turns(kind, queries, turns), file)
        add_row(document, measure_deep(kind, 256, 2000), file)


if __name__ == "__main__":
    main()
