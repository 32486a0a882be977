# SPDX-License-Identifier: Apache-2.0
"""Capacities: what of a probe counts, and the flow of a search on made-up servers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.serving import document
from sglang_pat.bench.serving.agents import Team
from sglang_pat.bench.serving.capacity import AgentsSubject, TraceSubject, run_capacity
from sglang_pat.bench.serving.capacity_report import Capacity, capacity_table
from sglang_pat.bench.serving.client import AnswerTimes
from sglang_pat.bench.serving.fleet import FleetConfig
from sglang_pat.bench.serving.model import open_model
from sglang_pat.bench.serving.options import complete, make_parser
from sglang_pat.bench.serving.probe import CapacityRow, broken, row_of
from sglang_pat.bench.serving.run import RunOptions
from sglang_pat.bench.serving.sizing import fleet_config, most_agents

TEAM = Team.parse("30+2*10x4")
SETTINGS = RunOptions(
    vocab=99, kv_bytes_per_token=1, new_tokens=1, output_tokens=100, stream_interval=1, runs=1,
    seed=0, duration_s=10.0, context=4000, block_tokens=512, trace_file=None,
)  # fmt: skip


def answer(sent: float, first: float, last: float, tokens: int = 11) -> AnswerTimes:
    return AnswerTimes(sent, [first, last], [1, tokens], 0)


ABOUT: dict[str, Any] = {"backend": "pat", "subject": "s", "unit": "agents", "load": 4, "probe": 0}


def test_a_probe_breaks_a_limit_by_tpot_or_by_its_queue() -> None:
    # 20 ms a token each, all within the window.
    answers = [answer(at, at + 0.1, at + 0.3) for at in range(1, 9)]
    row = row_of(answers, 0.0, 10.0, grace_s=None, **ABOUT)
    assert row.requests == 8 and row.begun == 1.0 and row.ended is None and row.window_s == 10.0
    assert row.tpot_ms == pytest.approx(20) and row.tpot_p99_ms == pytest.approx(20)
    assert row.ttft_mean_ms == pytest.approx(100) and row.e2e_p99_ms == pytest.approx(300)
    assert row.tokens_per_s == pytest.approx(8.8)
    assert broken(row, 20.1) is None and broken(row, 19.9) == "p99 TPOT 20.0 ms"
    # Two of ten wait for their first token when the window closes.
    late = [answer(9.0, 10.5, 10.7), answer(9.5, 10.5, 10.7)]
    row = row_of([*answers, *late], 0.0, 10.0, grace_s=1.0, **ABOUT)
    assert row.tpot_p99_ms == pytest.approx(20) and row.ended == 1.0
    assert broken(row, 50.0) == "only 80% had begun"
    # Who was sent in the last half second may wait.
    early = [*answers, answer(9.4, 9.5, 9.7), answer(9.6, 10.5, 10.7)]
    assert broken(row_of(early, 0.0, 10.0, grace_s=1.0, **ABOUT), 50.0) is None
    # They had begun, but two never ended; as far as they came they were no slower.
    stuck = [replace(answer(9.0, 9.1, 9.5, tokens), whole=False) for tokens in (21, 19)]
    row = row_of([*answers, *stuck], 0.0, 10.0, grace_s=1.0, **ABOUT)
    assert row.requests == 9, "of 19 tokens too little is known"
    assert row.tpot_p99_ms == pytest.approx(20)
    assert broken(row, 50.0) == "only 80% ended in time"
    # Agents' last answers are cut off in any case.
    assert broken(row_of([*answers, *stuck], 0.0, 10.0, grace_s=None, **ABOUT), 50.0) is None
    # All were there so late that of nobody it is known whether it would have waited.
    row = row_of(answers, 7.9, 8.3, grace_s=None, **ABOUT)
    assert broken(row, 50.0) == "the load was there for the last 0.40 s only"
    # Nothing was both sent and answered within the window: the load was never there.
    row = row_of(answers, 10.0, 10.0, grace_s=None, **ABOUT)
    assert row.tpot_p99_ms is None and row.tokens_per_s == 0
    assert broken(row, math.inf) == "no request was sent, began and came far enough in time"


class MadeUp:
    """A server whose time per token is ``tpot_ms(load)``; by a clock of its own."""

    def __init__(self, backend: str, tpot_ms: Callable[[float], float]) -> None:
        self.backend, self._tpot_ms = backend, tpot_ms
        self.did: list[str] = []
        self.asked: list[tuple[bytes, ...]] = []

    def flush(self) -> None:
        self.did.append("flush")

    def prime(self, prompts: list[list[int]]) -> None:
        self.did.append(f"prime {len(prompts)}")

    def counted(self) -> None:
        return None

    def converse(
        self,
        places: int,
        next_body: Callable[[int], bytes],
        answered: Callable[[int, list[int]], None],
        *,
        duration_s: float,
        timeout_s: float,
        cut: bool,
    ) -> tuple[list[list[AnswerTimes]], float]:
        assert cut and timeout_s > 0
        self.did.append(f"converse {places}")
        self.asked.append(tuple(next_body(place) for place in range(places)))
        lasts = self._tpot_ms(places) / 1e3 * 10
        starts = [at * lasts for at in range(int(duration_s / lasts))]
        return [[answer(at, at, at + lasts) for at in starts] for _ in range(places)], duration_s

    def stream(
        self, bodies: list[bytes], *, at_s: list[float], cut_s: float = 0.0, timeout_s: float
    ) -> list[AnswerTimes]:
        self.did.append(f"stream {len(bodies)}")
        self.asked.append(tuple(bodies))
        lasts = self._tpot_ms(len(bodies) / SETTINGS.duration_s) / 1e3 * 10
        return [answer(at, at, at + lasts) for at in at_s or [0.0] * len(bodies)]


def searched(subject: Any, fleet: list[MadeUp], budget: Budget, limits: list[float]) -> Any:
    """The document that a search wrote."""
    written = document.new("capacity", "a GPU", {"model": "llama3-8b", "tp": 1})
    written["settings"] |= {"limits_ms": limits, "resolution": subject.resolution}
    journal = document.Journal(written, None, budget)
    run_capacity(fleet, [subject], limits, SETTINGS, budget, journal)  # type: ignore[arg-type]
    return written


AGENTS = AgentsSubject(TEAM, 1000, 64, 0.12, SETTINGS)


@pytest.fixture
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up streams all at once, which the tests of clients have."""
    monkeypatch.setattr(AgentsSubject, "warm_up", lambda *_: None)
    monkeypatch.setattr(TraceSubject, "warm_up", lambda *_: None)


