# SPDX-License-Identifier: Apache-2.0
"""Times the plan of each cut on the GPU at hand, and fits the judge's costs to these times:
``python -m benchmarks.kernel.fit time FILE``, then ``python -m benchmarks.kernel.fit costs FILE``.

The first takes some ten minutes, and goes on where FILE ends. The second takes about as long, on
the same GPU or, for an H200's times, on none. It prints the values for ``Costs`` in
csrc/pack/target.h, and how long the chosen plans take beside the best, before and after.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common.forests import PAPER_TREES, Forest, all_forests
from benchmarks.kernel.clock import Clock, capture
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import quantised
from benchmarks.kernel.layer import E4M3, Layer, PatOptions, device_batch
from sglang_pat import _C
from sglang_pat.planner import Planner
from sglang_pat.target import CUTS

# What is timed: heads, and what K, V and queries are.
SETTINGS: tuple[tuple[Heads, PatOptions], ...] = (
    *((Heads(q, kv), PatOptions()) for q, kv in ((32, 8), (64, 8), (16, 8), (32, 32))),
    *((Heads(q, kv), PatOptions()) for q, kv in ((28, 4), (16, 2), (8, 1))),
    *((heads, PatOptions()) for heads in (Heads(32, 8, 64), Heads(16, 2, 256), Heads(32, 8, 256))),
    *((Heads(q, 8), PatOptions(kv_dtype=E4M3)) for q in (32, 64)),
    *((Heads(32, 8), PatOptions(draft_tokens=tokens)) for tokens in (4, 8)),
)
BUDGET_MS = 4.0  # of all repeats of one plan
MOST_NOISE = 0.12  # batches beyond are left out
# A choice that is so much slower than the best counts twice what it is slower by.
CLEARLY = 0.04
SHARPNESS = 0.015  # relative difference of two judged times that makes a choice likely
STEP, LEAST_STEP = 0.15, 0.015  # by which a cost is changed


def batches() -> Iterator[Forest]:
    """The paper's trees, the ragged batches, requests on one prefix, and agents of four roles."""
    yield from PAPER_TREES
    yield from all_forests()
    for count in (8, 16, 32, 64, 128, 256):
        for prefix in (512, 2048, 4096, 8192):
            for tail in (20, 120, 300):
                rng = random.Random(count * prefix + tail)
                lengths = [prefix + round(tail * rng.uniform(0.7, 1.3)) for _ in range(count)]
                yield Forest(f"served-{prefix}x{count}+{tail}", [[(0, 0, prefix)]] * count, lengths)
    for count in (16, 32, 64, 128):
        for own in (100, 600, 2000):
            rng = random.Random(count + own)
            paths = [[(0, 0, 3000), (1 + i % 4, 3000, 4200)] for i in range(count)]
            lengths = [4200 + rng.randint(20, 2 * own) for _ in range(count)]
            yield Forest(f"agents-{count}+{own}", paths, lengths)


def cases() -> Iterator[tuple[Heads, PatOptions, Forest]]:
    """What is timed, in a fixed order."""
    for heads, settings in SETTINGS:
        for tree in batches():
            if settings.draft_tokens == 1 or min(tree.tails) >= settings.draft_tokens:
                yield heads, settings, tree


def plans(heads: Heads, settings: PatOptions, tree: Forest) -> dict[str, Planner]:
    """A planner for each cut that gives the batch a plan of its own."""
    found, seen = {}, set()
    for cut in CUTS:
        planner = Planner(replace(settings, cuts=(cut,)).target(tree, heads))
        plan = planner.plan(tree.paths, tree.seq_lens)
        told = (plan.items.tobytes(), plan.segments.tobytes())
        if not plan.degraded and told not in seen:
            seen.add(told)
            found[cut] = planner
    return found


def device_name() -> str:
    """Of the GPU that plans are made for here."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"


def rows_of(file: Path) -> list[dict[str, Any]]:
    """What was timed so far. Raises ValueError for the times of another GPU."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if others := {row["device"] for row in rows} - {device_name()}:
        raise ValueError(f"{file} has times of {others.pop()}, here is {device_name()}")
    return rows


def time_cuts(file: Path, budget_s: float) -> None:
    """Appends a JSON line for each batch: where and what it is, and microseconds by cut."""
    until, clock, done = time.monotonic() + budget_s, Clock(BUDGET_MS), len(rows_of(file))
    todo = list(cases())
    with file.open("a") as out:
        for heads, settings, tree in todo[done:]:
            if time.monotonic() > until:
                break
            torch.cuda.empty_cache()
            us, noise = time_batch(clock, heads, settings, tree)
            row = {"device": device_name(), "batch": str(tree), "heads": str(heads)}
            print(json.dumps(row | {"noise": noise, "us": us}), file=out, flush=True)
            done += 1
    print(f"{done} of {len(todo)} batches are timed; to go on, run it again")


