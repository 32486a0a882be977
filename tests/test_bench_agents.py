# SPDX-License-Identifier: Apache-2.0
"""Agents in a closed loop: what they ask, when, and what is made of the answers."""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import document
from benchmarks.serving.agents import (
    DEFAULT_AGENTS,
    NEW_TOKENS,
    OUTPUT_TOKENS,
    Agent,
    AgentsRow,
    Team,
    agents_table,
    make_team,
    row_of,
)
from benchmarks.serving.client import AnswerTimes, RequestError, converse
from benchmarks.serving.options import complete, make_parser
from benchmarks.serving.timing import TooShort, tokens_between


def test_the_default_team_is_the_one_of_the_goals() -> None:
    team = Team.parse(DEFAULT_AGENTS)
    assert (team.system, team.roles, team.role, team.agents) == (3000, 4, 1200, 64)
    assert str(team) == DEFAULT_AGENTS
    assert (NEW_TOKENS, OUTPUT_TOKENS) == ((20, 300), (20, 160))
    assert team.kv_tokens(6144) == 3000 + 4 * 1200 + 64 * (6144 - 4200)
    team.check(4660)
    with pytest.raises(ValueError, match=r"no room for a turn .*--agent-context must be 4660"):
        team.check(4659)


@pytest.mark.parametrize("text", ["", "3000x64", "3000+1200x64", "3000+0*1200x64", "1+1*1x0"])
def test_what_is_no_team_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a team of agents: write SYSTEM"):
        Team.parse(text)


def test_an_agents_context_grows_and_it_ends_when_full() -> None:
    roles = [[1] * 50, [2] * 50]
    agent = Agent(roles, context=700, vocab=100, seed="a")
    seen, last = Counter[int](), list[int]()
    for _ in range(60):
        ended = agent.ended
        prompt, output = agent.next_turn()
        assert OUTPUT_TOKENS[0] <= output <= OUTPUT_TOKENS[1] and len(prompt) + output <= 700
        assert prompt[:50] in roles
        if agent.ended == ended and last:
            assert prompt[: len(last)] == last, "a turn begins with the last one and its answer"
            assert NEW_TOKENS[0] <= len(prompt) - len(last) <= NEW_TOKENS[1]
        elif last:
            assert len(prompt) <= 50 + NEW_TOKENS[1] and agent.ended == ended + 1
            seen[prompt[0]] += 1
        last = [*prompt, *[7] * output]
        agent.answered([7] * output)
    assert agent.ended > 5 and set(seen) == {1, 2}


def test_teams_of_one_seed_ask_the_same() -> None:
    def asked(seed: str) -> list[bytes]:
        team = make_team(
            Team.parse("30+2*10x3"), context=2000, vocab=99, seed=seed, stream_interval=1
        )
        assert [len(level) for level in team.prime] == [1, 2]
        system, roles = team.prime
        assert all(role[:30] == system[0] and len(role) == 40 for role in roles)
        bodies = []
        for _ in range(4):
            for place in range(3):
                bodies.append(team.next_body(place))
                team.answered(place, [5] * 20)
        assert team.prompt_tokens == sum(len(json.loads(one)["input_ids"]) for one in bodies)
        return bodies

    assert asked("a") == asked("a") != asked("b")


