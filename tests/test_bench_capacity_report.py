# SPDX-License-Identifier: Apache-2.0
"""Capacities that follow from probes: in words, in their table and in their picture."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.serving import __main__ as command
from sglang_pat.bench.serving import curves, document
from sglang_pat.bench.serving.capacity_report import Capacity, capacity_table, draw_capacity, ratio
from sglang_pat.bench.serving.probe import CapacityRow
from sglang_pat.bench.serving.search import Bracket


def probe(load: float, p99: float, backend: str = "pat", **more: Any) -> CapacityRow:
    fields: dict[str, Any] = {
        "backend": backend, "subject": "s", "unit": "agents", "load": load, "probe": 0,
        "window_s": 10.0, "requests": 200, "begun": 1.0, "ended": None, "tpot_ms": p99 / 2,
        "tpot_p99_ms": p99, "ttft_mean_ms": 1.0, "ttft_p99_ms": 2.0, "e2e_mean_ms": 3.0,
        "e2e_p99_ms": 4.0, "tokens_per_s": 5.0,
    }  # fmt: skip
    return CapacityRow(**fields | more)


def test_capacities_and_ratios_say_what_is_known() -> None:
    def known(held: float | None, broke: float | None, found: bool = False) -> Capacity:
        return Capacity(Bracket(held, broke), found)

    assert str(known(None, None)) == "-"
    assert str(known(None, 8.0)) == "under 8"
    assert str(known(256, None)) == "at least 256"
    assert str(known(96, 192)) == "at least 96, at most 192"
    assert str(known(112, 120, True)) == "112"
    sure, other, more = known(120, 128, True), known(60, 64, True), known(80, 85, True)
    assert ratio(sure, [other, more]) == "1.50"
    assert ratio(known(160, None), [other, more]) == "at least 2.00"
    assert ratio(known(128, 192), [more]) == "at least 1.60"
    assert ratio(sure, [other, known(96, 160)]) == "at least 0.75"
    assert ratio(sure, [known(256, None)]) == "-"
    assert ratio(known(None, 8.0), [other]) == "-" and ratio(sure, []) == "-"
    # Whole numbers are found beside each other, rates by the resolution alone.
    rows = [probe(2, 20.0), probe(3, 30.0)]
    assert Capacity.of(rows, 25.0, 0.12).found
    rates = [replace(row, unit="requests/s") for row in rows]
    assert not Capacity.of(rates, 25.0, 0.12).found


def test_doubtful_capacities_are_named() -> None:
    rows = [probe(16, 20.0), probe(18, 26.0, requests=40), probe(32, 24.0), probe(64, 99.0)]
    lines = capacity_table(rows, [25.0], 0.12)
    assert lines[-2] == "s pat, 25 ms: held again at 32, above what broke it: noise"
    assert lines[-1].startswith("s pat, 25 ms: the p99 at 18 is of 40 requests, fewer than 100")
    assert lines[-3].endswith("18: p99 TPOT 26.0 ms")
    clean = [probe(16, 20.0), probe(17, 26.0)]
    assert capacity_table(clean, [25.0], 0.12)[-1].endswith("17: p99 TPOT 26.0 ms")
    # Without a backend that held, and without one that broke.
    lines = capacity_table([probe(1, 99.0), probe(1, 9.0, "fa3")], [25.0], 0.12)
    assert "under 1" in lines[-2] and lines[-1].endswith("none") and "at least 1 " in lines[-1]


def test_the_picture_has_limits_and_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    make = curves.panels

    def kept(rows: int, columns: int) -> Any:
        drawn.append(make(rows, columns))
        return drawn[-1]

    monkeypatch.setattr("sglang_pat.bench.serving.capacity_report.panels", kept)
    rows = [probe(16, 20.0), probe(32, 30.0, begun=0.5), probe(16, 40.0, "fa3")]
    draw_capacity([("llama3-8b", rows)], [25.0, 50.0], tmp_path / "a.png")
    ((_, axes),) = drawn
    (axis,) = axes[:, 0]
    lines = [list(line.get_ydata()) for line in axis.lines]
    assert [20.0, 30.0] in lines and [40.0] in lines and [30.0] in lines
    assert [25.0, 25.0] in lines and [50.0, 50.0] in lines
    assert axis.get_ylim()[1] == 80.0
    written = document.new("capacity", "a GPU", {"model": "llama3-8b", "tp": 1})
    written["settings"] |= {"limits_ms": [25.0, 50.0], "resolution": 0.12}
    written["rows"] = [asdict(row) for row in rows]
    file = tmp_path / "rows.json"
    document.write(written, file)
    picture = tmp_path / "b.png"
    assert command.main(["--from", str(file), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    assert "32: p99 TPOT 30.0 ms" in capsys.readouterr().out
