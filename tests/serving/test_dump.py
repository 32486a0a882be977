# SPDX-License-Identifier: Apache-2.0
"""Batches dumped from a running server: what was sent, and what its planner made of it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import sglang_pat
from sglang_pat import cli
from sglang_pat.bench.kernel.batches import as_forest
from sglang_pat.bench.kernel.kv import slot_table
from sglang_pat.dump.records import Batch, Dump, read_dump

from . import speculation
from .conftest import Serve
from .server import Config, ServingServer
from .workloads import WORKLOADS, Workload

SYSTEM = 120  # tokens that the prompts of "ragged" begin with


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server makes it."""
    return tmp_path_factory.mktemp("dump") / "requests"


@pytest.fixture
def server(serve: Serve, folder: Path) -> ServingServer:
    # Without overlap the first decode step sees its prefill in the tree.
    config = Config(
        "dump",
        args=("--disable-overlap-schedule",),
        env=(("SGLANG_PAT_DUMP", str(folder)),),
    )
    return serve(config)


def dump_during(server: ServingServer, folder: Path, work: Workload, *options: str) -> Dump:
    """What ``sglang-pat dump`` collects while the server answers the prompts of ``work``, which it
    has in its cache. The answers must be those without a dump."""
    before = server.generate(work.prompts, work.new_tokens)
    # Else the plan of the last step might do for the same requests again.
    server.generate(WORKLOADS["disjoint"].prompts, 3)
    out = folder.parent / "dump.jsonl"
    status: list[int] = []
    command = ["dump", str(folder), "--out", str(out), *options]
    # The command's own handler of signals is for the main thread.
    thread = threading.Thread(target=lambda: status.append(run(command)))
    thread.start()
    deadline = time.monotonic() + 20
    while not list(folder.glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    during = server.generate(work.prompts, work.new_tokens)
    assert [answer.tokens for answer in during] == [answer.tokens for answer in before]
    thread.join()
    assert status == [0] and list(folder.iterdir()) == []
    return read_dump(out)


def run(command: list[str]) -> int:
    arguments = cli.make_parser().parse_args(command)
    from sglang_pat.dump.command import run_dump

    return run_dump(arguments)


def check_plans(dump: Dump) -> None:
    """The planner must make of each batch the plan that the server had."""
    for batch in dump.batches:
        if batch.made:
            plan = sglang_pat.plan(batch.paths, batch.seq_lens, dump.target)
            assert batch.plan == {
                "items": plan.num_items,
                "shared_items": plan.num_shared_items,
                "kv_tokens_read": plan.kv_tokens_read(sum(batch.seq_lens)),
            }


def test_paths_and_lengths_are_what_was_sent(server: ServingServer, folder: Path) -> None:
    work = WORKLOADS["ragged"]
    options = ("--batches", "4", "--kept-every", "3", "--seconds", "60")
    dump = dump_during(server, folder, work, *options)
    assert dump.end["end"] == "complete" and dump.end["made"] == 4 and not dump.end["left_out"]
    lengths = sorted(len(prompt) for prompt in work.prompts)
    for batch in dump.batches:
        check_batch(batch, lengths, max(work.new_tokens))
    made = [batch for batch in dump.batches if batch.made]
    assert len(made) == 4 and len(made) < len(dump.batches), "some that kept their plan"
    # Requests leave one after another, and for the others a plan is made.
    counts = [len(batch.seq_lens) for batch in made]
    assert counts[-1] < max(counts) <= len(lengths)
    assert any(batch.plan["shared_items"] for batch in made)
    check_plans(dump)
    header = dump.header
    assert header["device"] == "cpu" and header["page_size"] == 1
    assert (header["kv_dtype"], header["draft_tokens"]) == ("float32", 1)
    assert not server.counters().fallbacks


def check_batch(batch: Batch, prompts: list[int], new_tokens: int) -> None:
    """``prompts``: how many tokens each has."""
    for path, length in zip(batch.paths, batch.seq_lens, strict=True):
        ends = [end for _, _, end in path]
        assert SYSTEM in ends, "where the prompts part"
        assert ends[-1] in prompts and 0 < length - ends[-1] <= new_tokens
    shared = {path[[end for _, _, end in path].index(SYSTEM)][0] for path in batch.paths}
    assert len(shared) == 1
    own = [path[-1][0] for path in batch.paths]
    assert len(set(own)) == len(own)


def test_a_dump_is_read_by_others(
    server: ServingServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``explain``, and as a batch of the kernel benchmark."""
    dump = dump_during(server, folder, WORKLOADS["multi_level"], "--batches", "1")
    out = folder.parent / "dump.jsonl"
    for number, batch in enumerate(dump.batches, 1):
        capsys.readouterr()
        assert cli.main(["explain", "--paths", str(out), "--batch", str(number), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["sums"]["kv_tokens_read"] == batch.plan["kv_tokens_read"]
        forest = as_forest(batch)
        table, lens = slot_table(forest)
        assert lens.tolist() == batch.seq_lens
        assert set(table[table > 0].tolist()) == set(range(1, forest.unique_tokens + 1))
        assert forest.unique_tokens < sum(batch.seq_lens)


def test_no_text_is_dumped(server: ServingServer, folder: Path) -> None:
    dump_during(server, folder, WORKLOADS["shared"], "--batches", "1")
    header, *lines = map(json.loads, (folder.parent / "dump.jsonl").read_text().splitlines())
    assert set(header) == {
        *("sglang_pat_dump", "date", "asked", "device", "versions", "preset", "target"),
        *("num_q_heads", "num_kv_heads", "head_dim", "draft_tokens", "kv_dtype", "page_size"),
    }
    assert set(lines[-1]) == {"end", "made", "kept", "left_out"}
    for line in lines[:-1]:
        assert set(line) == {"number", "paths", "seq_lens", "step", "made", "plan"}
        assert all(type(value) is int for path in line["paths"] for node in path for value in node)


def test_a_request_that_is_none_is_said_and_survived(server: ServingServer, folder: Path) -> None:
    request = folder / "request.json"
    request.write_text('{"id": "../../x", "batches": 1, "kept_every": 0, "seconds": 1}')
    time.sleep(2)
    assert server.alive() and list(folder.iterdir()) == [request]
    assert server.text().count("is no request of `sglang-pat dump`: id is '../../x'") == 1
    request.unlink()
    dump = dump_during(server, folder, WORKLOADS["shared"], "--batches", "1")
    assert [batch.made for batch in dump.batches if batch.made] == [True]


def test_verify_steps_are_dumped_with_their_draft_tokens(
    serve: Serve, folder: Path, mask: Path
) -> None:
    mask.write_text("")
    config = speculation.speculating("pat", mask)
    env = (*config.env, ("SGLANG_PAT_DUMP", str(folder)))
    server = serve(replace(config, name=f"{config.name}-dump", env=env))
    work = WORKLOADS["ragged"]
    dump = dump_during(server, folder, work, "--batches", "2")
    drafted = dump.header["draft_tokens"]
    assert drafted > 1 and dump.target.draft_tokens == drafted
    check_plans(dump)
    for batch in dump.batches:
        for path, length in zip(batch.paths, batch.seq_lens, strict=True):
            assert not path or path[-1][2] <= length - drafted
