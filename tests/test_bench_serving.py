# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark: its notation and arithmetic, and its command line against two servers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.budget import Budget
from benchmarks.serving import __main__ as command
from benchmarks.serving import document
from benchmarks.serving.client import AnswerTimes, RequestError, parse
from benchmarks.serving.fleet import FleetConfig
from benchmarks.serving.model import open_model
from benchmarks.serving.rows import (
    Spread,
    WorkloadRow,
    counted_fields,
    ratio,
    table,
    warnings,
)
from benchmarks.serving.run import rotated
from benchmarks.serving.timing import (
    TooShort,
    intervals_ms,
    latencies,
    step_ms,
    window,
)
from benchmarks.serving.workload import DEFAULT_WORKLOADS, LIMITS, Workload, make_prompts
from sglang_pat.demo.counters import Counters
from sglang_pat.demo.model import make_model


@pytest.mark.parametrize(
    ("spec", "expected", "requests", "kv_tokens"),
    [
        ("8192x128", Workload(1, 8192, 0, 128), 128, 8192 + 128 * 384),
        ("8*2048x16", Workload(8, 2048, 0, 16), 128, 8 * 2048 + 128 * 384),
        ("1024+512x256", Workload(1, 1024, 512, 256), 256, 1024 + 256 * (512 + 384)),
        ("0x64", Workload(1, 0, 0, 64), 64, 64 * 384),
    ],
)
def test_workloads_are_read_and_sized(
    spec: str, expected: Workload, requests: int, kv_tokens: int
) -> None:
    workload = Workload.parse(spec)
    assert workload == expected
    assert str(workload) == spec
    assert workload.requests == requests
    assert workload.kv_tokens(new=128, output=256) == kv_tokens