def time_batch(
    clock: Clock, heads: Heads, settings: PatOptions, tree: Forest
) -> tuple[dict[str, float], float]:
    """Microseconds by cut, and the noise."""
    batch = device_batch(tree, heads, draft_tokens=settings.draft_tokens)
    if settings.e4m3:
        batch = quantised(batch)
    captured = {}
    for cut in plans(heads, settings, tree):
        chosen = replace(settings, cuts=(cut,))
        captured[cut] = capture(Layer(batch, tree, heads, chosen, heads.dim**-0.5).attend)
    if not captured:
        return {}, 0.0
    return clock.compare({cut: each.replay for cut, each in captured.items()})


class Fit:
    """Measured times of plans, and planners that judge the same plans with other costs."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._planners: list[tuple[Planner, list[int]]] = []
        times: list[float] = []
        starts: list[int] = []
        for row, (heads, settings, tree) in zip(rows, cases(), strict=False):
            planners = plans(heads, settings, tree)
            found = (row["batch"], row["heads"], row["us"].keys())
            if found != (str(tree), str(heads), planners.keys()):
                raise ValueError(f"{row['batch']} was timed with other plans: time all anew")
            if row["noise"] > MOST_NOISE or not planners:
                continue
            starts.append(len(times))
            for cut, planner in planners.items():
                self._planners.append((planner, tree.seq_lens))
                times.append(row["us"][cut])
        if not starts:
            raise ValueError(f"none of {len(rows)} batches can be used: time some first")
        self._starts = np.array(starts)
        best = np.minimum.reduceat(times, self._starts)
        counts = np.diff([*starts, len(times)])
        self._batch = np.repeat(np.arange(len(starts)), counts)
        self._log = np.log(np.array(times) / best[self._batch])

    def judged(self, costs: Sequence[float]) -> npt.NDArray[np.float64]:
        """log of the seconds that the judge expects of each plan."""
        found = []
        for planner, seq_lens in self._planners:
            planner.costs = list(costs)
            found.append(math.log(planner.plan_again(seq_lens).seconds))
        return np.array(found)

    def regret(self, costs: Sequence[float]) -> float:
        """Time of the chosen plans over the best ones: geometric mean."""
        judged = self.judged(costs)
        chosen = judged == np.minimum.reduceat(judged, self._starts)[self._batch]
        return math.exp(float(self._log[chosen].mean()))

    def loss(self, costs: Sequence[float]) -> float:
        """What the likely choices cost, and a quarter of how far the judge is off."""
        judged = self.judged(costs)
        ahead = judged - np.minimum.reduceat(judged, self._starts)[self._batch]
        likely = np.exp(-ahead / SHARPNESS)
        slower = np.minimum(self._log, 0.3)
        slower = slower + 2 * np.maximum(slower - CLEARLY, 0)
        sums = np.add.reduceat(likely, self._starts)
        choice = np.add.reduceat(likely * slower, self._starts) / sums
        off = judged - self._log
        off -= (np.add.reduceat(off, self._starts) / np.bincount(self._batch))[self._batch]
        return float(choice.mean()) + 0.25 * math.sqrt(float(np.minimum(off**2, 0.02).mean()))

    def improved(self, costs: list[float]) -> list[float]:
        """Costs that are changed one after the other as long as that lowers the loss."""
        steps = [STEP] * len(costs)
        best = self.loss(costs)
        while max(steps) > LEAST_STEP:
            for i in range(len(costs)):
                for factor in (1 + steps[i], 1 / (1 + steps[i])):
                    other = [*costs[:i], costs[i] * factor, *costs[i + 1 :]]
                    if (loss := self.loss(other)) < best:
                        costs, best = other, loss
                        break
                else:
                    steps[i] *= 0.5
            print(f"loss {best:.5f}, steps up to {max(steps):.3f}", file=sys.stderr, flush=True)
        return costs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernel.fit", description=__doc__)
    parser.add_argument("what", choices=("time", "costs"), help="what to do")
    parser.add_argument("file", type=Path, help="of the times, a JSON line a batch")
    how = "with time: start no batch later (default: no limit)"
    parser.add_argument("--budget-s", type=float, default=math.inf, metavar="S", help=how)
    options = parser.parse_args(arguments)
    try:
        if options.what == "costs":
            print("\n".join(fitted(Fit(rows_of(options.file)))))
        else:
            time_cuts(options.file, options.budget_s)
    except (OSError, ValueError) as error:
        print(f"benchmarks.kernel.fit: {error}", file=sys.stderr)
        return 2
    return 0


def fitted(fit: Fit) -> list[str]:
    """Lines for the costs, as they are and anew."""
    before = Planner(PatOptions().target(PAPER_TREES[0], Heads(32, 8))).costs
    after = fit.improved(list(before))
    now, then = fit.regret(before), fit.regret(after)
    lines = [f"over the best cut of each batch: {now:.4f}, {then:.4f} anew"]
    rows = zip(_C.COST_NAMES, before, after, strict=True)
    return lines + [f"{name:14} {old:10.4g} {new:10.4g}" for name, old, new in rows]


if __name__ == "__main__":
    sys.exit(main())
