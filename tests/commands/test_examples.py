# SPDX-License-Identifier: Apache-2.0
"""The server that README's first screen starts, and the programs in ``examples/``, as users run
them. These ask the first layers of the same model: what it says is nonsense, in a fifth of the
time, but its tokens, the prompts and what they share are the same. Then parts of these programs
that need no server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from kit import forks

from sglang_pat import cli
from sglang_pat.demo.server import Server

pytest.importorskip("sglang", reason="the examples need a server of SGLang 0.5.23")

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYERS = 4  # of the model that the programs ask


def _first_screen(language: str) -> list[str]:
    """The commands of README's blocks in that language above the first heading below the title; of
    a console those behind a ``$``."""
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    block = "".join(re.findall(rf"^```{language}\n(.*?)^```$", readme, re.M | re.S))
    if language == "console":
        return re.findall(r"^\$ (.*(?:\n {4}.*)*)", block, re.M)
    return [" ".join(line.split()) for line in block.replace("\\\n", " ").splitlines()]


class Launched(Server):
    """The server that README's first screen starts without a GPU, word by word."""

    def __init__(self, model: Path, folder: Path) -> None:
        env = {
            **forks.NO_SPINNING,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",  # the commands are for a CPU, on a machine with GPUs too
        }
        super().__init__(model, backend=None, device="cpu", log=folder / "server.log", env=env)
        commands = _first_screen("bash")
        (named,) = (line for line in commands if line.startswith("MODEL="))
        (serves,) = (line for line in commands if "--device cpu" in line)
        own = f"--port {self.port} --sleep-on-idle --dtype float32"
        self._command = ["bash", "-c", f"{named}\n{serves} {own}"]
        del self._env["SGLANG_PLATFORM"]  # the command says it


class Forked(Server):
    """A server that starts as a fork."""

    _spawn, counters = forks.start_server, forks.counters_of


@pytest.fixture(scope="module")
def pat(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("examples")
    model = folder / "model"
    model.mkdir()
    for file in smollm2_folder.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((smollm2_folder / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    args = ("--dtype", "float32", "--max-total-tokens", "32768")
    log = folder / "server.log"
    with Forked(model, backend="pat", device="cpu", log=log, args=args) as server:
        assert f"sglang_pat: serves all {LAYERS}" in server.text()
        yield server


def test_the_first_screen_answers_and_counts(smollm2_folder: Path, tmp_path: Path) -> None:
    said = []
    with Launched(smollm2_folder, tmp_path) as server:
        info = server.get("/server_info")
        assert info["model_path"] == str(smollm2_folder) and info["device"] == "cpu"
        assert "sglang_pat: serves all" in server.text()
        for command in _first_screen("console"):
            server.counters()  # waits until the server has written what it counted
            here = command.replace("localhost:30000", f"localhost:{server.port}")
            said.append(subprocess.check_output(["bash", "-c", here], env=server._env, text=True))
    asks, reads = said
    answers = re.findall(r'"content":"(.+)"', asks)
    assert answers == ["The capital of France is Paris."] * 8
    shown = dict(re.findall(r"^(sglang_pat_\w+) (\S+)$", reads, re.M))
    assert shown["sglang_pat_serving"] == "1.0"
    assert float(shown["sglang_pat_packed_steps_total"]) > 0
    read, unpacked = (
        float(shown[f"sglang_pat_kv_tokens_{name}_total"]) for name in ("read", "unpacked")
    )
    assert 0 < read < unpacked


def _run_and_save(name: str, server: Server, folder: Path, factor: float, *args: str) -> str:
    """The output of an example that must read ``factor`` times less than without packing."""
    before = server.counters()
    command = [name, "--url", server.url, "--max-tokens", "24", *args]
    env = os.environ | forks.search_path(EXAMPLES)
    run = forks.run(command, env=env, cwd=folder, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    counted = server.counters() - before
    saved = run.stdout.partition("What was saved")[2]
    for number in (counted.kv_tokens_read, counted.kv_tokens_unpacked, counted.packed_steps):
        assert f" {number:,}" in saved
    assert factor * counted.kv_tokens_read < counted.kv_tokens_unpacked
    assert not counted.fallbacks
    return run.stdout


FILES = ("queue.py", "batch.py", "cache.py", "server.py", "client.py")


@pytest.mark.parametrize(
    ("name", "args", "factor", "line", "count"),
    [
        # Of four questions the answers of eight samples each, and a vote; measured were 7.4.
        ("self_consistency", (), 5.0, r"^  verdict: \S+, [0-8] of 8 votes", 4),
        # Of each of three steps the three best are kept; 3.3.
        ("tree_of_thoughts", (), 2.3, r"^  [+] +-\d\S*", 9),
        # An answer to eight questions about each of four documents.
        ("shared_documents", ("--chars", "2000"), 3.0, r"^  \S.*\?\n    .*", 32),
        # Three specialists, who report on each file; 3.0.
        ("agent_team", ("--folder", "reviewed"), 2.0, r"^  \w+, \w+\.py ", 3 * len(FILES)),
    ],
)
def test_a_program_answers_and_saves(
    name: str,
    args: tuple[str, ...],
    factor: float,
    line: str,
    count: int,
    pat: Server,
    tmp_path: Path,
) -> None:
    (tmp_path / "reviewed").mkdir()
    for file in FILES:
        (tmp_path / "reviewed" / file).write_text("print('hello')\n")
    output = _run_and_save(name, pat, tmp_path, factor, *args)
    assert len(re.findall(line, output, re.M)) == count, output


@pytest.mark.usefixtures("fresh_shell")
def test_support_desk_shares_until_the_time_stands_first(
    pat: Server, smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors, named = [], []
    tokenizer = str(smollm2_folder)
    for options in ((), ("--timestamp-first",)):
        file = str(tmp_path / f"asked{len(named)}.jsonl")
        options += ("--customers", "6", "--drafts", "2", "--save", file)
        output = _run_and_save("support_desk", pat, tmp_path, 1.2, *options)
        assert len(re.findall(r"^customer +\d+  \S", output, re.M)) == 6
        assert "0 of 6 conversations had tool calls of the model's own" in output
        factors += re.findall(r"([\d.]+) x as many", output)
        requests = map(json.loads, Path(file).read_text(encoding="utf-8").splitlines())
        assert [len(request["messages"]) for request in requests].count(6) == 6
        assert cli.main(["estimate", "--prompts", file, "--tokenizer", tokenizer]) == 0
        found = re.findall(r"differ at token ([\d,]+)", capsys.readouterr().out)
        named.append(min((int(token.replace(",", "")) for token in found), default=9999))
    assert float(factors[0]) > float(factors[1])
    assert named[1] < 60 < named[0]  # before the rules, and behind them


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
