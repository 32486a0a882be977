# SPDX-License-Identifier: Apache-2.0
"""The programs in ``examples/``, as users run them: against real servers with the demo's model."""

from __future__ import annotations

import asyncio
import hashlib
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

from sglang_pat.bench.common.counters import Counters
from sglang_pat.bench.common.server import Server
from sglang_pat.demo.model import make_model
from sglang_pat.demo.scale import MODEL, VOCAB
from sglang_pat.demo.tokenizer import make_tokenizer

pytest.importorskip("sglang", reason="the examples need a server of SGLang 0.5.23")

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGS = ["--dtype", "float32", "--max-total-tokens", "65536"]
ENV = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin starve the server on a busy machine


class Launched(Server):
    """The server that ``examples/launch.sh`` starts for the demo's model."""

    def __init__(self, folder: Path) -> None:
        env = {
            **ENV,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder),
            "CUDA_VISIBLE_DEVICES": "",  # the model is for a CPU, on a machine with GPUs too
        }
        super().__init__("demo", backend=None, device="cpu", log=folder / "server.log", env=env)
        self._command = [
            *(str(EXAMPLES / "launch.sh"), "demo", "--port", str(self.port)),
            *("--sleep-on-idle", "--dtype", "float32"),
        ]
        del self._env["SGLANG_PLATFORM"]  # the script is to find out
        self._env.pop("PYTHON", None)  # as a user's shell has it, who activated an environment


@pytest.fixture(scope="module")
def pat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Launched(tmp_path_factory.mktemp("launched")) as server:
        yield server


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the examples importable, as they are to each other."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_demo_s_server_is_small(pat: Server) -> None:
    """The pool of K/V is bounded, and the model is the demo's, whatever else is given."""
    info = pat.get("/server_info")
    assert 0 < info["max_total_num_tokens"] <= 65536
    assert info["attention_backend"] == "pat" and info["device"] == "cpu"


