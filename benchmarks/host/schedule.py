# SPDX-License-Identifier: Apache-2.0
"""Host time of pack tree + schedule, and what plans hold: ``python -m
benchmarks.host.schedule [--json]``, for the GPU at hand or an H200.

The published scheduler of PAT takes 55-110 us for 256 requests and 450-580 us for 1024 in deep
trees (measured by us on an EPYC core, hot, minimum of 20), without reading Python objects.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks.common.trees import PAPER_TREES
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import PatOptions
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Planner
from sglang_pat.target import POLICIES, Target


def measure(tree: Tree, target: Target, repeats: int) -> dict[str, float | int | str]:
    """Microseconds of one plan, all in: paths read from Python tuples, tree, schedule, blob."""
    planner = Planner(target)
    paths, seq_lens = tree.paths, tree.seq_lens
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        plan = planner.plan(paths, seq_lens)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return {
        "tree": str(tree),
        "queries": tree.num_queries,
        "levels": len(tree.nodes),
        "items": plan.num_items,
        "shared": plan.num_shared_items,
        "partials": plan.num_partials,
        "kv_read_over_unique": plan.kv_tokens_read(sum(seq_lens)) / tree.unique_tokens,
        "plan_bytes": plan.nbytes,
        "min_us": min(times),
        "median_us": statistics.median(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--heads",
        type=int,
        nargs=2,
        default=(32, 8),
        metavar=("Q", "KV"),
        help="query and KV heads (default: 32 8)",
    )
    parser.add_argument(
        "--policy",
        default="default",
        choices=POLICIES,
        help="pat: the paper to the letter (default: default)",
    )
    parser.add_argument(
        "--repeats", type=int, default=50, help="plans timed of each tree (default: 50)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    chosen = PatOptions(options.policy)
    if not options.json:
        print(f"{'tree':48} items shared partials  KV/unique   min us  median us")
    for tree in PAPER_TREES:
        row = measure(tree, chosen.target(tree, Heads(*options.heads)), options.repeats)
        if options.json:
            print(json.dumps(row))
        else:
            print(
                f"{row['tree']:48} {row['items']:5} {row['shared']:6} {row['partials']:8}"
                f" {row['kv_read_over_unique']:10.2f} {row['min_us']:8.0f} {row['median_us']:10.0f}"
            )


if __name__ == "__main__":
    main()
