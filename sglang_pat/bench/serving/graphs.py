# SPDX-License-Identifier: Apache-2.0
"""Where the GPU's time of a decode step goes: how long each of its CUDA graphs runs, by SGLang's
own profiler.

A step of a server that does not speculate is one graph. Where it speculates, the forward that
verifies, the drafting and the draft model's prefill of accepted tokens have graphs of their own.
The one with the most kernels is the verify step, as the model has the most layers.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_pat.bench.serving.fleet import Served
from sglang_pat.bench.serving.rows import WorkloadRow

STEPS = 12  # that the profiler records
WAIT_S = 60.0  # for the file that the server writes
_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class GraphTime:
    """All launches of graphs of so many kernels. ``ms``: from the start of the first kernel to the
    end of the last one, ``busy_ms``: the sum over kernels, which may run side by side; medians."""

    kernels: int
    launches: int
    ms: float
    busy_ms: float


def profile_graphs(
    served: Served, bodies: Sequence[bytes], folder: Path, *, after_s: float, timeout_s: float
) -> list[dict[str, Any]]:
    """``graph_times`` while the server answers ``bodies``, recorded from ``after_s`` on; empty if
    the server wrote no profile, as it does not where it answers in fewer than ``STEPS`` steps.

    Raises:
        RequestError: a request failed.
        urllib.error.HTTPError: the server refused to profile.
    """
    folder = folder / f"{served.backend}-{uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    asked = {"num_steps": STEPS, "output_dir": str(folder.resolve()), "activities": ["GPU"]}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(served.stream, bodies, timeout_s=timeout_s)
        time.sleep(after_s)
        served.server.post("/start_profile", asked)
        answers.result()
    return [asdict(each) for each in graph_times(_events(folder))]


def _events(folder: Path) -> list[dict[str, Any]]:
    """Of the trace that appears in ``folder``; none if it does not."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for path in folder.glob("*.trace.json.gz"):
            try:
                found = json.loads(gzip.decompress(path.read_bytes()))
            except (EOFError, ValueError, gzip.BadGzipFile):
                continue  # still being written
            events: list[dict[str, Any]] = found["traceEvents"]
            return events
        time.sleep(0.5)
    return []


def graph_times(events: Sequence[dict[str, Any]]) -> list[GraphTime]:
    """Of a trace as torch's profiler writes it, the graph that takes longest first. Launches at the
    edges of the recording, of which kernels may be missing, are left out where there are others."""
    launched = {
        event["args"]["correlation"]
        for event in events
        if str(event.get("name", "")).startswith(_LAUNCHES)
    }
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and event["args"]["correlation"] in launched:
            spans[event["args"]["correlation"]].append((event["ts"], event["dur"]))
    by_size: dict[int, list[list[tuple[float, float]]]] = defaultdict(list)
    for kernels in spans.values():
        by_size[len(kernels)].append(kernels)
    often = max(map(len, by_size.values()), default=0)
    found = [
        GraphTime(
            kernels=size,
            launches=len(all_of),
            ms=statistics.median(
                max(ts + dur for ts, dur in one) - min(ts for ts, _ in one) for one in all_of
            )
            / 1e3,
            busy_ms=statistics.median(sum(dur for _, dur in one) for one in all_of) / 1e3,
        )
        for size, all_of in by_size.items()
        if 2 * len(all_of) >= often
    ]
    return sorted(found, key=lambda each: -each.ms)


def graph_table(rows: Sequence[WorkloadRow]) -> list[str]:
    """Lines: the graphs of each run that was profiled, and what pat's step of the model takes of
    the best other backend's."""
    profiled = [row for row in rows if row.graphs]
    if not profiled:
        return []
    lines = ["", "CUDA graphs of a step (kernels: ms from the first to the end of the last, sum)"]
    models: dict[str, dict[str, float]] = defaultdict(dict)
    for row in profiled:
        found = [GraphTime(**graph) for graph in row.graphs or ()]
        models[row.workload][row.backend] = max(found, key=lambda each: each.kernels).ms
        each_of = (f"{each.kernels}: {each.ms:.2f}, {each.busy_ms:.2f}" for each in found)
        lines.append(f"{row.workload:<14} {row.backend:<11} {'; '.join(each_of)}")
    for workload, times in models.items():
        others = [ms for backend, ms in times.items() if backend != "pat"]
        if "pat" in times and others:
            share = times["pat"] / min(others)
            lines.append(f"{workload:<14} the model's, pat / better of others: {share:.3f}")
    return lines
