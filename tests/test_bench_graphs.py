# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark's times of CUDA graphs: from a profiler's trace, and their table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pat.bench.serving import graphs
from sglang_pat.bench.serving.graphs import GraphTime, graph_table, graph_times, profile_graphs


def launch(correlation: int) -> dict[str, Any]:
    return {"name": "cudaGraphLaunch", "cat": "cuda_runtime", "args": {"correlation": correlation}}


def kernel(correlation: int, ts: float, dur: float) -> dict[str, Any]:
    """Microseconds."""
    return {"cat": "kernel", "ts": ts, "dur": dur, "args": {"correlation": correlation}}


# Two steps: a graph of three kernels, of which two overlap, one of one, a kernel by itself.
STEPS = [
    *(launch(1), kernel(1, 0, 400), kernel(1, 300, 500), kernel(1, 900, 100)),
    *(launch(2), kernel(2, 1000, 50), kernel(3, 1100, 900)),
    *(launch(4), kernel(4, 3000, 400), kernel(4, 3300, 500), kernel(4, 4000, 200)),
    *(launch(5), kernel(5, 4300, 70)),
]


def test_graphs_are_told_apart_by_their_kernels() -> None:
    model, other = graph_times(STEPS)
    assert model == GraphTime(kernels=3, launches=2, ms=1.1, busy_ms=1.05)
    assert other == GraphTime(kernels=1, launches=2, ms=0.06, busy_ms=0.06)
    assert graph_times([]) == []


def test_a_launch_at_the_edge_is_left_out() -> None:
    cut = [launch(9), kernel(9, 0, 10), kernel(9, 20, 10)]
    third = [launch(6), *(kernel(6, ts, 100) for ts in (5000, 5200, 5400))]
    assert [each.kernels for each in graph_times([*cut, *STEPS, *third])] == [3, 1]


def test_the_table_compares_the_models_graphs() -> None:
    def row(backend: str, ms: float) -> Any:
        small = {"kernels": 20, "launches": 9, "ms": 9.0, "busy_ms": 8.0}
        return SimpleNamespace(
            backend=backend,
            workload="8192x64",
            graphs=[small, {"kernels": 400, "launches": 9, "ms": ms, "busy_ms": ms - 0.5}],
        )

    rows = [row("fa3", 14.0), row("pat", 7.0), row("flashinfer", 12.5)]
    lines = graph_table([*rows, SimpleNamespace(graphs=None)])  # type: ignore[list-item]
    assert "8192x64        fa3         20: 9.00, 8.00; 400: 14.00, 13.50" in lines
    assert lines[-1] == "8192x64        the model's, pat / better of others: 0.560"
    assert graph_table([SimpleNamespace(graphs=None)]) == []  # type: ignore[list-item]


class FakeServed:
    """A server that writes its profile when the answers have ended."""

    backend = "pat"

    def __init__(self, events: list[dict[str, Any]] | None) -> None:
        self._events = events
        self.server = self
        self.folder: Path | None = None

    def post(self, path: str, body: dict[str, Any]) -> None:
        assert path == "/start_profile" and body["activities"] == ["GPU"]
        self.folder = Path(body["output_dir"])
        if self._events is not None:
            text = json.dumps({"traceEvents": self._events}).encode()
            (self.folder / "0-TP-0.trace.json.gz").write_bytes(gzip.compress(text))

    def stream(self, bodies: list[bytes], *, timeout_s: float) -> list[Any]:
        return []


def test_the_profile_that_the_server_wrote_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "WAIT_S", 0.2)
    given = {"after_s": 0.0, "timeout_s": 1.0}
    found = profile_graphs(FakeServed(STEPS), [], tmp_path, **given)  # type: ignore[arg-type]
    assert [each["kernels"] for each in found] == [3, 1]
    nothing = profile_graphs(FakeServed(None), [], tmp_path, **given)  # type: ignore[arg-type]
    assert nothing == []
    assert len(list(tmp_path.iterdir())) == 2  # a folder each
