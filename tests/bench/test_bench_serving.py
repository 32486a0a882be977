# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark: what it asks SGLang's client and servers for, what is made of the client's
rows, and a run on two servers."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import loads, servers
from benchmarks.serving.forks import forking
from benchmarks.serving.loads import Load, parse, write_trace
from benchmarks.serving.model import write_tokenizer
from benchmarks.serving.table import table
from sglang_pat.demo.model import make_model


def load(text: str, folder: Path = Path()) -> Load:
    return parse(text, output=256, folder=folder)


def asked(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options that SGLang's client makes of its arguments."""
    serving = pytest.importorskip("sglang.benchmark.serving", reason="needs SGLang 0.5.23")
    caught: list[Any] = []
    monkeypatch.setattr(serving, "run_benchmark", caught.append)
    monkeypatch.setattr("sys.argv", ["client", *arguments])
    serving.cli_main()
    return caught[0]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("8192x128", {"gsp_num_groups": 1, "gsp_prompts_per_group": 128, "gsp_question_len": 128}),
        ("8*2048+512x16", {"gsp_num_groups": 8, "gsp_question_len": 640, "gsp_output_len": 256}),
        ("0+72x4", {"num_prompts": 4, "random_input_len": 200, "random_range_ratio": 1}),
        ("rollouts:10x16", {"gsp_num_groups": 10, "gsp_output_len": 2048, "temperature": 1}),
        ("rollouts:3x8x400", {"gsp_output_len": 400, "gsp_range_ratio": 0.125}),
        ("--dataset-name mooncake --dataset-path 'a b'", {"dataset_path": "a b"}),
    ],
)
def test_loads_are_arguments_of_sglangs_client(
    spec: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked([*load(spec).arguments], monkeypatch)
    assert vars(found).items() >= expected.items()
    assert found.request_rate == float("inf")


NO_LOADS = "8192 x4 2*x4 1024+x4 8x0 0*8x4 -1x4 1+0*1x4 1+1*1x0 rollouts:0x16 forks:2x3x rolls:2x3"


@pytest.mark.parametrize("text", ["", *NO_LOADS.split()])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a load, or has no requests: write it as 8192x128"):
        load(text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, vocab=1000, end=7)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_text_of_random_ids_has_these_ids_again(tokenizer: Any) -> None:
    ids = [*range(189, 1000), 7]
    assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False)) == ids
    assert len(tokenizer) == 1000 and tokenizer.eos_token_id == 7
    assert tokenizer.encode("3hi hi") != tokenizer.encode("4hi hi"), "as Mooncake's blocks differ"
    messages = [{"role": "user", "content": "t200 t201"}]
    chat = {"tokenize": True, "return_dict": False}
    assert tokenizer.apply_chat_template(messages, **chat) == [200, 201]


