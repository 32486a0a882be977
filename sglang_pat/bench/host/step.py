# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step's planning on SGLang's own caches:
``python -m sglang_pat.bench.host.step [--json]``. Needs SGLang, no server.

Unchanged: what a step costs whose batch and tree are those of the step before. Changed: what it
costs when one request of the batch is another, paths, plan and all. Cold: the same after something
else has filled the CPU's caches, as the rest of a server's step does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time

import numpy as np

from sglang_pat.bench.host.live import CACHES, LiveCache
from sglang_pat.srt.lengths import known
from sglang_pat.srt.step import StepPlanner
from sglang_pat.stats import Stats
from sglang_pat.target import Target

REPEATS, COLD_REPEATS = 400, 40
FLUSH_BYTES = 128 << 20  # more than a core has of a CPU's last cache


def measure(kind: str, queries: int) -> dict[str, float | int | str]:
    """Median microseconds for ``queries`` requests: a system prompt, eight tools, own tails."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(1 << 15) for _ in range(length)]

    cache = LiveCache(kind, slots=2000 * queries, rows=queries + 1, context=2048)
    system, tools = text(1000), [text(300) for _ in range(8)]
    reqs = [cache.admit(system + tools[i % 8] + text(40)) for i in range(queries + 1)]
    # One leaves, one comes that was away for a step.
    batches = [cache.batch(reqs[:i] + reqs[i + 1 :]) for i in range(len(reqs))]
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=queries)
    steps = StepPlanner(target, Stats())

    def step(index: int, others: int) -> float:
        """Microseconds of a step of a batch after ``others`` forwards that were not decodes."""
        batch, lens = batches[index % len(batches)]
        live = dataclasses.replace(batch, others=others)
        start = time.perf_counter_ns()
        steps.plan(live, known(lens))
        return (time.perf_counter_ns() - start) / 1e3

    flush = np.ones(FLUSH_BYTES, dtype=np.uint8)

    def both(repeats: range, *, cold: bool) -> tuple[float, float]:
        """Median microseconds of a step of an unchanged and of a changed batch."""
        unchanged: list[float] = []
        changed: list[float] = []
        for repeat in repeats:
            for times, others in ((changed, repeat), (unchanged, repeat + 1)):
                if cold:
                    flush.sum()
                times.append(step(repeat, others))
                assert steps.made == (times is changed)
        return statistics.median(unchanged), statistics.median(changed)

    settled = [step(0, 0) for _ in range(REPEATS)]
    unchanged, changed = both(range(1, REPEATS), cold=False)
    cold_unchanged, cold_changed = both(range(REPEATS, REPEATS + COLD_REPEATS), cold=True)
    return {
        "cache": kind,
        "queries": queries,
        "settled_us": round(statistics.median(settled), 1),
        "unchanged_us": round(unchanged, 1),
        "changed_us": round(changed, 1),
        "cold_unchanged_us": round(cold_unchanged, 1),
        "cold_changed_us": round(cold_changed, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    as_json = parser.parse_args().json
    for kind in CACHES:
        for queries in (64, 256):
            row = measure(kind, queries)
            if as_json:
                print(json.dumps(row))
            else:
                print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
