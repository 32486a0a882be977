# SPDX-License-Identifier: Apache-2.0
"""Capacities: what of a probe counts, the flow of a search on made-up servers, and its report."""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.serving import __main__ as command
from sglang_pat.bench.serving import curves, document
from sglang_pat.bench.serving.agents import Team
from sglang_pat.bench.serving.capacity import AgentsSubject, TraceSubject, run_capacity
from sglang_pat.bench.serving.capacity_report import Capacity, capacity_table, draw_capacity, ratio
from sglang_pat.bench.serving.client import AnswerTimes, RequestError, converse, parse, stream
from sglang_pat.bench.serving.fleet import FleetConfig
from sglang_pat.bench.serving.model import open_model
from sglang_pat.bench.serving.options import complete, make_parser
from sglang_pat.bench.serving.probe import CapacityRow, broken, row_of
from sglang_pat.bench.serving.run import RunOptions
from sglang_pat.bench.serving.search import Bracket
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


class _Endless(BaseHTTPRequestHandler):
    """Answers with a token every 20 ms, or not at all, until the client goes."""

    def do_POST(self) -> None:
        server: Any = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        if server.silent:
            server.closed.wait(10)
            return
        self.send_response(200)
        self.end_headers()
        tokens = 0
        try:
            while not server.closed.is_set():
                tokens += 1
                meta = {"completion_tokens": tokens, "cached_tokens": 0}
                event = {"output_ids": [tokens], "meta_info": meta}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                time.sleep(0.02)
        except OSError:
            server.left += 1

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    server.silent, server.left, server.closed = False, 0, threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.closed.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_has_not_ended_is_cut_off(endless: Any) -> None:
    began = time.perf_counter()
    answers = stream(endless.server_port, [b"{}"] * 2, at_s=[0.0, 0.2], cut_s=0.5, timeout_s=30.0)
    assert 0.5 <= time.perf_counter() - began < 10
    for one in answers:
        assert not one.whole and one.times[-1] <= began + 10 and one.tokens[0] == 1
    heard: list[int] = []
    found, until = converse(
        endless.server_port,
        2,
        lambda place: b"{}",
        lambda place, ids: heard.append(len(ids)),
        duration_s=0.3,
        timeout_s=30.0,
        cut=True,
    )
    assert [len(of_client) for of_client in found] == [1, 1] and len(heard) == 2
    assert all(not one.whole and one.times[0] < until + 5 for (one,) in found)
    endless.silent = True
    (silent,) = stream(endless.server_port, [b"{}"], at_s=[0.0], cut_s=0.2, timeout_s=30.0)
    assert silent.times == silent.tokens == [] and not silent.whole


def test_what_was_cut_off_may_lack_its_end_but_not_be_refused() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert parse(0.5, [], [], whole=False) == AnswerTimes(0.5, [], [], 0, whole=False)
    assert parse(0.5, [1.0], [head], whole=False).times == []
    with pytest.raises(RequestError, match="busy"):
        parse(0.5, [1.0], [b"HTTP/1.1 503 Unavailable\r\n\r\nbusy"], whole=False)


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
        (["--agents", "--limits-ms", "25"], "--limits-ms are those of --capacity"),
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