def test_conversations_share_a_system_prompt_and_roles(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, again = load("300+2*60x4", tmp_path), load("300+2*60x4", tmp_path / "again")
    again.trace.parent.mkdir()
    for each in (agents, again):
        write_trace(each, tokenizer)
    assert agents.trace.read_bytes() == again.trace.read_bytes()
    conversations = json.loads(agents.trace.read_text())["conversations"]
    starts = {turns[0]["messages"][0]["content"] for turns in conversations}
    first, second = (tokenizer.encode(start) for start in starts)
    assert len(first) == len(second) == 360 and first[:300] == second[:300] and first != second
    for turns in conversations:
        length = 360
        for number, turn in enumerate(turns):
            *system, user = turn["messages"]
            assert [each["role"] for each in system] == ["system"] * (number == 0)
            new = len(tokenizer.encode(user["content"]))
            assert 20 <= new <= 300 and turn["prompt_tokens"] == length + new
            length += new + 90
        assert 1280 - 300 - 90 < length <= 1280
    found = asked([*agents.arguments], monkeypatch)
    assert (found.max_concurrency, found.num_prompts, found.sharegpt_output_len) == (4, 12, 90)
    assert len(conversations) == 12 and found.dataset_path == str(agents.trace)


@dataclass
class Request:  # of SGLang's client, as far as `forking` needs it
    prompt: list[Any]
    output_len: int
    extra_request_body: dict[str, Any]


def test_orchestrators_have_a_context_and_tasks_of_their_own(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = load("forks:2x3x500", tmp_path)
    write_trace(forks, tokenizer)
    found = asked([*forks.arguments], monkeypatch)
    assert (found.max_concurrency, found.num_prompts, found.warmup_requests) == (2, 6, 0)
    datasets = pytest.importorskip("sglang.benchmark.datasets", reason="needs SGLang 0.5.23")
    rows = datasets.get_dataset(found, tokenizer)
    assert len({row.prompt[0][0]["content"] for row in rows}) == len(rows) == 6
    context, *tasks = rows[0].prompt
    assert len(tokenizer.encode(context[0]["content"])) == 500
    assert [len({task["content"] for task in turn}) for turn in tasks] == [3, 3]
    assert all(60 <= task["tokens"] <= 480 for turn in tasks for task in turn)


def test_orchestrators_fork_children_whose_answers_come_back() -> None:
    asked_for: list[Request] = []

    async def answer(request: Request) -> Any:
        number = len(asked_for)
        asked_for.append(request)
        await asyncio.sleep(0.003 * (3 - number % 4))  # children end in another order
        return SimpleNamespace(generated_text=f"answer {number}")

    first, second = ([{"content": text, "tokens": 60} for text in turn] for turn in ("abc", "def"))
    request = Request([[{"content": "context"}], first, second], 90, {"seed": 1})
    converse = forking(answer, "sglang-oai-chat")
    outputs = asyncio.run(converse(request_func_input=request, pbar=None))
    assert len(outputs) == len(asked_for) == 1 + 2 * (3 + 1)
    assert all(each.extra_request_body.keys() == {"seed", "stream_options"} for each in asked_for)
    assert [each.output_len for each in asked_for] == [90, 60, 60, 60, 90, 60, 60, 60, 90]
    assert [each["content"] for each in asked_for[1].prompt] == ["context", "answer 0", "a"]
    *history, last = asked_for[5].prompt
    said = ["context", "answer 0", "answer 1 answer 2 answer 3", "answer 4"]
    assert [each["content"] for each in history] == said and last["content"] == "d"
    assert [each["role"] for each in history] == ["user", "assistant"] * 2


def row(backend: str, run: int, itl: float) -> dict[str, Any]:
    times = {"median_itl_ms": itl, "p99_itl_ms": 2 * itl, "median_tpot_ms": itl + 1}
    times |= {"median_ttft_ms": 50.0, "steady": {"output_throughput": 900 / itl}}
    return {"load": "8192x128", "backend": backend, "run": run, **times}


def test_medians_and_their_ratio_to_the_better_of_the_others() -> None:
    rows = [row("pat", run, itl) for run, itl in enumerate((9.0, 8.0, 30.0))]
    rows += [row("fa3", 0, 27.0), row("flashinfer", 0, 22.5)]
    shown = table(rows)
    assert "9.00 (8.00..30.00)" in shown[1]
    assert "8192x128: inter-token time, pat / flashinfer: 0.400" in shown
    assert "8192x128: output tokens/s, pat / flashinfer: 2.500" in shown
    at_once = [rows[0], *(each | {"median_itl_ms": 0.0} for each in rows[3:])]
    for some in (rows[:3], at_once):
        assert not any("inter-token time" in line for line in table(some))


def test_the_commands_are_shown_as_sglang_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server_args = pytest.importorskip("sglang.srt.server_args", reason="needs SGLang 0.5.23")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    flags = ["--loads", "0x64", "rollouts:1x2", "forks:1x2x20", "--seed 3", "--tp", "2"]
    flags += ["--kv-cache-dtype", "fp8_e4m3", "--server-args", "--enable-metrics"]
    assert command.main(["--show", "--folder", str(tmp_path), *flags]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 7
    for line, backend in zip(lines[:3], command.BACKENDS, strict=True):
        assert line[2] == "sglang.launch_server" and line.pop(line.index(backend))
        line.remove("--attention-backend")  # this process's SGLang need not know pat
        served = parser.parse_args(line[3:])
        assert (served.kv_cache_dtype, served.tp_size, served.stream_interval) == ("fp8_e4m3", 2, 8)
        assert served.enable_metrics and served.incremental_streaming_output
    steady, forks = "sglang.benchmark.steady_state_serving", "benchmarks.serving.forks"
    programs = ((steady, "0.8"), (steady, "0.001"), (forks, "0.001"), (steady, "0.001"))
    for line, (client, ratio) in zip(lines[3:], programs, strict=True):
        assert line[2:5] == [client, "--steady-state-concurrency-ratio", ratio]
        assert asked(line[5:], monkeypatch).port == 30_000


@pytest.mark.parametrize(
    ("given", "message"),
    [("--loads 64", "'64' is not a load"), ("--model no", "neither a folder")],
)
def test_the_command_refuses_before_any_server_starts(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*given.split(), "--folder", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


FAILED = [
    ({"errors": ["", "lost"]}, "1 requests failed, the first one so: lost"),
    ({"output_lens": [256, 255]}, "1 of 2 requests did not get the tokens"),
    ({"ttfts": [0.0, 0.0]}, "2 none: see the servers' logs"),
    (None, "SGLang's client failed"),
]


@pytest.mark.parametrize(("found", "said"), FAILED)
def test_a_run_in_which_a_request_fails_is_none(
    found: dict[str, Any] | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client(arguments: list[str]) -> None:
        if found is None:
            sys.exit("no such dataset")
        good = {"errors": ["", ""], "output_lens": [256, 256], "ttfts": [0.1, 0.1]}
        (tmp_path / "result.jsonl").write_text(json.dumps(good | found))

    monkeypatch.setattr(servers, "import_module", lambda name: SimpleNamespace(cli_main=client))
    with pytest.raises(servers.ClientError, match=said):
        servers.ask(load("0x2"), port=1, seed=0, folder=tmp_path)


def test_backends_take_turns_and_the_first_run_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str, str]] = []

    def run_once(server: str, load: Load, _options: Any, turn: int, _folder: Path) -> Any:
        asked.append((turn, load.name, server))
        return row(server, turn, 9.0)

    monkeypatch.setattr(command, "serve", lambda *_, **how: nullcontext({"fa3": "fa3", "b": "b"}))
    monkeypatch.setattr(command, "run_once", run_once)
    file = tmp_path / "rows.json"
    loads = ["--loads", "0x2", "0x3", "--runs", "2", "--json", str(file)]
    assert command.main(["--device", "cpu", "--folder", str(tmp_path), *loads]) == 0
    pairs = [(0, load, b) for load in ("0x2", "0x3") for b in ("fa3", "b")]
    pairs += [(1, load, b) for load in ("0x2", "0x3") for b in ("b", "fa3")]
    assert asked == [(-1, "0x2", "b"), (-1, "0x2", "fa3"), *pairs]
    rows = json.loads(file.read_text())["rows"]
    assert [(each["run"], each["load"], each["backend"]) for each in rows] == pairs
    assert command.main(["--from", str(file), str(file)]) == 0  # shown again, and together


# Two servers on a CPU, driven by SGLang's own client.
BOTH = ["pat", "torch_native"]
# The client counts tokens that have a text: these answers are 9 times token 0, a special one.
SPECIAL = {"max_new_tokens": 9, "ignore_eos": True, "logit_bias": {"0": 100}}
BODY = ("--extra-request-body", json.dumps({"sampling_params": SPECIAL}))
ENDS = shlex.join([*parse("256x4", output=9, folder=Path()).arguments, *BODY])
REQUESTS = {"rollouts:2x4x48": 8, "forks:1x2x200": 12, ENDS: 4}  # by load
VOCAB = 512


@pytest.mark.usefixtures("forked_servers")
def test_loads_run_on_two_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang", reason="serving needs SGLang 0.5.23")
    monkeypatch.setattr(loads, "FORKS", 1)
    monkeypatch.setattr(loads, "CHILD_TOKENS", (6, 90))
    model, file = tmp_path / "model", tmp_path / "rows.json"
    make_model(model, hidden=64, q_heads=4, head_dim=32, vocab=VOCAB)
    write_tokenizer(model, VOCAB, end=0)
    servers = ["--device", "cpu", "--model", str(model), "--backends", *BOTH]
    servers += ["--pool-tokens", "16384", "--max-requests", "8", "--stream-interval", "1"]
    files = ["--folder", str(tmp_path), "--json", str(file)]
    assert command.main([*servers, "--loads", *REQUESTS, "--runs", "1", *files]) == 0
    rows = json.loads(file.read_text())["rows"]
    pairs = [(load, backend) for load in REQUESTS for backend in BOTH]
    assert [(row["load"], row["backend"]) for row in rows] == pairs
    lengths = {ENDS: 4 * 9}
    for row in rows:
        # On a loaded machine several tokens may arrive at once, so the median may be 0.
        assert row["p99_itl_ms"] > 0 and row["median_tpot_ms"] > 0 and row["median_ttft_ms"] > 0
        assert row["steady"]["output_throughput"] > 0
        assert row["completed"] == REQUESTS[row["load"]]
        # Both backends get the same answers' lengths.
        tokens = row["total_output_tokens"]
        assert tokens == lengths.setdefault(row["load"], tokens)
        assert ("counted" in row) == (row["backend"] == "pat")
        if counted := row.get("counted"):
            assert counted["fallbacks"] == {} and counted["kv_read_share"] < 1
            assert 0 < counted["plans_made"] <= counted["decode_steps"]
            assert counted["packed_steps"] > 0
    shown = capsys.readouterr().out
    for load in REQUESTS:
        assert f"{load}: output tokens/s, pat / torch_native: " in shown
