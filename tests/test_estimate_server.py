# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate --url``: what a running server's metrics tell."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from kit.shell import fresh_shell

from sglang_pat import Target, cli
from sglang_pat.estimate import live
from sglang_pat.estimate.model import open_model
from sglang_pat.estimate.requests import InputError
from sglang_pat.estimate.server import Observed, observe, samples
from sglang_pat.estimate.step import StepModel

URL = "http://localhost:30000"
INFO = {"attention_backend": "fa3", "model_path": "MODEL", "tp_size": 1}
LABELS = 'model_name="M",tp_rank="0"'


def pat_metrics(steps: int, *, serving: int = 1) -> str:
    """Of a server on which each step reads 200 of 1,000 tokens."""
    return f"""\
# HELP sglang_pat_serving 1: pat runs this server's decode.
# TYPE sglang_pat_serving gauge
sglang_pat_serving{{{LABELS}}} {serving}.0
sglang_pat_decode_steps_total{{{LABELS}}} {steps}.0
sglang_pat_packed_steps_total{{{LABELS}}} {steps // 2}.0
sglang_pat_kv_tokens_read_total{{{LABELS}}} {200 * steps:e}
sglang_pat_kv_tokens_unpacked_total{{{LABELS}}} {1000 * steps:e}
sglang_pat_fallbacks_total{{{LABELS},reason="a \\"quoted\\" reason"}} 2.0
sglang_pat_base_forwards_total{{{LABELS},kind="extend"}} 7.0
sglang:num_running_reqs{{{LABELS}}} 4.0
sglang:inter_token_latency_seconds_sum{{{LABELS}}} {0.01 * steps}
sglang:inter_token_latency_seconds_count{{{LABELS}}} {steps}.0
"""


def stock_metrics(lengths: int, held: int) -> str:
    return f"""\
sglang:num_running_reqs{{{LABELS}}} 8.0
sglang:decode_sum_seq_lens{{{LABELS}}} {lengths}.0
sglang:kv_used_tokens{{{LABELS}}} {held}.0
sglang:cache_hit_rate{{{LABELS}}} 0.6
"""


def answers(*metrics: str, info: object = INFO) -> Callable[[str], str]:
    """A server that gives one text of metrics after another."""
    left = iter(metrics)

    def get(url: str) -> str:
        return json.dumps(info) if url.endswith("server_info") else next(left)

    return get


def observed(*metrics: str, info: object = INFO) -> Observed:
    waited: list[float] = []
    found = observe(URL, len(metrics) - 1, get=answers(*metrics, info=info), sleep=waited.append)
    assert waited == [1.0] * (len(metrics) - 1)
    return found


def test_samples() -> None:
    text = 'a_total{x="1",y="b\\"c"} 2.5\n# HELP a text\nb 3e+06\nnot a line\nc NaN\n'
    found = samples(text)
    assert found[0] == ("a_total", {"x": "1", "y": 'b\\"c'}, 2.5)
    assert found[1] == ("b", {}, 3e6)
    assert [name for name, _, _ in found] == ["a_total", "b", "c"]


def test_counters_of_the_time_that_was_watched() -> None:
    seen = observed(pat_metrics(100), pat_metrics(150), pat_metrics(400))
    assert seen.by_pat and seen.serving
    assert (seen.steps, seen.packed, seen.period) == (300, 150, "the last 2 s")
    assert (seen.read, seen.unpacked, seen.saved) == (200, 1000, pytest.approx(0.8))
    assert seen.token_s == pytest.approx(0.01)
    assert (seen.running, seen.base_forwards) == (4, {"extend": 7})


def test_totals_where_no_step_ran_meanwhile() -> None:
    seen = observed(pat_metrics(100), pat_metrics(100))
    assert (seen.steps, seen.period) == (100, "the time since its start")
    assert seen.token_s == pytest.approx(0.01)