def test_a_user_s_bound_of_the_pool_counts(tmp_path: Path) -> None:
    """Of an argument given twice SGLang takes the last; the script's comes first."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\n[ "$1" = -c ] && echo cpu\n[ "$1" != -m ] || echo "$@"\n')
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": "/nowhere"}
    env.pop("PYTHON", None)
    env.pop("XDG_CACHE_HOME", None)

    def launch(*args: str) -> str:
        command = [str(EXAMPLES / "launch.sh"), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    demo = launch("demo", "--max-total-tokens", "99", "--port", "1")
    assert "--model-path /nowhere/.cache/sglang_pat/examples --device cpu" in demo
    assert demo.index("--max-total-tokens 65536") < demo.index("--max-total-tokens 99 --port 1")
    assert "--max-total-tokens" not in launch("a/model", "--port", "1")


def _run(name: str, server: Server, folder: Path, *args: str) -> str:
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}  # a random model says anything
    env.pop("PYTHONSAFEPATH", None)  # the examples import saved.py, which is beside them
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", server.url, *args],
        cwd=folder,
        env=env,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _run_and_save(name: str, server: Server, folder: Path, factor: float, *args: str) -> str:
    """The output of an example that must read ``factor`` times less than without packing."""
    before = server.counters()
    output = _run(name, server, folder, *args)
    counted = server.counters() - before
    shown = re.findall(r"^  ([KVa-z/ ]+)  +([\d,.]+)", output.partition("What was saved")[2], re.M)
    shown = [(name.strip(), value) for name, value in shown]
    assert shown[:4] == [
        ("K/V tokens read", f"{counted.kv_tokens_read:,}"),
        ("without packing", f"{counted.kv_tokens_unpacked:,}"),
        ("decode steps", f"{counted.decode_steps:,}"),
        ("of which packed", f"{counted.packed_steps:,}"),
    ]
    times = {name: float(value) for name, value in shown[4:]}
    assert times.keys() == {"seconds in all", "ms per output token"}
    assert 0 < times["ms per output token"] < 1e3 * times["seconds in all"]
    assert output.startswith("The model is the demo's, with random weights")
    assert factor * counted.kv_tokens_read < counted.kv_tokens_unpacked
    assert not counted.fallbacks
    return output


def test_self_consistency_votes(pat: Server, tmp_path: Path) -> None:
    output = _run_and_save("self_consistency", pat, tmp_path, 5.0)  # 7.4 measured
    polls = re.findall(r"answers: (.*)\n  verdict: (\S+), (\d+) of 8 votes", output)
    assert len(polls) == 4
    for listed, verdict, votes in polls:
        answers = listed.split(", ")
        assert len(answers) == 8
        assert len(set(answers)) > 1, "samples that are all alike were not sampled"
        most = max([answers.count(a) for a in answers if a != "None"], default=0)
        assert int(votes) == most
        assert answers.count(verdict) == most or (verdict, most) == ("None", 0)


def test_tree_of_thoughts_grows_and_keeps_the_best(pat: Server, tmp_path: Path) -> None:
    output = _run_and_save("tree_of_thoughts", pat, tmp_path, 2.3)  # 3.3 measured
    rounds = re.split(r"^step \d: ", output.partition("\nplan, ")[0], flags=re.M)[1:]
    assert len(rounds) == 3
    for most, text in zip((4, 12, 12), rounds, strict=True):
        chains = [
            (float(score), mark) for mark, score in re.findall(r"^  ([+-]) +(-\d\S*)", text, re.M)
        ]
        assert text.startswith(f"{len(chains)} chains, 3 kept")
        # A random model ends one step in a thousand before it began.
        assert most - 1 <= len(chains) <= most
        best_first = [mark for _, mark in sorted(chains, key=lambda chain: -chain[0])]
        assert best_first == ["+"] * 3 + ["-"] * (len(chains) - 3)


def test_shared_documents_answers_every_question_from_its_document(
    pat: Server, tmp_path: Path
) -> None:
    output = _run_and_save("shared_documents", pat, tmp_path, 4.5)  # 6.7 measured
    documents = re.split(r"^(\S+)\n", output.partition("\nWhat was saved")[0], flags=re.M)[1:]
    assert documents[::2] == ["README.md", "LICENSE", "packer.cpp", "radix.py"]
    answers = [re.findall(r"^  \S.*\?\n    (.*)", text, re.M) for text in documents[1::2]]
    assert [len(each) for each in answers] == [8, 8, 8, 8]
    # Without its document there would be 8 different answers, without its question 4.
    assert len({answer for each in answers for answer in each}) >= 28


def test_agent_team_hears_every_helper(pat: Server, tmp_path: Path) -> None:
    folder = tmp_path / "reviewed"
    folder.mkdir()
    for name in ("queue.py", "batch.py", "cache.py", "server.py", "client.py"):
        (folder / name).write_text("print('hello')\n")
    output = _run_and_save("agent_team", pat, tmp_path, 2.0, "--folder", str(folder))  # 3.0
    reports = re.findall(r"^  (\w+), (\w+\.py) ", output, re.M)
    specialists = ("correctness", "speed", "clarity")
    assert sorted(reports) == sorted(
        (specialist, path.name) for specialist in specialists for path in folder.iterdir()
    )
    joined, _, result = output.partition("result of the review:\n")
    assert re.findall(r"^  (\w+)  ", joined, re.M) == list(specialists)
    assert result.partition("\nWhat was saved")[0].strip()


def test_the_agent_team_s_folder_never_changes() -> None:
    """What it saves depends on the folder: with another one examples/README.md is to be measured
    anew."""
    shop = sorted(path for path in (EXAMPLES / "shop").iterdir() if path.is_file())
    assert len(shop) == 7
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in shop)).hexdigest()
    assert digest == "5fd67b2ca0455542579855e8ee92b58ebd18d92b074ff8c95f3fb3b0185882cd"


def test_a_stock_server_has_nothing_to_tell(pat: Server, tmp_path: Path) -> None:
    model = make_tokenizer(make_model(tmp_path / "model", **MODEL), vocab=VOCAB)
    log = tmp_path / "server.log"
    with Server(model, backend="torch_native", device="cpu", log=log, args=ARGS, env=ENV) as server:
        output = _run("self_consistency", server, tmp_path, "--samples", "2", "--max-tokens", "8")
    assert output.count("verdict: ") == 4
    assert re.search(r"\n  ms per output token +\d", output), "to compare with pat's"
    assert "What was saved: unknown, this server has no counters of pat" in output


def test_a_server_without_metrics_is_named(
    programs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from saved import savings

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # answers 501
        Thread(target=server.serve_forever, daemon=True).start()
        with savings(f"http://127.0.0.1:{server.server_port}"):
            print("asking")
        server.shutdown()
    assert re.search(
        r"^asking\n\nWhat was saved: unknown, .*/metrics answers 501; .*--enable-metrics\n"
        r"  seconds in all +\d+\.\d\n$",
        capsys.readouterr().out,
    )


def test_no_server_is_said_in_a_line(programs: None) -> None:
    from saved import savings

    said = r"^no server at http://127.0.0.1:1 \("
    with pytest.raises(SystemExit, match=said), savings("http://127.0.0.1:1"):
        pass


def test_a_server_that_packed_nothing_is_not_praised(programs: None) -> None:
    from saved import summary

    prefills = Counters(base_forwards={"extend": 3})
    assert summary(prefills).endswith("SGLang's own attention ran {'extend': 3}")
    unwanted = Counters(base_forwards={"extend": 3}, fallbacks={"mixed": 2})
    assert summary(unwanted).endswith("SGLang's own attention ran {'mixed': 2}")
    alone = summary(Counters(decode_steps=5, kv_tokens_read=100, kv_tokens_unpacked=100))
    assert alone.startswith("0% of the K/V reads")


def test_the_answer_voted_on_is_the_one_stated(programs: None) -> None:
    from self_consistency import final_answer, verdict

    assert final_answer("2 x 3 are 6. The answer is 6. Then there are 7 left.") == "6"
    assert final_answer("The answer is **32,400**.") == "32400"
    assert final_answer("So it is -1.5 or 2.") == "2"
    assert final_answer("I do not know.") is None
    assert verdict(["7", None, "6", "6", None, None]) == ("6", 2)
    assert verdict([None, None]) == (None, 0)


def test_chains_are_scored_by_token_and_talk_in_turns(programs: None) -> None:
    from tree_of_thoughts import FINISH, NEXT, PROBLEM, Chain, prune

    long, short, bad = Chain(("a", "b"), -10.0, 20), Chain(("c",), -6.0, 10), Chain(("d",), -9.0, 9)
    assert prune([bad, short, long], 2) == [long, short]
    said = [message["content"] for message in long.messages(ask=FINISH)]
    assert said[1:] == [PROBLEM, "a", NEXT, "b", FINISH]
    assert long.messages()[:-1] == long.messages(ask=FINISH)[:-1]


def test_an_agent_calls_tools_until_it_answers(programs: None) -> None:
    from agent_team import ROUNDS, TOOLS, Team
    from openai.types.chat import ChatCompletionMessageToolCall

    def call(tool: str, arguments: str) -> ChatCompletionMessageToolCall:
        function = {"name": tool, "arguments": arguments}
        return ChatCompletionMessageToolCall(id=tool, type="function", function=function)

    calls = [
        call("read_file", '{"name": "a.py"}'),
        call("search", '{"text": "two"}'),
        call("read_file", '{"name": "../secret"}'),
        call("read_file", "not JSON"),
        call("search", "[]"),
        call("delete_file", "{}"),
    ]
    asked: list[dict[str, Any]] = []

    async def create(**request: Any) -> Any:
        asked.append(request)
        said = SimpleNamespace(content=None, tool_calls=calls)
        if len(request["messages"]) > 2 and request["messages"][0]["content"] != "stubborn":
            said = SimpleNamespace(content="done", tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=said)])

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    team = Team(client, "m", 8, {"a.py": "one\ntwo\n", "b.py": "two + two\n"})
    talk = asyncio.run(team.work([{"role": "system", "content": "rules"}], "task"))

    assert [request["tools"] for request in asked] == [TOOLS, TOOLS]
    assert [message["role"] for message in talk] == [
        *("system", "user", "assistant", *["tool"] * 6, "assistant")
    ]
    found = [message["content"] for message in talk if message["role"] == "tool"]
    assert found[:2] == ["one\ntwo\n", "a.py: two\nb.py: two + two"]
    assert all(answer.startswith("error: ") for answer in found[2:])
    assert talk[-1]["content"] == "done"

    asked.clear()
    endless = asyncio.run(team.work([{"role": "system", "content": "stubborn"}], "task"))
    assert len(asked) == ROUNDS
    assert endless[-1] == {"role": "assistant", "content": "I came to no result."}
