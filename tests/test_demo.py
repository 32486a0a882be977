# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``, from the command line to its last line: two real servers each time."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.forks import start_server
from kit.start import cpu_server

from sglang_pat import cli
from sglang_pat.demo import run
from sglang_pat.demo.compare import MAX_LOGPROB_DIFF_FP32, MEAN_LOGPROB_DIFF_BF16
from sglang_pat.demo.model import make_model
from sglang_pat.demo.scale import SCALES
from sglang_pat.demo.server import Server, ServerError
from sglang_pat.demo.workload import AgentWorkload


def _demo(cache: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_pat", "demo", "--cache", str(cache), *args],
        cwd=cache,
        env=os.environ | cpu_server(fork=False) | env,
        capture_output=True,
        text=True,
        timeout=900,
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.mark.timeout(1000)
def test_fp32_demo_chooses_the_same_tokens_and_packs(cache: Path) -> None:
    written = cache / "new" / "demo.json"
    done = _demo(cache, "--device", "cpu", "--json", str(written), SGLANG_PAT_CHECK="1")
    assert done.returncode == 0, done.stdout + done.stderr
    fields = _last_line(done)
    workload = AgentWorkload.load()
    assert fields["backend"] == "pat"
    assert fields["stock_backend"] == "torch_native"
    assert fields["device"].startswith("CPU")
    assert fields["requests"] == workload.num_requests
    assert fields["output_tokens"] == workload.num_requests * workload.max_tokens
    assert fields["tokens_equal"] is True
    assert fields["token_match_rate"] == 1.0
    assert 0 <= fields["max_logprob_diff"] <= MAX_LOGPROB_DIFF_FP32
    # No near-tie that rounding on another machine could turn round.
    assert fields["smallest_margin"] > 10 * fields["max_logprob_diff"]
    # Two turns of 32 tokens; the first of each comes from the prefill.
    assert fields["decode_steps"] >= workload.turns * (workload.max_tokens - 1)
    assert fields["packed_steps"] > 0.9 * fields["decode_steps"]
    # 24 requests share 1,400 of about 1,650 tokens.
    assert 3 * fields["kv_tokens_read"] < fields["kv_tokens_unpacked"]
    assert fields["plans_made"] + fields["plans_reused"] == fields["decode_steps"]
    assert fields["tpot_ms"] > 0
    assert fields["stock_tpot_ms"] > 0
    assert "tokens/s" in done.stderr  # the progress bar
    assert "K/V tokens read per decode step" in done.stdout
    saved = 1 - fields["kv_tokens_read"] / fields["kv_tokens_unpacked"]
    assert fields["kv_reads_saved"] == pytest.approx(saved, rel=1e-4)
    assert f"K/V reads saved: {saved:.0%}." in done.stdout
    assert fields["workload_s"] < fields["seconds"]
    stored = json.loads(written.read_text())
    table = stored.pop("table")
    assert stored == fields
    assert "\n".join(table) in done.stdout and "total time, s" in "".join(table)


class NoServer:
    """In place of a server that is not asked."""

    def start(self) -> None: ...

    def wait_until_ready(self) -> None: ...

    def stop(self) -> None: ...


def _rehearse(cache: Path, env: dict[str, str], *, keep: bool) -> subprocess.CompletedProcess[str]:
    """The GPU's way, small: two conversations a task, and a timed pass that asks for no
    log-probabilities. ``keep``: on servers that are warmed up, and write down what the stock
    answered. Otherwise take that instead of a stock server, so that a run costs one server."""
    scale, answers = SCALES["cpu"], cache / "stock.pickle"
    small = {"model": scale.model | {"layers": 1}, "parts": 2, "max_tokens": 4}
    measure, make_server = run._measure_stock, run._server

    def measured(server: Server, trial: Any) -> Any:
        if keep:
            answers.write_bytes(pickle.dumps(measure(server, trial)))
        return pickle.loads(answers.read_bytes())

    def server(model: Path, backend: str | None, trial: Any) -> Any:
        if keep or backend == "pat":
            return make_server(model, backend, trial)
        return NoServer()

    command = ["demo", "--device", "cpu", "--dtype", "bfloat16", "--cache", str(cache)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setitem(SCALES, "cpu", replace(scale, **small, compared_tokens=4, warm_up=keep))
        patch.setattr(run, "_measure_stock", measured)
        patch.setattr(run, "_server", server)
        patch.setattr(Server, "_spawn", start_server)
        for name, value in env.items():
            patch.setenv(name, value)  # servers inherit it
        code = cli.main(command)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def rehearsed(cache: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """A rehearsal on two servers, and the log of pat's."""
    done = _rehearse(cache, cpu_server(), keep=True)
    return done, (cache / "server-pat.log").read_text()


@pytest.mark.timeout(1000)
def test_bf16_demo_agrees_on_forced_tokens(
    rehearsed: tuple[subprocess.CompletedProcess[str], str],
) -> None:
    """What a GPU does, rehearsed on a CPU."""
    done, log = rehearsed
    assert done.returncode == 0, done.stdout + done.stderr
    fields = _last_line(done)
    assert fields["dtype"] == "bfloat16"
    assert fields["requests"] == 2 * AgentWorkload.load().num_requests
    assert 0 < fields["mean_logprob_diff"] <= MEAN_LOGPROB_DIFF_BF16
    itself = fields["stock_itself_mean_logprob_diff"]
    assert 0 <= itself < fields["mean_logprob_diff"]  # torch_native runs request by request
    # Of the timed pass, which nothing forced: in so few tokens of bf16 there may be no difference.
    assert 0 < fields["token_match_rate"] <= 1
    # The warm-up is not counted: two turns of 4 tokens, the first of each from the prefill.
    assert 6 <= fields["decode_steps"] < 24
    assert fields["packed_steps"] > 0
    assert fields["kv_reads_saved"] > 0.5  # 1,400 of 1,650 tokens are common to 48 requests
    assert "both servers are warmed up by the same workload" in done.stdout
    assert "torch_native differs from itself in other batches by" in done.stdout
    assert log.count("Cache flushed") == 1


@pytest.mark.timeout(1000)
@pytest.mark.usefixtures("rehearsed")
def test_a_dropped_pack_fails_the_bf16_demo(cache: Path) -> None:
    """The bound on log-probabilities has teeth: a plugin of the tests leaves out one pack. Without
    the fault the same model agrees with the same answers of the stock (the test above)."""
    fault = cache / "fault"
    fault.write_text("drop_pack")
    env = cpu_server(plugins=True) | {"PAT_TEETH_FAULT": str(fault)}
    done = _rehearse(cache, env, keep=False)
    assert done.returncode == 1, done.stdout + done.stderr
    fields = _last_line(done)
    assert fields["passed"] is False
    assert fields["packed_steps"] > 0  # so it is the answers that failed it
    assert "FAILED: " in done.stdout


def test_a_server_that_does_not_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "_spawn", start_server)
    model = make_model(tmp_path / "model", hidden=64, layers=1, q_heads=2, kv_heads=1, vocab=300)
    server = Server(model, backend="no_such", device="cpu", log=tmp_path / "server.log")
    with pytest.raises(ServerError, match=r"(?s)ended with code 2.*invalid choice: 'no_such'"):
        server.__enter__()


def test_a_wrong_setting_stops_the_demo_with_its_name(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--device", "cpu", SGLANG_PAT_POLICY="clever")
    assert done.returncode == 1
    assert "SGLANG_PAT_POLICY=clever" in done.stderr
    assert not list(tmp_path.iterdir())  # neither a model was made nor a server started