def test_a_server_that_has_not_decoded() -> None:
    seen = observed(pat_metrics(0))
    assert seen.unpacked is None and seen.token_s is None
    assert live.judge(seen, None).word == "unknown"


def test_pat_that_serves_nothing() -> None:
    assert live.judge(observed(pat_metrics(100, serving=0)), None).word == "none"


def test_the_gauges_of_a_stock_server_bound_what_can_be_saved() -> None:
    seen = observed(stock_metrics(0, 0), stock_metrics(10_000, 3000), stock_metrics(20_000, 3000))
    assert not seen.by_pat
    assert (seen.unpacked, seen.read) == (15_000, 3000)
    assert seen.saved == pytest.approx(0.8)
    said = live.text(seen, None)
    assert "at most 80% of the reads can be saved (2 of 3 readings in 2 s)" in said
    assert "60% of the last prompts' tokens were in the cache" in said
    assert "verdict: reads saved: 80% of the K/V reads could go away" in said


def test_readings_of_an_idle_server_do_not_count() -> None:
    idle = "sglang:num_running_reqs 0.0\n"
    assert observed(idle, stock_metrics(10_000, 3000), idle).running == 8
    assert observed(idle, idle).running == 0
    assert observed("sglang:cache_hit_rate 0.5\n").running is None


def test_a_stock_server_that_shares_nothing() -> None:
    seen = observed(stock_metrics(10_000, 10_400))
    assert seen.saved == 0 and live.judge(seen, None).word == "none"
    assert live.judge(observed(stock_metrics(0, 0)), None).word == "unknown"


@pytest.fixture(scope="module")
def model() -> StepModel:
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=256)
    return StepModel(open_model("llama3-8b"), target)


def test_what_is_measured_is_not_modelled(model: StepModel) -> None:
    seen = observed(pat_metrics(100))
    found = live.times(seen, model)
    assert found is not None
    assert (found.packed_s, found.modelled) == (pytest.approx(0.01), "without")
    saved_s = 32 * 800 * 8 * 0.5 * 512 / 4.3e12
    assert found.unpacked_s - found.packed_s == pytest.approx(saved_s)


def test_without_a_measured_time_both_are_modelled(model: StepModel) -> None:
    found = live.times(observed(stock_metrics(1_000_000, 100_000)), model)
    assert found is not None and found.modelled == "both"
    assert found.packed_s > model.rest_s(8) and found.unpacked_s > found.packed_s
    assert live.judge(observed(stock_metrics(1_000_000, 100_000)), found).word == "gain"


def test_a_server_without_metrics() -> None:
    def get(url: str) -> str:
        if url.endswith("/metrics"):
            raise urllib.error.URLError("404")
        return json.dumps(INFO)

    with pytest.raises(InputError, match="start the server with --enable-metrics"):
        observe(URL, 0, get=get)
    with pytest.raises(InputError, match="/metrics is empty"):
        observe(URL, 0, get=answers(""))


def test_no_server() -> None:
    def get(url: str) -> str:
        raise urllib.error.URLError("refused")

    with pytest.raises(InputError, match=r"does not answer .*give the address of a running SGLang"):
        observe(URL, 0, get=get)
    with pytest.raises(InputError, match="--url is 'localhost:30000', must be as"):
        observe("localhost:30000", 0)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(INFO) if self.path.endswith("server_info") else pat_metrics(100)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/"
        listening.shutdown()


def test_the_command_asks_a_server(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh_shell(monkeypatch):
        given = ["estimate", "--url", server, "--seconds", "0"]
        assert cli.main(given) == 0
        said = capsys.readouterr().out
        assert "K/V tokens read a step: 200 instead of 1,000, 80% saved" in said
        assert "for times name the GPU with --gpu" in said
        assert cli.main([*given, "--gpu", "H100", "--model", "llama3-8b"]) == 0
        assert "10.00 ms with pat" in capsys.readouterr().out
        assert cli.main([*given, "--gpu", "H100"]) == 1
        assert "--model is 'MODEL', must be a folder" in capsys.readouterr().err
