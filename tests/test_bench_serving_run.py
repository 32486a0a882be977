# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark's command against two servers on a CPU that live as long as these tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.forks import start_server
from kit.start import cpu_server

from benchmarks.serving import __main__ as command
from benchmarks.serving.agents import AgentsRow
from benchmarks.serving.fleet import FleetConfig, Served, serve
from benchmarks.serving.model import open_model
from benchmarks.serving.rows import WorkloadRow
from sglang_pat.demo.model import make_model
from sglang_pat.demo.server import Server

BACKENDS = ["pat", "torch_native"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    return make_model(folder, hidden=64, q_heads=4, head_dim=32, vocab=512)


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    pytest.importorskip("sglang", reason="serving needs SGLang 0.5.23")
    sizes = open_model(str(model), model, "float32")
    config = FleetConfig(sizes, "cpu", "float32", 1, 16_384, 8, 0.9, 0.0, ())
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu_server().items():  # servers inherit it
            patch.setenv(name, value)
        patch.setattr(Server, "_spawn", start_server)
        with serve(config, BACKENDS, logs=logs, ready_s=300) as found:
            yield found


@pytest.fixture
def bench(fleet: list[Served], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, on servers that run already; returns what it wrote."""

    @contextmanager
    def running(config: FleetConfig, backends: list[str], **_: Any) -> Iterator[list[Served]]:
        assert backends == BACKENDS and config.pool_tokens <= 16_384 and config.max_requests <= 8
        yield fleet

    monkeypatch.setattr(command, "serve", running)

    def run(*arguments: str) -> dict[str, Any]:
        file = tmp_path / "rows.json"
        here = ["--device", "cpu", "--model", str(model), "--backends", *BACKENDS]
        assert command.main([*here, *arguments, "--json", str(file)]) == 0
        written: dict[str, Any] = json.loads(file.read_text())
        return written

    return run


def complete(bench: Any, option: str, amount: float, *arguments: str) -> tuple[dict[str, Any], int]:
    """What the command wrote once every run was long enough, and the ``option`` that it took: on a
    busy machine a run may be too short for its requests to decode together."""
    for longer in (1, 2, 4):
        written = bench(*arguments, option, str(longer * amount))
        if not written["left_out"] and all(map(decoded_together, written["rows"])):
            break
    assert written["left_out"] == []
    return written, round(longer * amount)


def decoded_together(row: dict[str, Any]) -> bool:
    """A row of ``--workloads`` says so by its step time: SGLang notes it with the batch's size."""
    return row.get("step_ms", 0.0) is not None


def test_workloads_run_on_two_servers_in_turns(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--runs", "2", "--new-tokens", "8", "--stream-interval", "2")
    specs = ("200x4", "2*64+32x4", "0x4")
    written, tokens = complete(bench, "--output-tokens", 160, "--workloads", *specs, *sizes)
    assert written["kind"] == "workloads" and written["settings"]["tp"] == 1
    rows = [WorkloadRow(**row) for row in written["rows"]]
    assert [(row.run, row.workload, row.backend) for row in rows] == [
        (run, spec, backend)
        for run, order in enumerate((BACKENDS, BACKENDS[::-1]))
        for spec in specs
        for backend in order
    ]
    for row in rows:
        assert row.cached_tokens >= row.prefix + row.private
        # On a loaded machine several tokens may arrive at once, so the median may be 0.
        assert row.itl_p50_ms <= row.itl_p99_ms > 0 and row.ttft_ms > 0 and row.tokens_per_s > 0
        # The unit is the same. Whoever pauses the server in a step adds to one of them only.
        assert row.step_ms is not None and 0.02 < row.tpot_ms / row.step_ms < 50
        if row.backend != "pat":
            assert row.decode_steps is row.kv_saved_bytes is None
            continue
        # The first of the tokens comes from the prefill. A busy machine may start the requests so
        # far apart that some of the others come from steps of one request, which are SGLang's.
        assert row.decode_steps is not None and tokens // 2 < row.decode_steps < 4 * tokens
        assert row.plan_us is not None and row.plan_us > 0
        if row.workload == "0x4":
            assert row.packed_steps == row.kv_saved_bytes == 0
        else:
            assert tokens // 2 < (row.packed_steps or 0) <= row.decode_steps
            assert (row.kv_saved_bytes or 0) > 0
    # In a packed step of two to four requests one to three reads of 200 tokens are saved: 2 layers,
    # 2 heads, K and V, 32 numbers of 4 bytes.
    saved, packed = rows[0].kv_saved_bytes or 0, rows[0].packed_steps or 0
    least = packed * 200 * 2 * 2 * 2 * 32 * 4
    assert least <= saved <= 3 * least
    shown = capsys.readouterr().out
    assert "pat / better of others" in shown and "(" in shown


def test_agents_run_on_two_servers_in_turns(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--agent-context", "900", "--runs", "2")
    written, duration_s = complete(bench, "--duration-s", 4, "--agents", "100+2*60x4", *sizes)
    assert written["kind"] == "agents"
    assert written["settings"]["agent_context"] == 900
    rows = [AgentsRow(**row) for row in written["rows"]]
    assert [(row.run, row.backend) for row in rows] == [
        (run, backend) for run, order in enumerate((BACKENDS, BACKENDS[::-1])) for backend in order
    ]
    for row in rows:
        assert row.itl_p50_ms <= row.itl_p99_ms > 0 and 0 < row.ttft_p50_ms <= row.ttft_p99_ms
        assert 0 < row.window_s <= duration_s and row.turns >= 4 and row.tokens_per_s > 0
        # The system prompt and the role, at least, of every turn; later ones also the last turn.
        assert row.cached > 0.3
        if row.backend == "pat":
            assert (row.packed_steps or 0) > 0.8 * (row.decode_steps or 0) > 0
            assert 0 < (row.plans_made or 0) < (row.decode_steps or 0)
        else:
            assert row.plans_made is row.decode_steps is None
    shown = capsys.readouterr().out
    assert "100+2*60x4: inter-token time, pat / torch_native: " in shown
    assert "at most" not in shown, "the goals are those of another model"


def test_agents_run_behind_workloads(bench: Any, tmp_path: Path) -> None:
    """Each kind has a document of its own. On a busy machine a run may be too short for it."""
    sizes = ("--runs", "1", "--output-tokens", "60", "--agent-context", "900", "--duration-s", "2")
    written = bench("--workloads", "0x4", "--agents", "100+2*60x4", *sizes)
    assert written["kind"] == "workloads" and "duration_s" not in written["settings"]
    agents = json.loads((tmp_path / "rows-agents.json").read_text())
    assert agents["kind"] == "agents" and agents["settings"]["duration_s"] == 2
    for document in (written, agents):
        assert len(document["rows"]) + len(document["left_out"]) == len(BACKENDS)
    assert all(row["agents"] == "100+2*60x4" for row in agents["rows"])


def test_a_run_that_cannot_be_measured_is_left_out(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    written = bench("--workloads", "0x1", "--runs", "1", "--output-tokens", "1")
    assert written["rows"] == []
    for backend, left_out in zip(BACKENDS, written["left_out"], strict=True):
        assert f"0x1 {backend}: no time at which all 1 requests decode" in left_out
    assert "left out: 0x1 pat" in capsys.readouterr().out


def test_without_time_nothing_runs(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--workloads", "0x4", "--budget-s", "0")["rows"] == []
    assert "the time is up" in capsys.readouterr().out
