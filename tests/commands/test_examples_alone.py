# SPDX-License-Identifier: Apache-2.0
"""The parts of the programs in ``examples/`` that need no server: what ``launch.sh`` runs, what is
said of savings, and how answers and an agent's tool calls are treated."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai", reason="the examples ask servers through openai, which SGLang brings")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the examples importable, as they import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_a_users_bound_of_the_pool_counts(tmp_path: Path) -> None:
    """Of an argument given twice SGLang takes the last; the script's comes first."""
    stub = tmp_path / "python"
    stub.write_text(
        '#!/bin/sh\ncase "$*" in -c*) echo cpu ;; *smollm2) echo /smollm2 ;; *) echo "$@" ;; esac\n'
    )
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHON", None)

    def launch(*args: str) -> str:
        command = [str(EXAMPLES / "launch.sh"), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    demo = launch("demo", "--max-total-tokens", "99", "--port", "1")
    assert "--model-path /smollm2 --device cpu --attention-backend pat" in demo
    assert launch() == launch("demo")
    assert demo.index("--max-total-tokens 32768") < demo.index("--max-total-tokens 99 --port 1")
    assert "--max-total-tokens" not in launch("a/model", "--port", "1")


class StockServer(BaseHTTPRequestHandler):
    """As far as an example asks it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"sglang:num_running_reqs 0.0\n")


@pytest.mark.parametrize(
    ("handler", "why"),  # the first answers 501
    [
        (BaseHTTPRequestHandler, ".*/metrics answers 501; .*--enable-metrics"),
        (StockServer, "this server has no counters of pat; .*--attention-backend pat"),
    ],
)
def test_a_server_without_metrics_or_pat_and_no_server_are_named(
    handler: type, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from saved import savings

    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with savings(f"http://127.0.0.1:{server.server_port}"):
            print("asking")
        server.shutdown()
    assert re.search(
        rf"^asking\n\nWhat was saved: unknown, {why}\n  seconds in all +\d+\.\d\n$",
        capsys.readouterr().out,
    )
    said = r"^no server at http://127.0.0.1:1 \("
    with pytest.raises(SystemExit, match=said), savings("http://127.0.0.1:1"):
        pass


def test_the_answer_voted_on_is_the_one_stated() -> None:
    from self_consistency import final_answer, sample, verdict

    assert final_answer("2 x 3 are 6. The answer is 6. Then there are 7 left.") == "6"
    assert final_answer("The answer is **32,400**.") == "32400"
    assert final_answer("So it is -1.5 or 2.") == "2"
    assert final_answer("I do not know.") is None
    assert verdict(["7", None, "6", "6", None, None]) == ("6", 2)
    assert verdict([None, None]) == (None, 0)

    def answer(request: dict[str, Any]) -> Any:
        assert request["temperature"] > 0, "samples that are all alike have nothing to vote on"
        texts = [f"The answer is {number}." for number in range(request["n"])]
        return answers(*(SimpleNamespace(content=text) for text in texts))

    found = asyncio.run(sample(client_of(answer), "m", "How many?", 3, 8))
    assert found == ["0", "1", "2"]


def client_of(answer: Any) -> Any:
    """An OpenAI client whose chat completions are what ``answer`` makes of a request."""

    async def create(**request: Any) -> Any:
        return answer(request)

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def answers(*messages: Any) -> Any:
    return SimpleNamespace(choices=[SimpleNamespace(message=each) for each in messages])


def test_a_question_comes_behind_its_document() -> None:
    from shared_documents import QUESTIONS, interview

    def answer(request: dict[str, Any]) -> Any:
        return answers(SimpleNamespace(content=request["messages"][-1]["content"]))

    options = SimpleNamespace(model="m", max_tokens=8)
    found = asyncio.run(interview(client_of(answer), options, "a document"))
    assert found == [f"a document\n\nQuestion: {question}" for question in QUESTIONS]


def test_an_agent_calls_tools_until_it_answers() -> None:
    from agent_team import ROUNDS, TOOLS, Team
    from openai.types.chat import ChatCompletionMessageToolCall

    calls = [
        ChatCompletionMessageToolCall(
            id=tool, type="function", function={"name": tool, "arguments": given}
        )
        for tool, given in (
            ("read_file", '{"name": "a.py"}'),
            ("search", '{"text": "two"}'),
            ("read_file", '{"name": "../secret"}'),
            ("read_file", "not JSON"),
            ("search", "[]"),
            ("delete_file", "{}"),
        )
    ]
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Any:
        asked.append(request)
        ends = len(request["messages"]) > 2 and request["messages"][0]["content"] != "stubborn"
        text, called = ("done", None) if ends else (None, calls)
        return answers(SimpleNamespace(content=text, tool_calls=called))

    team = Team(client_of(answer), "m", 8, {"a.py": "one\ntwo\n", "b.py": "two + two\n"})
    talk = asyncio.run(team.work([{"role": "system", "content": "rules"}], "task"))
    assert [request["tools"] for request in asked] == [TOOLS, TOOLS]
    roles = [message["role"] for message in talk]
    assert roles == ["system", "user", "assistant", *["tool"] * 6, "assistant"]
    found = [message["content"] for message in talk if message["role"] == "tool"]
    assert found[:2] == ["one\ntwo\n", "a.py: two\nb.py: two + two"]
    assert all(result.startswith("error: ") for result in found[2:])
    assert talk[-1]["content"] == "done"
    asked.clear()
    endless = asyncio.run(team.work([{"role": "system", "content": "stubborn"}], "task"))
    assert len(asked) == ROUNDS
    assert endless[-1] == {"role": "assistant", "content": "I came to no result."}


def delta(text: str = "", *calls: tuple[int, str, str, str]) -> Any:
    """A piece of a streamed answer; of a call its index, id, name and arguments."""
    pieces = [
        SimpleNamespace(
            index=index, id=name, function=SimpleNamespace(name=tool or None, arguments=given)
        )
        for index, name, tool, given in calls
    ]
    return SimpleNamespace(content=text or None, tool_calls=pieces or None)


def test_a_support_conversation_sends_all_results_in_one_turn() -> None:
    from support_desk import RULES, TOOLS, Desk

    asked: list[dict[str, Any]] = []
    streamed: list[Any] = []

    async def chunks() -> Any:
        for each in streamed:
            yield SimpleNamespace(choices=[SimpleNamespace(delta=each)])
        yield SimpleNamespace(choices=[])  # the usage comes without a choice

    def answer(request: dict[str, Any]) -> Any:
        asked.append(request)
        texts = ["a longer draft", " ", "short", None]
        return (
            chunks()
            if "stream" in request
            else answers(*(SimpleNamespace(content=t) for t in texts))
        )

    desk = Desk(client_of(answer), "m", 8, 4, timestamp_first=False)
    assert asyncio.run(desk.serve(1)) == "short"
    streamed += [  # parallel calls in pieces; max_tokens cuts off the third
        delta("I look "),
        delta("", (1, "b", "sell", "{")),
        delta("", (0, "a", "order", '{"num'), (1, "", "", "}")),
        delta("", (0, "", "", 'ber": "7"}'), (2, "c", "policy", '{"subj')),
    ]
    assert asyncio.run(desk.serve(2)) == "short" and desk.called == 1
    assert [request.get("n", 1) for request in asked] == [1, 4, 1, 4]
    assert all(request["tools"] == TOOLS for request in asked)
    assert not any("tool_choice" in request for request in asked), "none would hide the tools"
    for before, after in (asked[0:2], asked[2:4]):
        assert before["messages"] == after["messages"][:2]
        said, *results = after["messages"][2:]
        assert said["role"] == "assistant" and len(results) > 1
        assert [call["id"] for call in said["tool_calls"]] == [r["tool_call_id"] for r in results]
        assert {result["role"] for result in results} == {"tool"}
    assert asked[1]["messages"][2]["content"] is None
    said, *results = asked[3]["messages"][2:]
    assert said["content"] == "I look "
    assert said["tool_calls"][0]["function"] == {"name": "order", "arguments": '{"number": "7"}'}
    assert [result["content"] for result in results] == [
        "on its way since Thursday",
        "error: there is no tool sell",
    ]
    assert all(request["messages"][0]["content"] == RULES for request in asked)
    late = Desk(client_of(answer), "m", 8, 4, timestamp_first=True).begin("Where?")
    assert late[0]["content"].startswith("Current time: 2") and late[1]["content"] == "Where?"
