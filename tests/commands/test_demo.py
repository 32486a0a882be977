# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: two real servers, its judgement, its models, how counters are read, and the
ports of its servers."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_pat import cli, plan
from sglang_pat.demo import run, smollm2
from sglang_pat.demo.counters import Counters, parse_counters
from sglang_pat.demo.desk import CUSTOMERS, RULES, conversations
from sglang_pat.demo.model import make_model
from sglang_pat.demo.run import Run, report, tree_of_words
from sglang_pat.demo.server import Server, ServerError, reserve_port
from sglang_pat.demo.standin import demo_model
from sglang_pat.dump import read_dump

SMALL: dict[str, Any] = {
    **{"hidden": 128, "layers": 2, "vocab": 300},
    **{"q_heads": 4, "kv_heads": 2, "head_dim": 32},
}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


@pytest.mark.usefixtures("smollm2_folder", "forked_servers")
def test_the_demo_shows_the_same_answers_and_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump.jsonl"
    monkeypatch.setattr(run, "ANSWER", 16)  # tokens, in a third of the time
    monkeypatch.setenv("SGLANG_PAT_CHECK", "1")
    monkeypatch.setenv("SGLANG_PAT_DUMP", str(file))
    code = cli.main(["demo", "--cache", str(tmp_path)])
    done = capsys.readouterr()
    assert code == 0, done.out + done.err
    drawn, _, rest = done.out.partition("\nstarting")
    mine, _, others = rest.partition("torch_native answers:")
    assert others.endswith("PASSED\n") and "not served" not in others

    # Sentences about the shop: most of their words are those of the prompts.
    prompts = {
        word for talk in conversations() for each in talk for word in _words(each["content"])
    }
    for number, (name, _, _) in enumerate(CUSTOMERS):
        answer = " ".join(re.findall(rf"^  {number} {name} +(.*)$", mine, re.M))
        known = [word in prompts for word in _words(answer)]
        assert len(known) > 5 and sum(known) > 0.6 * len(known), answer
    counts = [int(n) for n in re.findall(r"^  \d \w+ +the same (\d+) tokens$", others, re.M)]
    assert len(counts) == len(CUSTOMERS) and max(counts) <= run.ANSWER
    total = sum(counts)
    assert f"equal to torch_native: {total} of {total}, in 8 of 8 answers all" in others
    pattern = r"packed: (\d+) of (\d+); (\d+) plans made, (\d+) reused"
    ((packed, steps, made, reused),) = [map(int, each) for each in re.findall(pattern, others)]
    # The first token of an answer comes from the prefill.
    assert max(counts) - 1 <= steps == made + reused and packed > 0.9 * steps
    (read,) = re.findall(r"read per decode step +([\d,.]+) +([\d,.]+)", others)
    unpacked, packed_reads = (float(number.replace(",", "")) for number in read)
    assert 3 * packed_reads < unpacked

    # The tree that was drawn before is the one that the server found in its cache.
    dump = read_dump(file)
    batch = max(dump.batches, key=lambda batch: len(batch.paths))
    assert _shared(drawn) == _shared(str(plan(batch.paths, batch.seq_lens, dump.target)))
    assert len(_shared(drawn)) == 5 and RULES[:40] in drawn


def _shared(tree: str) -> list[tuple[int, int, int]]:
    """Start, end and number of queries of each node that several queries share."""
    found = []
    for start, end, listed in re.findall(r"tokens \[(\d+), (\d+)\) of queries ([\d, -]+)", tree):
        runs = [run.split("-") for run in listed.split(", ")]
        found.append((int(start), int(end), sum(int(r[-1]) - int(r[0]) + 1 for r in runs)))
    return sorted(found)


def test_without_the_real_model_random_weights_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    folder = demo_model()
    assert smollm2.FETCH in capsys.readouterr().err
    rows = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.shape[0]
    assert len(AutoTokenizer.from_pretrained(folder)) == rows
    tree = tree_of_words(str(folder)).splitlines()
    assert RULES[:40] in tree[0] and "of queries 0-7" in tree[0]
    for number, (_, _, question) in enumerate(CUSTOMERS):
        (line,) = (each for each in tree if f"of query {number} " in each)
        assert question[:40] in line and line.startswith(" " * 6)