class _Parrot(BaseHTTPRequestHandler):
    """Streams three events of two tokens; counts how many requests each client has open."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        place = request["input_ids"][0]
        server: Any = self.server
        server.open[place] += 1
        assert server.open[place] == 1, "a turn was sent before the last was answered"
        self.send_response(500 if server.broken else 200)
        self.end_headers()
        for count in (2, 4, 6):
            event = {"output_ids": [place, count], "meta_info": {"completion_tokens": count}}
            event["meta_info"]["cached_tokens"] = 3
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        server.open[place] -= 1
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def parrot() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Parrot)
    server.open, server.broken = Counter(), False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_clients_wait_for_their_answers(parrot: Any) -> None:
    heard: list[tuple[int, list[int]]] = []

    def talk(seconds: float) -> tuple[list[list[AnswerTimes]], float]:
        return converse(
            parrot.server_port,
            3,
            lambda place: json.dumps({"input_ids": [place]}).encode(),
            lambda place, ids: heard.append((place, ids)),
            duration_s=seconds,
            timeout_s=10.0,
        )

    answers, stopped = talk(0.3)
    assert len(answers) == 3 and all(len(of_client) > 1 for of_client in answers)
    assert {(place, tuple(ids)) for place, ids in heard} == {
        (place, (place, 2, place, 4, place, 6)) for place in range(3)
    }
    for of_client in answers:
        assert all(one.tokens == [2, 4, 6] and one.cached == 3 for one in of_client)
        assert of_client[-1].sent < stopped + 0.5  # begun just before
        ends = [one.times[-1] for one in of_client]
        assert all(one.sent >= end for one, end in zip(of_client[1:], ends, strict=False))
    assert [len(of_client) for of_client in talk(0.0)[0]] == [1, 1, 1]
    parrot.broken = True
    with pytest.raises(RequestError, match="did not answer"):
        talk(0.1)


def answer(sent: float, *events: tuple[float, int]) -> AnswerTimes:
    return AnswerTimes(sent, [at for at, _ in events], [count for _, count in events], 50)


def row(answers: list[list[AnswerTimes]], stopped: float = 10.0) -> AgentsRow:
    about = {"backend": "pat", "agents": "1+1*1x2", "context": 99, "run": 0, "ended": 4}
    return row_of(answers, stopped, 300, **about)


def test_times_count_from_the_last_beginning_to_the_last_turn() -> None:
    # All have begun at 3.0. The first agent's answer before that, and what comes after 10, is out.
    answers = [
        [answer(0.0, (1.0, 1), (2.0, 3)), answer(3.5, (4.0, 1), (6.0, 3), (11.0, 8))],
        [answer(0.5, (3.0, 1), (4.0, 5), (9.0, 7))],
    ]
    found = row(answers)
    assert found.window_s == 7.0 and found.turns == 3 and found.ended == 4
    assert found.cached == 0.5
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == (500.0, 500.0)
    # Intervals of 1,000, 250 and 2,500 ms a token; tokens after 3.0: 1 + 2, and 4 + 2.
    assert found.itl_p50_ms == 1000.0
    assert tokens_between(answers[0], 3.0, 10.0) == 3
    assert found.tokens_per_s == pytest.approx(9 / 7)
    with pytest.raises(TooShort, match=r"began 1\.0 s after the time was up: raise --duration-s"):
        row(answers, stopped=2.0)
    with pytest.raises(TooShort, match="no turn was sent while all agents ran"):
        row([answers[0][:1], answers[1]])


def team_rows() -> list[AgentsRow]:
    times = {"pat": (7.0, 1300.0), "fa3": (11.0, 900.0), "flashinfer": (10.0, 1000.0)}
    counted = {"plans_made": 40, "plan_us": 300.0, "decode_steps": 100, "packed_steps": 90}
    common = dict(agents=DEFAULT_AGENTS, context=6144, window_s=30.0, turns=9, ended=1, cached=0.9)
    common |= dict(ttft_p50_ms=50.0, ttft_p99_ms=90.0, itl_p99_ms=20.0)
    return [
        AgentsRow(
            backend=name,
            run=run,
            itl_p50_ms=itl + run,
            tokens_per_s=rate,
            **common,
            **(counted if name == "pat" else {}),
        )
        for name, (itl, rate) in times.items()
        for run in range(3)
    ]


def test_the_table_compares_with_the_better_of_the_others() -> None:
    lines = agents_table(team_rows(), limits=True)
    assert "8.00 (7.00..9.00)" in lines[1] and " 40 " in lines[1] and "90/100" in lines[1]
    assert lines[-2].endswith("time, pat / flashinfer: 0.727, at most 0.72: MISSED")
    assert lines[-1].endswith("tokens/s, pat / flashinfer: 1.300, at least 1.20: met")
    assert agents_table(team_rows(), limits=False)[-1].endswith("pat / flashinfer: 1.300")
    assert len(agents_table(team_rows()[:3], limits=True)) == 2, "nothing to compare with"


@pytest.mark.parametrize("ours", [True, False])
def test_no_time_between_tokens_is_nothing_to_compare_with(ours: bool) -> None:
    """As where a busy client reads the tokens of a server in heaps."""
    rows = [
        replace(row, itl_p50_ms=0.0 if (row.backend == "pat") == ours else row.itl_p50_ms)
        for row in team_rows()
    ]
    text = "\n".join(agents_table(rows, limits=True))
    assert "inter-token time" not in text and "output tokens/s, pat / " in text


def test_documents_of_agents_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    settings = {"model": "llama3-8b", "tp": 1}
    written = document.new("agents", "a GPU", settings)
    journal = document.Journal(written, tmp_path / "rows.json", command.Budget(float("inf")))
    for each in team_rows():
        journal.record(asdict(each))
    assert "3000+4*1200x64 fa3: ITL p50 11.00 ms, 900 tokens/s" in capsys.readouterr().out
    assert command.main(["--from", str(tmp_path / "rows.json")]) == 0
    assert "at most 0.72: MISSED" in capsys.readouterr().out


def read(*arguments: str) -> argparse.Namespace:
    return complete(make_parser("").parse_args(arguments))


def test_the_command_line() -> None:
    assert read("--agents").agents == [Team.parse(DEFAULT_AGENTS)]
    assert [team.agents for team in read("--agents", "1+1*5x2", "1+1*5x4").agents] == [2, 4]
    assert read("--agents", "10+1*5x2").workloads == []
    assert read().agents is None and len(read().workloads) == 6
    assert len(read("--agents", "10+1*5x2", "--workloads", "0x4").workloads) == 1
