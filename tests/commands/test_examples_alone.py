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


def test_a_server_without_metrics_and_no_server_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from saved import savings

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which answers 501
        Thread(target=server.serve_forever, daemon=True).start()
        with savings(f"http://127.0.0.1:{server.server_port}"):
            print("asking")
        server.shutdown()
    assert re.search(
        r"^asking\n\nWhat was saved: unknown, .*/metrics answers 501; .*--enable-metrics\n",
        capsys.readouterr().out,
    )
    said = r"^no server at http://127.0.0.1:1 \("
    with pytest.raises(SystemExit, match=said), savings("http://127.0.0.1:1"):
        pass


def test_the_answer_voted_on_is_the_one_stated() -> None:
    from self_consistency import final_answer, verdict

    assert final_answer("2 x 3 are 6. The answer is **32,400**. Then there are 7 left.") == "32400"
    assert final_answer("So it is -1.5 or 2.") == "2" and final_answer("I do not know.") is None
    assert verdict(["7", None, "6", "6", None, None]) == ("6", 2)
    assert verdict([None, None]) == (None, 0)


class Client:
    """An OpenAI client whose chat completions are what ``answer`` makes of a request. ``asked``:
    the requests."""

    def __init__(self, answer: Any) -> None:
        async def create(**request: Any) -> Any:
            self.asked.append(request)
            return answer(request)

        self.asked: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))


def answers(*messages: Any) -> Any:
    return SimpleNamespace(choices=[SimpleNamespace(message=each) for each in messages])


def test_an_agent_hears_what_its_tools_say_until_it_answers() -> None:
    from agent_team import ROUNDS, Team
    from openai.types.chat import ChatCompletionMessageToolCall

    calls = [
        ChatCompletionMessageToolCall(
            id=given, type="function", function={"name": "read_file", "arguments": given}
        )
        for given in ('{"name": "a.py"}', "not JSON")
    ]
    client: Any = Client(lambda _: answers(SimpleNamespace(content=None, tool_calls=calls)))
    team = Team(client, "m", 8, {"a.py": "one\ntwo\n"})
    talk = asyncio.run(team.work([{"role": "system", "content": "rules"}], "task"))
    assert len(client.asked) == ROUNDS
    first, second = [message["content"] for message in talk if message["role"] == "tool"][:2]
    assert first == "one\ntwo\n" and second.startswith("error: ")
    assert talk[-1] == {"role": "assistant", "content": "I came to no result."}


def test_a_support_conversation_sends_all_results_in_one_turn() -> None:
    """Also of calls that are streamed in pieces; max_tokens cuts off the last."""
    from support_desk import Desk

    def piece(index: int, name: str, tool: str, given: str) -> Any:
        function = SimpleNamespace(name=tool or None, arguments=given)
        return SimpleNamespace(index=index, id=name, function=function)

    async def chunks() -> Any:
        for text, *calls in (
            ("I look ",),
            (None, piece(1, "b", "sell", "{")),
            (None, piece(0, "a", "order", '{"num'), piece(1, "", "", "}")),
            (None, piece(0, "", "", 'ber": "7"}'), piece(2, "c", "policy", '{"subj')),
        ):
            delta = SimpleNamespace(content=text, tool_calls=calls or None)
            yield SimpleNamespace(choices=[SimpleNamespace(delta=delta)])
        yield SimpleNamespace(choices=[])  # the usage comes without a choice

    drafts = [SimpleNamespace(content=text) for text in ("a longer draft", " ", "short", None)]
    client: Any = Client(lambda asked: chunks() if "stream" in asked else answers(*drafts))
    desk = Desk(client, "m", 8, 4, timestamp_first=False)
    assert asyncio.run(desk.serve(2)) == "short" and desk.called == 1
    _, second = client.asked
    said, *results = second["messages"][2:]
    assert (said["role"], said["content"], second["n"]) == ("assistant", "I look ", 4)
    assert said["tool_calls"][0]["function"] == {"name": "order", "arguments": '{"number": "7"}'}
    assert [(each["tool_call_id"], each["content"]) for each in results] == [
        ("a", "on its way since Thursday"),
        ("b", "error: there is no tool sell"),
    ]
