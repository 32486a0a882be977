# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark on two servers on a CPU, driven by SGLang's own client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.forks import cpu_server

from benchmarks.serving import __main__ as command
from benchmarks.serving import loads
from benchmarks.serving.model import write_tokenizer
from sglang_pat.demo.model import make_model

BACKENDS = ["pat", "torch_native"]
LOADS = ["rollouts:2x4x48", "forks:1x2x200"]  # one of each dataset
VOCAB = 512


def test_loads_run_on_two_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang", reason="serving needs SGLang 0.5.23")
    for name, value in cpu_server().items():  # servers inherit it
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loads, "FORKS", 1)
    monkeypatch.setattr(loads, "CHILD_TOKENS", (6, 90))
    model, file = tmp_path / "model", tmp_path / "rows.json"
    make_model(model, hidden=64, q_heads=4, head_dim=32, vocab=VOCAB)
    write_tokenizer(model, VOCAB, end=0)
    servers = ["--device", "cpu", "--model", str(model), "--backends", *BACKENDS]
    servers += ["--pool-tokens", "16384", "--max-requests", "8", "--stream-interval", "1"]
    sizes = ["--runs", "1"]
    files = ["--folder", str(tmp_path), "--json", str(file)]
    assert command.main([*servers, "--loads", *LOADS, *sizes, *files]) == 0
    rows = json.loads(file.read_text())["rows"]
    pairs = [(load, backend) for load in LOADS for backend in BACKENDS]
    assert [(row["load"], row["backend"]) for row in rows] == pairs
    lengths: dict[str, int] = {}
    for row in rows:
        # On a loaded machine several tokens may arrive at once, so the median may be 0.
        assert row["p99_itl_ms"] > 0 and row["median_tpot_ms"] > 0 and row["median_ttft_ms"] > 0
        assert row["steady"]["output_throughput"] > 0
        done, tokens = row["completed"], row["total_output_tokens"]
        assert done == {LOADS[0]: 8, LOADS[1]: 12}[row["load"]]
        # Both backends get the same answers' lengths.
        assert tokens == lengths.setdefault(row["load"], tokens)
        if row["backend"] != "pat":
            assert "counted" not in row
            continue
        counted = row["counted"]
        assert counted["fallbacks"] == {} and 0 < counted["plans_made"] <= counted["decode_steps"]
        assert counted["packed_steps"] > 0 and counted["kv_read_share"] < 1
    shown = capsys.readouterr().out
    for load in LOADS:
        assert f"{load}: output tokens/s, pat / torch_native: " in shown
