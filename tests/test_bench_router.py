# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark behind a router: its rows and table, and its command line."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.common import router
from sglang_pat.bench.common.counters import Counters
from sglang_pat.bench.serving import __main__ as command
from sglang_pat.bench.serving import document
from sglang_pat.bench.serving.client import AnswerTimes
from sglang_pat.bench.serving.fleet import FleetConfig
from sglang_pat.bench.serving.model import open_model
from sglang_pat.bench.serving.options import complete, make_parser
from sglang_pat.bench.serving.routed import POLICIES, _arguments, shuffled
from sglang_pat.bench.serving.router_rows import RouterRow, router_table, row_of
from sglang_pat.bench.serving.sizing import fleet_config
from sglang_pat.bench.serving.workload import Workload
from sglang_pat.demo.model import make_model


def read(*arguments: str) -> argparse.Namespace:
    parser = make_parser("")
    return complete(parser, parser.parse_args(arguments))


def test_the_command_line() -> None:
    found = read("--router")
    assert [str(work) for work in found.router] == ["8*2048x16"]
    assert found.workloads == found.router and found.backends == ["pat", "flashinfer"]
    assert [str(work) for work in read("--router", "2*8x3", "0x4").workloads] == ["2*8x3", "0x4"]
    assert read("--router", "--backends", "pat").backends == ["pat"]
    assert read().backends == ["pat", "fa3", "flashinfer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--router", "--agents"], "--router runs alone"),
        (["--router", "--workloads", "0x4"], "--router runs alone"),
        (["--router", "--capacity"], "--router runs alone"),
        (["--router", "8*x16"], "is not a workload"),
        (["--agents", "--trace", "mooncake"], "--agents runs alone or behind --workloads"),
        (["--agents", "--workloads", "0x4", "--plot", "a.png"], "--plot draws runs of one kind"),
        (["--agents", "--workloads", "0x4", "--capacity"], "leave --workloads out"),
    ],
)
def test_contradictions_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(*arguments)
    assert message in capsys.readouterr().err


def test_workloads_and_agents_share_servers(tmp_path: Path) -> None:
    """The pool and the graphs hold the larger of each."""
    model = open_model("llama3-8b", tmp_path, "bfloat16")
    both = ["--workloads", "8192x128", "0x256", "--agents", "--tp", "2"]
    config = fleet_config(read(*both), model, "bfloat16", [], 79.1)
    agents = 3000 + 4 * 1200 + 64 * (6144 - 4200)
    assert config.max_requests == 256 and config.pool_tokens >= agents
    for alone in (both[:3], [*both[:1], both[2]], both[3:4]):
        one = fleet_config(read(*alone, "--tp", "2"), model, "bfloat16", [], 79.1)
        assert one.pool_tokens <= config.pool_tokens and one.max_requests <= config.max_requests
    assert 3 * config.server_gib < 0.95 * 79.1
    assert command._kinds(read(*both)) == ["workloads", "agents"]
    assert command._path(Path("/tmp/a.json"), "agents") == Path("/tmp/a-agents.json")
    assert command._path(None, "agents") is None


def test_each_server_has_gpus_of_its_own(tmp_path: Path) -> None:
    model = open_model("llama3-8b", tmp_path, "bfloat16")
    one = FleetConfig(model, "cuda", "bfloat16", 1, 1024, 8, 0.9, 3.5, ())
    assert _arguments(one, 1) == ("--weight-version", "1", "--base-gpu-id", "1")
    two = FleetConfig(model, "cuda", "bfloat16", 2, 1024, 8, 0.9, 3.5, ())
    assert _arguments(two, 1)[-1] == "2"
    cpu = FleetConfig(model, "cpu", "float32", 1, 1024, 8, 0.9, 0.0, ())
    assert _arguments(cpu, 1) == ("--weight-version", "1")


def test_the_order_is_random_and_the_same_for_all() -> None:
    order = shuffled(128, "a")
    assert order == shuffled(128, "a") != shuffled(128, "b")
    assert sorted(order) == list(range(128)) != order


def test_counters_of_two_servers_add_up() -> None:
    first = Counters(decode_steps=2, host_seconds=0.5, base_forwards={"extend": 2})
    other = Counters(decode_steps=7, base_forwards={"extend": 1, "idle": 3}, fallbacks={"x": 1})
    assert first + other == Counters(
        decode_steps=9,
        host_seconds=0.5,
        base_forwards={"extend": 3, "idle": 3},
        fallbacks={"x": 1},
    )


