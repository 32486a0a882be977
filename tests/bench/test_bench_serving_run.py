# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark against two servers on a CPU that live as long as these tests, driven by
SGLang's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.forks import start_server
from kit.start import cpu_server

from benchmarks.serving import __main__ as command
from benchmarks.serving.model import write_tokenizer
from benchmarks.serving.servers import serve
from sglang_pat.demo.model import make_model
from sglang_pat.demo.server import Server

BACKENDS = ["pat", "torch_native"]
VOCAB, POOL_TOKENS = 512, 16_384
Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder, hidden=64, q_heads=4, head_dim=32, vocab=VOCAB)
    write_tokenizer(folder, VOCAB, end=0)
    return folder


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    pytest.importorskip("sglang", reason="serving needs SGLang 0.5.23")
    arguments = ["--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)]
    arguments += ["--max-running-requests", "8", "--decode-log-interval", "20"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu_server().items():  # servers inherit it
            patch.setenv(name, value)
        patch.setattr(Server, "_spawn", start_server)
        how = {"device": "cpu", "pool_tokens": POOL_TOKENS, "logs": tmp_path_factory.mktemp("logs")}
        with serve(model, BACKENDS, arguments, **how, ready_s=300) as found:
            yield found


@pytest.fixture
def bench(
    fleet: dict[str, Server], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """The command, on servers that run already; returns what it wrote."""

    @contextmanager
    def running(
        folder: Path, backends: list[str], *_: Any, **how: Any
    ) -> Iterator[dict[str, Server]]:
        assert (folder, backends, how["pool_tokens"]) == (model, BACKENDS, POOL_TOKENS)
        yield fleet

    monkeypatch.setattr(command, "serve", running)

    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        file = tmp_path / "rows.json"
        here = ["--device", "cpu", "--model", str(model), "--backends", *BACKENDS]
        here += ["--pool-tokens", str(POOL_TOKENS), "--folder", str(tmp_path)]
        assert command.main([*here, *arguments, "--json", str(file)]) == status
        written: dict[str, Any] = json.loads(file.read_text())
        return written

    return run


def test_loads_run_on_two_servers_in_turns(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = ("2*200x2", "0x4", "100+2*60x3")
    sizes = ("--output-tokens", "60", "--stream-interval", "1")
    how = ("--runs", "2", "--agent-context", "700")
    rows = bench("--loads", *loads, *how, *sizes)["rows"]
    assert [(row["run"], row["load"], row["backend"]) for row in rows] == [
        (run, load, backend)
        for run, order in enumerate((BACKENDS, BACKENDS[::-1]))
        for load in loads
        for backend in order
    ]
    for row in rows:
        # On a loaded machine several tokens may arrive at once, so the median may be 0.
        assert row["p99_itl_ms"] > 0 and row["median_tpot_ms"] > 0 and row["median_ttft_ms"] > 0
        assert row["steady"]["output_throughput"] > 0
        agents = row["load"] == loads[2]
        assert row["completed"] >= 9 if agents else row["completed"] == 4
        assert row["total_output_tokens"] == row["completed"] * (90 if agents else 60)
        if row["backend"] != "pat":
            assert "counted" not in row
            continue
        counted = row["counted"]
        assert counted["fallbacks"] == {} and 0 < counted["plans_made"] <= counted["decode_steps"]
        assert (counted["packed_steps"] > 0) == (counted["kv_read_share"] < 1)
        assert (counted["packed_steps"] > 0) == (row["load"] != "0x4")
    shown = capsys.readouterr().out
    for load in loads:
        assert f"{load}: output tokens/s, pat / torch_native: " in shown


def test_a_request_that_fails_ends_the_run(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    written = bench("--loads", "9000x2", "--runs", "1", status=1)  # longer than the model's context
    assert written["rows"] == [] and "2 none: see the servers' logs" in capsys.readouterr().err


def test_without_time_nothing_runs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--loads", "0x4", "--budget-s", "0")["rows"] == []
    assert "the time is up" in capsys.readouterr().out
