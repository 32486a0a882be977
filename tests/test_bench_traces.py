# SPDX-License-Identifier: Apache-2.0
"""Traces of the serving benchmark: what is asked for when, and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.serving import curves, document, trace
from sglang_pat.bench.serving.rows import TraceRow


def test_a_mooncake_trace_becomes_paths_of_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    requests = [(600, [0, 1]), (1100, [0, 1, 2]), (5000, [0, *range(3, 12)]), (1024, [0, 12])]
    lines = [json.dumps({"input_length": n, "hash_ids": ids}) + "\n" for n, ids in requests]
    file.write_text("".join(lines))
    common: dict[str, Any] = {"context": 1200, "file": file, "seed": "s"}
    found = trace.paths("mooncake", 3, block=512, **common)
    # The third does not fit and is left out; the last block is as full as it was.
    assert [[length for _, length in path] for path in found] == [
        [512, 88],
        [512, 512, 76],
        [512] * 2,
    ]
    assert trace.repeated(found) == pytest.approx(2 / 7)  # block 0, twice
    first, second = (trace.tokens(path, 1000, "s") for path in found[:2])
    assert first[:512] == second[:512] and len(second) == 1100
    assert trace.tokens(found[0], 1000, "other")[:512] != first[:512]
    with pytest.raises(ValueError, match=r"3 requests .* but 4 are needed: raise --context"):
        trace.paths("mooncake", 4, block=512, **common)
    scaled = trace.paths("mooncake", 4, block=64, **common)
    assert [sum(length for _, length in path) for path in scaled] == [75, 137, 9 * 64 + 49, 128]
    with pytest.raises(ValueError, match="--trace-file"):
        trace.paths("mooncake", 1, block=512, context=1200, file=None, seed="s")


def test_conversations_share_a_system_prompt_of_three_levels() -> None:
    found = trace.paths("conversation", 200, context=4000, block=512, file=None, seed="s")
    assert all([length for _, length in path[:3]] == [46, 348, 2123] for path in found)
    assert [len({path[:depth] for path in found}) for depth in (1, 2, 3, 4)] == [1, 3, 4, 200]
    assert max(sum(length for _, length in path) for path in found) <= 4000
    with pytest.raises(ValueError, match="no room for a question after a system prompt of 2517"):
        trace.paths("conversation", 1, context=2520, block=512, file=None, seed="s")


def test_tool_agents_repeat_59_percent_of_their_blocks() -> None:
    found = trace.paths("toolagent", 300, context=7936, block=512, file=None, seed="s")
    assert trace.repeated(found) == pytest.approx(0.59, abs=0.01)
    assert len({path[0] for path in found}) == trace.TASKS
    assert max(map(len, found)) <= 7936 // 512
    with pytest.raises(ValueError, match="raise --context"):
        trace.paths("toolagent", 1, context=2048, block=512, file=None, seed="s")


def test_arrivals_are_poisson_and_the_same_for_everyone() -> None:
    times = trace.arrivals(50.0, 100.0, "s")
    assert times == trace.arrivals(50.0, 100.0, "s") == sorted(times)
    assert len(times) == pytest.approx(5000, rel=0.06) and times[-1] < 100
    assert len(trace.arrivals(0.001, 1.0, "s")) == 1


def test_traces_of_two_models_are_drawn_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    found = []
    for model, tpot in (("llama3-8b", 5.0), ("qwen3-8b", 7.0)):
        written = document.new("traces", "a GPU", {"model": model, "tp": 1})
        written["rows"] = [
            _trace_row(backend, rate, run, tpot * factor * rate)
            for rate in (8.0, 4.0)
            for backend, factor in (("pat", 1.0), ("fa3", 2.0))
            for run in (0, 1)
        ]
        found.append(written)
    drawn: list[Any] = []
    figure = curves.panels

    def kept(rows: int, columns: int) -> Any:
        drawn.append(figure(rows, columns))
        return drawn[-1]

    monkeypatch.setattr(curves, "panels", kept)
    document.draw(found, tmp_path / "a.png")
    ((_, axes),) = drawn
    assert axes.shape == (2, 4)
    for axis, factor in ((axes[0, 0], 5.0), (axes[1, 0], 7.0)):
        lines = [drawn_line.lines[0] for drawn_line in axis.containers]
        # Means of two backends, then their 99th percentiles.
        assert [list(line.get_xdata()) for line in lines] == [[4, 8]] * 4
        ours, theirs = (list(line.get_ydata()) for line in lines[:2])
        assert ours == [4 * factor, 8 * factor] and theirs == [8 * factor, 16 * factor]
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_curves_have_a_table_a_figure_with_the_spread_over_runs() -> None:
    rows = [
        TraceRow(**_trace_row(backend, rate, run, tpot + run, rate_of_tokens))
        for rate in (8.0, 4.0)
        for backend, tpot, rate_of_tokens in (
            *(("pat", 6.0, 900.0), ("fa3", 12.0, 600.0)),
            ("flashinfer", 10.0, 500.0),
        )
        for run in (0, 1, 2)
    ]
    lines = curves.curve_tables(rows)
    titles = [line for line in lines if line.startswith("toolagent: ")]
    # Nothing is known of TTFT's mean and of end-to-end times, as in older documents.
    assert [line.removeprefix("toolagent: ") for line in titles] == [
        *("TPOT mean, ms", "TPOT p99, ms", "TTFT p99, ms", "output tokens/s")
    ]
    at = lines.index("toolagent: TPOT mean, ms")
    assert lines[at + 1].split()[:4] == ["requests/s", "pat", "fa3", "flashinfer"]
    assert lines[at + 2].split() == [
        *("4", "7.00", "(6.00..8.00)", "13.00", "(12.00..14.00)", "11.00", "(10.00..12.00)"),
        f"{7 / 11:.3f}",
    ]
    assert lines[at + 3].split()[0] == "8"
    # Most tokens/s are the best, unlike times.
    assert lines[-1].split()[-1] == "1.500"
    assert curves.curve_tables(rows[:3])[-1].split()[-1] == "-", "nothing to compare with"


def test_cells_of_ten_seconds_do_not_touch() -> None:
    rows = [
        TraceRow(**_trace_row(backend, 24.0, run, 14_216.21 + 100 * run, 900.0))
        for backend in ("pat", "fa3")
        for run in (0, 1, 2)
    ]
    line = next(line for line in curves.curve_tables(rows) if line.split()[:1] == ["24"])
    cell = ["14316.21", "(14216.21..14416.21)"]
    assert line.split() == ["24", *cell, *cell, "1.000"]


def _trace_row(
    backend: str, rate: float, run: int, tpot_ms: float, tokens_per_s: float = 1.0
) -> Any:
    numbers = dict.fromkeys(
        ("ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p99_ms"), 1.0
    )
    return asdict(
        TraceRow(
            backend=backend,
            trace="toolagent",
            rate=rate,
            run=run,
            requests=1,
            completed=1,
            repeated=0.5,
            cached=0.5,
            tpot_ms=tpot_ms,
            tokens_per_s=tokens_per_s,
            **numbers,
        )
    )