def _answer(server: str, cached: int) -> AnswerTimes:
    return AnswerTimes(0.0, [1.0, 2.0, 3.0], [1, 2, 3], cached, server=server)


def test_a_row_says_where_the_requests_of_a_prompt_came_to() -> None:
    workload = Workload.parse("2*50x3")
    served = ["0", "1", "0", "1", "0", "1"]
    row = row_of(
        [_answer(name, cached) for name, cached in zip(served, (50, 0, 50, 50, 0, 0), strict=True)],
        [0, 1, 0, 1, 1, 0],
        backend="pat",
        policy="cache_aware",
        workload=workload,
        run=0,
        prompt_tokens=6 * 60,
        servers=["0", "1"],
    )
    assert row.spread == [[2, 1], [1, 2]] and row.by_server == [3, 3]
    assert row.together == pytest.approx(2 / 3)
    assert row.cached == pytest.approx(150 / 360)
    assert row.itl_p50_ms == 1000 and row.ttft_p50_ms == 1000
    assert row.saved is None


def rows() -> list[RouterRow]:
    common: dict[str, Any] = dict(workload="2*50x4", groups=2, per_group=4, prefix=50, private=0)
    common |= dict(itl_p99_ms=9.0, tpot_ms=5.0, ttft_p50_ms=50.0, ttft_p99_ms=90.0)
    together, apart = [[4, 0], [0, 4]], [[2, 2], [2, 2]]
    ours = dict(decode_steps=9, packed_steps=9, kv_tokens_unpacked=100, kv_saved_bytes=7)
    itl = {
        ("cache_aware", "pat"): 4.0,
        ("cache_aware", "flashinfer"): 8.0,
        ("round_robin", "pat"): 5.0,
        ("round_robin", "flashinfer"): 10.0,
    }
    return [
        RouterRow(
            backend=backend,
            policy=policy,
            run=run,
            itl_p50_ms=value + run,
            tokens_per_s=1000.0,
            cached=0.9,
            spread=together if policy == "cache_aware" else apart,
            **common,
            **(ours | {"kv_tokens_read": 25 if value == 4 else 55} if backend == "pat" else {}),
        )
        for (policy, backend), value in itl.items()
        for run in range(3)
    ]


def test_the_table_compares_backends_and_policies() -> None:
    _, aware, peer, robin, _, *ratios, _ = router_table(rows())
    assert "5.00 (4.00..6.00)" in aware and " 75% " in aware and " 100% " in aware
    assert " 4/4 " in aware and " 50% " in robin and " 45% " in robin
    assert " 75% " not in peer
    assert ratios == [
        "2*50x4: inter-token time, cache_aware, pat / flashinfer: 0.556",
        "2*50x4: inter-token time, round_robin, pat / flashinfer: 0.545",
        "2*50x4: inter-token time, pat, cache_aware / round_robin: 0.833",
        "2*50x4: inter-token time, flashinfer, cache_aware / round_robin: 0.818",
    ]
    assert len(router_table(rows()[:3])) == 3, "nothing to compare with"


def test_documents_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = document.new("router", "a GPU", {"model": "llama3-8b", "tp": 1})
    assert "sglang-router" in written["versions"]
    file = tmp_path / "rows.json"
    journal = document.Journal(written, file, command.Budget(float("inf")))
    for row in rows():
        journal.record(asdict(row))
    assert "2*50x4 round_robin pat: ITL p50 5.00 ms, TPOT" in capsys.readouterr().out
    assert command.main(["--from", str(file)]) == 0
    assert "pat, cache_aware / round_robin: 0.833" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert command.main(["--from", str(file), "--plot", str(tmp_path / "a.png")]) == 2
    assert "no picture of runs behind a router" in capsys.readouterr().err


def test_without_the_router_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", vocab=64)
    monkeypatch.setattr(router, "find_spec", lambda name: None)
    assert command.main(["--device", "cpu", "--model", str(model), "--router"]) == 2
    assert "pip install sglang-router==" in capsys.readouterr().err


def test_the_router_is_the_pinned_one() -> None:
    assert router.PINNED in (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert set(POLICIES) == {"cache_aware", "round_robin"}