def test_one_other_token_or_no_packing_fails() -> None:
    packed = Counters(decode_steps=10, packed_steps=9, kv_tokens_read=20, kv_tokens_unpacked=80)
    stock = Run("fa3", [["a", "b"], ["c", "d"]], 2.0, 5.0, Counters())
    pat = stock._replace(backend="pat", counters=packed)
    text, passed = report([pat, stock], exact=True)
    assert passed and "saved: 75%" in text and "packed: 9 of 10" in text
    assert "equal to fa3: 4 of 4, in 2 of 2" in text
    for other in ([["a", "b"], ["c", "e"]], [["a", "b"], ["c"]]):
        text, passed = report([pat._replace(answers=other), stock], exact=True)
        assert not passed and "equal to fa3: 3 of 4, in 1 of 2" in text
        assert report([pat._replace(answers=other), stock], exact=False)[1]
    assert not report([stock, stock], exact=False)[1]


@pytest.mark.usefixtures("forked_servers")
def test_what_stops_the_demo_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a server that does not start; or, before one is, the name of a wrong setting."""
    model = make_model(tmp_path / "model", **SMALL)
    server = Server(model, backend="no_such", device="cpu", log=tmp_path / "server.log")
    with pytest.raises(ServerError, match=r"(?s)ended with code 2.*invalid choice: 'no_such'"):
        server.__enter__()
    monkeypatch.setenv("SGLANG_PAT_POLICY", "clever")
    assert cli.main(["demo", "--cache", str(tmp_path / "cache")]) == 1
    assert "SGLANG_PAT_POLICY=clever" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()  # neither a model was made nor a server started


METRICS = """
sglang_pat_decode_steps_total{dp_rank="0",tp_rank="0"} 3.0
sglang_pat_decode_steps_total{dp_rank="1",tp_rank="0"} 2.0
sglang_pat_plan_seconds_total{tp_rank="0"} 0.25
sglang_pat_base_forwards_total{dp_rank="0",kind="extend",tp_rank="0"} 2.0
sglang_pat_base_forwards_total{dp_rank="1",kind="extend",tp_rank="0"} 1.0
sglang_pat_base_forwards_total{dp_rank="1",kind="idle",tp_rank="0"} 0.0
sglang_pat_serving{tp_rank="0"} 1.0
sglang_pat_fallbacks_total{reason="a layer with, \\"quotes\\"",tp_rank="0"} 1.0
"""


def test_counters_of_all_replicas_and_of_a_span_of_time() -> None:
    read = parse_counters(METRICS)
    given = {"decode_steps": 5, "plan_seconds": 0.25, "base_forwards": {"extend": 3}}
    assert read == Counters(**given, fallbacks={'a layer with, "quotes"': 1})
    before = Counters(decode_steps=2, base_forwards={"extend": 2}, fallbacks=read.fallbacks)
    expected = Counters(decode_steps=3, plan_seconds=0.25, base_forwards={"extend": 1})
    assert read - before == expected


def test_equal_parameters_give_equal_files_and_others_replace_them(tmp_path: Path) -> None:
    weights = [make_model(tmp_path / n, **SMALL) / "model.safetensors" for n in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    kept = weights[0].with_name("tokenizer.json")
    kept.write_text("{}")
    for change in ({"seed": 1}, {"dtype": "bfloat16"}):
        make_model(tmp_path / "a", **SMALL | change)
        assert weights[0].read_bytes() != weights[1].read_bytes() and kept.read_text() == "{}"
    for wrong in ({"q_heads": 3}, {"head_dim": 33}):
        with pytest.raises(ValueError, match=str(*wrong.values())):
            make_model(tmp_path / "c", **SMALL | wrong)
    assert not (tmp_path / "c").exists()


def test_a_server_may_listen_on_a_port_that_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again to another process, nor while another server listens on it."""
    port = reserve_port()
    code = (
        "import random; from sglang_pat.demo.server import reserve_port\n"
        f"random.sample = lambda population, k: [{port}]\n"
        "reserve_port()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 1 and "end servers, and try again" in ended.stderr
    with socket.create_server(("127.0.0.1", port)) as server:  # sets SO_REUSEADDR
        socket.create_connection(server.getsockname(), timeout=5).close()
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            taken = [port, stranger.getsockname()[1]]
            monkeypatch.setattr(random, "sample", lambda population, k: taken)
            with pytest.raises(OSError, match="all in use"):
                reserve_port()


def test_the_slower_of_two_processes_takes_the_others_folder(
    tmp_path: Path, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That answers: tests/commands/test_examples.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, convert = tmp_path / "sglang_pat" / smollm2_folder.name, smollm2._convert

    def overtaken(source: Path, made: Path) -> None:
        convert(source, made)
        copytree(made, folder)

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    assert smollm2.model_folder() == smollm2.model_folder() == folder  # once it is there
    assert [*folder.parent.iterdir()] == [folder]  # nothing half made stays
    made, known = (
        {file.name: file.stat().st_size for file in each.iterdir()}
        for each in (folder, smollm2_folder)
    )
    assert made == known