@pytest.mark.parametrize("text", ["8192", "x4", "4x", "2*x4", "1024+x4", "8x0", "0*8x4", "-1x4"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a workload: write|has no requests"):
        Workload.parse(text)


def test_only_declared_prefixes_are_shared() -> None:
    workload = Workload.parse("2*50+20x3")
    batch = make_prompts(workload, new=10, vocab=1000, seed="a")
    assert batch == make_prompts(workload, new=10, vocab=1000, seed="a")
    prefixes, cached = batch.prime
    assert [len(prompt) for prompt in prefixes] == [50, 50] and prefixes[0] != prefixes[1]
    assert [prompt[:50] for prompt in batch.prompts] == [prefixes[i // 3] for i in range(6)]
    assert [prompt[:70] for prompt in batch.prompts] == cached
    assert len({tuple(prompt[50:70]) for prompt in batch.prompts}) == 6
    assert {len(prompt) for prompt in batch.prompts} == {80}
    other = make_prompts(workload, new=10, vocab=1000, seed="b")
    assert not any(map(list.__eq__, batch.prompts, other.prompts))
    assert other.prime[0] != prefixes
    assert make_prompts(Workload.parse("0x3"), new=10, vocab=1000, seed="a").prime == []


# Two requests, two tokens an event. All decode from 3.0, the second's first event, to 7.0, when
# the first ends; inside lie 3.0 to 5.0 and 5.0 to 7.0 of the first, 3.0 to 6.0 of the second.
TIMELINES = [
    AnswerTimes(sent=0.0, times=[1.0, 3.0, 5.0, 7.0], tokens=[1, 3, 5, 7], cached=4),
    AnswerTimes(sent=0.5, times=[3.0, 6.0, 8.0, 9.5], tokens=[1, 3, 5, 7], cached=4),
]


def test_inter_token_time_counts_only_while_all_decode() -> None:
    assert window(TIMELINES) == (3.0, 7.0)
    assert intervals_ms(TIMELINES, *window(TIMELINES)) == [1000, 1000, 1500]
    assert intervals_ms(TIMELINES) == [1000, 1000, 1000, 1500, 1000, 750]
    found = latencies(TIMELINES)
    assert found.itl_p50_ms == 1000
    assert found.itl_p99_ms == pytest.approx(1490)  # linear between 1,000 and 1,500
    # Six seconds for six tokens, 6.5 for six.
    assert found.tpot_ms == pytest.approx((1000 + 6500 / 6) / 2)
    assert found.ttft_ms == pytest.approx((1000 + 2500) / 2)
    assert found.tokens_per_s == pytest.approx(14 / 9.5)


def test_requests_that_never_decode_together_are_an_error() -> None:
    late = replace(TIMELINES[1], times=[8.0, 9.0, 10.0, 11.0])
    with pytest.raises(TooShort, match="1000 ms before the last begins; ask for more output"):
        latencies([TIMELINES[0], late])


def test_engine_steps_are_those_of_this_run_without_the_first() -> None:
    before = {"4": [0.9]}
    after = {"4": [0.9, 0.5, 0.010, 0.011, 0.030], "3": [0.7]}
    assert step_ms(before, after, 4) == pytest.approx(11)
    assert step_ms(after, after, 4) is None
    assert step_ms({}, {}, 4) is None


def _event(tokens: int) -> bytes:
    meta = b'{"finish_reason":null,"completion_tokens":%d,"cached_tokens":7}' % tokens
    data = b'data: {"output_ids":[1],"meta_info":%s}\n\n' % meta
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_an_event_has_arrived_with_its_last_byte() -> None:
    head, done = b"HTTP/1.1 200 OK\r\n\r\n", b"data: [DONE]\n\n"
    parts = [head + _event(1), _event(3)[:30], _event(3)[30:] + _event(5), done]
    line = parse(0.25, [1.0, 2.0, 3.0, 4.0], parts)
    assert line == AnswerTimes(sent=0.25, times=[1.0, 3.0, 3.0], tokens=[1, 3, 5], cached=7)
    with pytest.raises(RequestError, match="whole stream"):
        parse(0.0, [1.0, 2.0], parts[:2])  # broken off
    with pytest.raises(RequestError, match="too long"):
        parse(0.0, [1.0], [b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":"too long"}'])
    aborted = _event(3).replace(b"null", b'{"type":"abort"}')
    with pytest.raises(RequestError, match="whole stream"):
        parse(0.0, [1.0, 2.0, 3.0], [head, aborted, done])


def _row(
    backend: str, run: int, itl: float, workload: str = "8192x128", **more: Any
) -> WorkloadRow:
    shape = asdict(Workload.parse(workload))
    times = {"itl_p99_ms": 2 * itl, "tpot_ms": itl + 1, "ttft_ms": 50.0, "step_ms": itl}
    fields = {**shape, **times, "tokens_per_s": 1.0, "cached_tokens": shape["prefix"], **more}
    return WorkloadRow(backend=backend, workload=workload, run=run, itl_p50_ms=itl, **fields)


ROWS = [
    *(_row("pat", run, itl) for run, itl in enumerate((9.0, 8.0, 30.0))),
    *(_row("fa3", run, itl) for run, itl in enumerate((27.0, 26.0, 28.0))),
    *(_row("flashinfer", run, itl, ttft_ms=10.0) for run, itl in enumerate((22.0, 24.0, 22.5))),
]


def test_medians_and_their_ratio_to_the_better_of_the_others() -> None:
    assert Spread.of([9.0, 8.0, 30.0]) == Spread(9.0, 8.0, 30.0)
    assert Spread.of([None]) is None
    assert ratio(ROWS, "8192x128", "itl_p50_ms") == 9.0 / 22.5
    assert ratio(ROWS, "8192x128", "ttft_ms", base="fa3") == 1.0
    assert ratio(ROWS[:3], "8192x128", "itl_p50_ms") is None
    at_once = [row if row.backend == "pat" else replace(row, itl_p50_ms=0.0) for row in ROWS]
    assert ratio(at_once, "8192x128", "itl_p50_ms") is None
    shown = "\n".join(table(ROWS, LIMITS[1]))
    assert "9.00 (8.00..30.00)" in shown
    assert "0.400   0.40" in shown and "met" in shown and "TTFT/fa3" in shown
    slower = [_row("pat", 0, 9.1), *ROWS[3:]]
    assert "MISSED" in "\n".join(table(slower, LIMITS[1]))
    two_gpus = "\n".join(table(slower, LIMITS[2]))
    assert "0.404   0.55" in two_gpus and "met" in two_gpus
    assert "met" not in "\n".join(table(ROWS, {}))
    assert warnings(ROWS) == []


def test_warnings_name_a_slow_client_and_a_cold_cache() -> None:
    rows = [_row("pat", 0, 9.0, step_ms=8.0), _row("fa3", 0, 9.0, cached_tokens=17)]
    slow, cold = warnings(rows)
    assert "8192x128 pat" in slow and "1.12 times" in slow and "--stream-interval" in slow
    assert "8192x128 fa3" in cold and "17 of 8192" in cold


def test_saved_bytes_are_those_of_all_layers_and_heads() -> None:
    counted = Counters(
        decode_steps=10, kv_tokens_read=100, kv_tokens_unpacked=700, plans_made=2,
        plan_seconds=1e-3, host_seconds=2e-3,
    )  # fmt: skip
    fields = counted_fields(counted, kv_bytes_per_token=128)
    assert fields["kv_saved_bytes"] == 600 * 128
    assert fields["plan_us"] == pytest.approx(500)
    assert fields["reuse_us"] == pytest.approx(125)


def test_turns_rotate_and_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: list[Any] = ["a", "b", "c"]
    assert [rotated(fleet, run)[0] for run in range(4)] == ["a", "b", "c", "a"]
    monkeypatch.setattr("time.monotonic", lambda: 90.0)
    budget = Budget(deadline=100.0)
    budget.took("long", 11.0)
    budget.took("short", 5.0)
    assert budget.allows("short") and not budget.spent_out
    assert not budget.allows("long") and budget.spent_out
    assert not budget.allows("short")  # once spent out, nothing starts any more


def test_servers_that_do_not_fit_are_refused_with_what_does(tmp_path: Path) -> None:
    model = open_model("llama3-8b", tmp_path, "bfloat16")
    assert model.weight_bytes == pytest.approx(16.06e9, rel=0.001)  # 8.03 billion parameters
    assert model.kv_bytes_per_token == 128 * 1024
    # 16.06 GB are 14.96 GiB; 8192 tokens are one GiB of K/V.
    config = FleetConfig(model, "cuda", "bfloat16", 1, 8 * 8192, 128, 0.9, 3.5, ())
    assert config.server_gib == pytest.approx(14.957 + 8 + 3.5, abs=0.01)
    config.check_memory(["pat", "fa3", "flashinfer"], 139.8)
    large = replace(config, pool_tokens=32 * 8192)
    with pytest.raises(ValueError, match=r"3 servers of 50\.5 GiB.*2 of the --backends") as error:
        large.check_memory(["pat", "fa3", "flashinfer"], 139.8)
    # 0.9 * 139.8 / 3 - 3.5 - 14.957 GiB
    fits = config.largest_pool(3, 139.8)
    assert fits == pytest.approx((41.94 - 18.457) * 8192, rel=1e-3)
    assert f"at most {fits} K/V tokens" in str(error.value)
    replace(large, tp=2).check_memory(["pat", "fa3", "flashinfer"], 139.8)


def test_the_command_refuses_before_any_server_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = str(make_model(tmp_path / "model", max_positions=100))
    here = ["--device", "cpu", "--model", model]
    for arguments, message in (
        ([*here, "--workloads", "64x2"], "448 tokens is longer than the 100 positions"),
        (["--device", "cpu", "--model", "nothing"], "neither a folder with a config.json nor"),
    ):
        assert command.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_results_are_shown_again_and_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, rows in (("a", ROWS[:3]), ("b", ROWS[3:])):
        settings = {"model": "llama3-8b", "tp": 1, "new_tokens": 128, "output_tokens": 256}
        written = document.new("workloads", "a GPU", settings)
        written["rows"] = [asdict(row) for row in rows]
        files.append(tmp_path / name)
        document.write(written, files[-1])
    assert command.main(["--from", *map(str, files)]) == 0
    assert "0.400   0.40" in capsys.readouterr().out


def test_results_of_the_kernels_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    made_by = "python -m benchmarks.kernel --json FILE"
    file.write_text(json.dumps({"kind": "trees", "command": made_by, "settings": {}, "rows": []}))
    assert command.main(["--from", str(file)]) == 2
    said = capsys.readouterr().err
    assert "rows of kind 'trees'" in said and f"benchmarks.kernel --from {file}" in said


def test_the_default_workloads_are_those_of_the_goals() -> None:
    assert [str(Workload.parse(spec)) for spec in DEFAULT_WORKLOADS] == [
        *("8192x128", "4096x64", "8*2048x16", "1024+512x256", "0x64", "0x256")
    ]
