# SPDX-License-Identifier: Apache-2.0
"""What our patch to SGLang buys in host time a decode step:
``python patches/apply.py COPY && python -m benchmarks.host.upstream COPY [--json FILE]``.

Stock and patched SGLang take turns, each in a process of its own. From the forward batch to the
plan, with no server: kept, a step whose batch is that of the steps before; young, the second step
of a batch; new, the first, in which one request is another. Handover is the part from the batch to
the planner.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common.document import write
from benchmarks.host.live import changing_batches
from sglang_pat.srt import hook
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import SETTLE_STEPS
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats
from sglang_pat.target import Target

REPEATS = 300
QUERIES = (64, 256, 1024)
STEPS = ("kept", "young", "new", "handover")


class Forward(SimpleNamespace):
    """Stands in for SGLang's ``ForwardBatch``: made from a batch, with our hook after it or with
    the requests in it, and nothing else that would take time."""

    handles: Callable[..., Any] | None = None  # SGLang's RequestHandles, where it has them

    @classmethod
    def init_new(cls, batch: Any, _runner: Any) -> Forward:
        if cls.handles is None:
            return cls(forward_mode=batch.forward_mode)
        given = (batch.reqs, batch.tree_cache, batch.req_pool_indices_cpu, batch.forward_mode)
        handles = cls.handles(*given, batch.decoding_reqs)
        return cls(forward_mode=batch.forward_mode, request_handles=handles)


def measure(queries: int) -> dict[str, float]:
    """Median microseconds of each of ``STEPS``, in the SGLang that this process imports."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    cache, batches = changing_batches("rust", queries)
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=queries)
    steps, runner = StepPlanner(target, Stats()), SimpleNamespace()
    source = hook.batches_of(runner)
    found: dict[str, list[float]] = {name: [] for name in STEPS}

    def scheduled(live: LiveBatch, mode: Any) -> SimpleNamespace:
        """A batch as SGLang's scheduler has it."""
        given = {"tree_cache": cache.tree, "forward_mode": mode, "decoding_reqs": None}
        return SimpleNamespace(reqs=live.reqs, req_pool_indices_cpu=live.rows, **given)

    def hand_over(batch: Any) -> Any:
        return source.take(Forward.init_new(batch, runner))

    def step(batch: Any, lens: torch.Tensor) -> None:
        steps.plan(hand_over(batch), known(lens))

    def note(name: str, call: Callable[..., Any], *given: Any) -> None:
        start = time.perf_counter_ns()
        call(*given)
        found[name].append((time.perf_counter_ns() - start) / 1e3)

    prefill = scheduled(batches[0][0], ForwardMode.EXTEND)
    decodes = [(scheduled(live, ForwardMode.DECODE), lens) for live, lens in batches]
    for repeat in range(REPEATS):
        # A request ends and another is prefilled: a change of the batch comes with both.
        if hook.carries_requests():
            cache.tree.anchor_version += 1
        hand_over(prefill)
        batch, lens = decodes[repeat % len(decodes)]
        note("new", step, batch, lens)
        assert steps.made
        note("young", step, batch, lens)
        for _ in range(SETTLE_STEPS):
            step(batch, lens)
        note("kept", step, batch, lens)
        assert not steps.made
        note("handover", hand_over, batch)
    return {name: statistics.median(times) for name, times in found.items()}


def measure_here() -> None:
    """Print one JSON object a line for each of ``QUERIES``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if hook.carries_requests():
        from sglang.srt.model_executor.forward_batch_info import RequestHandles

        Forward.handles = RequestHandles
    else:
        target = f"{Forward.__module__}.Forward.init_new"
        HookRegistry.register(target, hook.after_init_new, HookType.AFTER)
        HookRegistry.apply_hooks()
        assert hook.is_installed(target, hook.after_init_new)
    for queries in QUERIES:
        row = {"queries": queries, "patched": hook.carries_requests(), **measure(queries)}
        print(json.dumps(row), flush=True)


def compare(copy: Path, rounds: int) -> list[dict[str, Any]]:
    """All rows of ``rounds`` processes each of stock and patched SGLang, by turns."""
    rows = []
    command = [sys.executable, "-m", "benchmarks.host.upstream", "--here"]
    for number in range(rounds):
        for first in ([], [str(copy.resolve())]):
            path = os.pathsep.join(filter(None, [*first, os.environ.get("PYTHONPATH", "")]))
            env = os.environ | {"PYTHONPATH": path}
            said = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found = [{"round": number, **json.loads(line)} for line in said.stdout.splitlines()]
            assert all(row["patched"] == bool(first) for row in found), f"{copy}: not patched"
            rows += found
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Stock -> patched in microseconds: the median over the rounds, the least in brackets."""

    def cell(name: str, queries: int, patched: bool) -> str:
        chosen = [row for row in rows if (row["queries"], row["patched"]) == (queries, patched)]
        times = [row[name] for row in chosen]
        return f"{statistics.median(times):.1f} ({min(times):.1f})"

    lines = ["queries  " + "  ".join(f"{name:>26}" for name in STEPS)]
    for queries in QUERIES:
        pairs = [f"{cell(name, queries, False)} -> {cell(name, queries, True)}" for name in STEPS]
        lines.append(f"{queries:>7}  " + "  ".join(f"{pair:>26}" for pair in pairs))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copy", nargs="?", type=Path, help="what patches/apply.py made")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--here", action="store_true", help="only the SGLang of this process")
    args = parser.parse_args()
    if args.here:
        measure_here()
        return
    if args.copy is None:
        parser.error("name the copy that patches/apply.py made")
    rows = compare(args.copy, args.rounds)
    write(rows, args.json)
    print(table(rows))


if __name__ == "__main__":
    main()