def test_agents_are_searched_side_by_side_from_equal_caches(
    no_warm_up: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = [MadeUp("pat", lambda load: load), MadeUp("fa3", lambda load: 2 * load)]
    written = searched(AGENTS, fleet, Budget(math.inf), [50.0, 25.0])
    rows = [CapacityRow(**row) for row in written["rows"]]
    # Another backend begins at every load, and each empties and fills its cache for every probe.
    assert [(row.load, row.backend) for row in rows[:5]] == [
        *((4, "pat"), (4, "fa3"), (8, "fa3"), (8, "pat"), (16, "pat"))
    ]
    for served in fleet:
        steps = [served.did[at : at + 4] for at in range(0, len(served.did), 4)]
        assert all(step[:3] == ["flush", "prime 1", "prime 2"] for step in steps)
        assert all(step[3].startswith("converse") for step in steps)
    both = {len(bodies): bodies for bodies in fleet[0].asked}
    for bodies in fleet[1].asked:
        assert bodies == both.get(len(bodies), bodies), "all are asked the same"
    four, eight = both[4], both[8]
    assert not set(four) & set(eight[:4]), "no load finds the tokens of another in the cache"
    assert max(row.load for row in rows if row.backend == "fa3") == 32
    shown = capacity_table(rows, [25.0, 50.0], 0.12)
    assert "30+2*10: the most agents with p99 TPOT under a limit, to 12%" in shown
    found = {tuple(line.split()[:2]): line for line in shown if line[:1] == " "}
    # 25 ms are broken by 25 agents of pat and 13 of fa3, 50 ms by 50 and 25.
    capacities = {
        key: int(line.split()[2]) for key, line in found.items() if key[0] in ("25", "50")
    }
    assert capacities == {
        **{("25", "pat"): 23, ("25", "fa3"): 12, ("50", "pat"): 49, ("50", "fa3"): 23}
    }
    assert f"{23 / 12:.2f}  25: p99 TPOT 25.0 ms" in found["25", "pat"]
    assert "p99 TPOT" in found["25", "fa3"]
    document.show([written])
    out = capsys.readouterr().out
    assert "30+2*10, 4 agents, pat: TPOT p99 4.00 ms of" in out
    assert "30+2*10: TPOT p99, ms" in out and "the most agents with" in out


def test_a_trace_is_searched_by_its_rate(no_warm_up: None) -> None:
    subject = TraceSubject("conversation", 4.0, None, 5.0, 0.12, SETTINGS)
    fleet = [MadeUp("pat", lambda load: 2 * load), MadeUp("fa3", lambda load: 4 * load)]
    rows = [CapacityRow(**r) for r in searched(subject, fleet, Budget(math.inf), [25.0])["rows"]]
    for backend, true in (("pat", 12.5), ("fa3", 6.25)):
        mine = [row for row in rows if row.backend == backend]
        capacity = Capacity.of(mine, 25.0, 0.12)
        # Arrivals are random, so the rate that came is not quite the one asked for.
        assert capacity.found and capacity.ends.held == pytest.approx(true, rel=0.4)
        assert {(row.unit, row.ended) for row in mine} == {("requests/s", 1.0)}
    assert fleet[0].did[::2] == ["flush"] * (len(fleet[0].did) // 2)
    # 200 prompts in 10 s are at most 14.3 requests/s that surely have enough.
    assert replace(subject, prompts=200).ladder.most == pytest.approx((200 - 4 * 200**0.5) / 10)
    with pytest.raises(ValueError, match="begin at a load of 4: it must lie between"):
        _ = replace(subject, prompts=30).ladder


def test_no_probe_starts_that_would_not_end(
    no_warm_up: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Slow(MadeUp):
        def converse(self, *args: Any, **more: Any) -> Any:
            now[0] += 11.0
            return super().converse(*args, **more)

    fleet: list[MadeUp] = [Slow("pat", lambda load: load), Slow("fa3", lambda load: 2 * load)]
    # A probe takes 11 s and is expected to take 12, so the eighth, at 77 s, would not end.
    budget = Budget(88.5)
    written = searched(AGENTS, fleet, budget, [25.0, 50.0])
    assert len(written["rows"]) == 7 and budget.spent_out and now[0] == 77
    document.show([written])
    out = capsys.readouterr().out
    # The last load, 32, was fa3's alone.
    assert "at least 8, at most 16" in out and "at least 16, at most 32" in out
    assert "at least 16   " in out
    assert searched(AGENTS, fleet, Budget(now[0] + 11.5), [25.0])["rows"] == []


def read(*arguments: str) -> argparse.Namespace:
    parser = make_parser("")
    return complete(parser, parser.parse_args(arguments))


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = read("--capacity", "--agents", "10+1*5x2")
    assert found.limits_ms == [25, 50] and found.duration_s == 15 and found.resolution == 0.12
    assert read("--capacity", "--trace", "conversation").rates == [8]
    assert read("--capacity", "--agents", "--limits-ms", "40", "30").limits_ms == [30, 40]
    assert read("--trace", "conversation").rates == [2, 4, 8] and read().duration_s == 30
    for arguments, message in (
        (["--capacity"], "add --agents [SPEC] or --trace NAME"),
        (["--capacity", "--trace", "toolagent", "--rates", "1", "2"], "the one to begin with"),
        (["--agents", "--limits-ms", "25"], "those of --capacity: add it"),
        (["--agents", "--resolution", "0.1"], "those of --capacity: add it"),
        (["--trace", "toolagent", "--rates", "0"], "'0' is not a number above 0"),
        (["--capacity", "--agents", "--limits-ms", "0"], "'0' is not a number above 0"),
    ):
        with pytest.raises(SystemExit):
            read(*arguments)
        assert message in capsys.readouterr().err


def test_servers_hold_the_most_agents_that_memory_allows(tmp_path: Path) -> None:
    model = open_model("llama3-8b", tmp_path, "bfloat16")
    options = read("--capacity", "--agents", "--backends", "pat", "fa3", "--max-requests", "96")
    config = fleet_config(options, model, "bfloat16", [], gpu_gib=139.8)
    (team,) = options.agents
    assert config.max_requests == 96
    assert config.pool_tokens >= replace(team, agents=96).kv_tokens(6144)
    assert most_agents(config, team, 6144) == 96
    options.max_requests = 1000
    config = fleet_config(options, model, "bfloat16", [], gpu_gib=139.8)
    most = most_agents(config, team, 6144)
    assert 96 < most < 1000, "two servers share the GPU"
    assert replace(team, agents=most).kv_tokens(6144) <= config.pool_tokens
    small: FleetConfig = replace(config, pool_tokens=20_000)
    with pytest.raises(ValueError, match=r"begins with 64 agents, but .* 20000 K/V tokens run"):
        most_agents(small, team, 6144)
    traces = read("--capacity", "--trace", "conversation", "--context", "4000")
    config = fleet_config(traces, model, "bfloat16", [], gpu_gib=None)
    assert config.pool_tokens == pytest.approx(256 * 4000, abs=256) and config.max_requests == 256
