# SPDX-License-Identifier: Apache-2.0
"""What a server on a CPU dumps: what was sent, what its planner made of it, and no text."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

import sglang_pat
from benchmarks.kernel.cases import as_forest
from benchmarks.kernel.kv import slot_table
from sglang_pat import cli
from sglang_pat.dump import Batch, Dump, read_dump

from .conftest import Serve
from .server import Config, ServingServer
from .test_verify import DRAFT_TOKENS, speculating
from .workloads import WORKLOADS

SYSTEM = 120  # tokens that the prompts of "ragged" begin with
BATCHES = 4


def dumping(config: Config, file: Path) -> Config:
    env = (("SGLANG_PAT_DUMP", str(file)), ("SGLANG_PAT_DUMP_BATCHES", str(BATCHES)))
    return replace(config, name=f"{config.name}-dump", env=config.env + env)


def dump_of(server: ServingServer, file: Path) -> Dump:
    """The whole dump of a new server to which "ragged" was sent, twice. The answers of the second
    time, which is not dumped, must be the same."""
    work = WORKLOADS["ragged"]
    during = server.ask(work)
    deadline = time.monotonic() + 20
    while '"end"' not in file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    size = file.stat().st_size
    after = server.ask(work)
    assert [answer.tokens for answer in during] == [answer.tokens for answer in after]
    assert file.stat().st_size == size
    dump = read_dump(file)
    assert len(dump.batches) == BATCHES and dump.end == {"end": "complete", "left_out": {}}
    for batch in dump.batches:  # the planner makes of each the plan that the server had
        plan = sglang_pat.plan(batch.paths, batch.seq_lens, dump.target)
        assert batch.plan == {
            "items": plan.num_items,
            "shared_items": plan.num_shared_items,
            "kv_tokens_read": plan.kv_tokens_read(sum(batch.seq_lens)),
        }
    assert any(batch.plan["shared_items"] for batch in dump.batches)
    return dump


def test_a_dump_has_what_was_sent_and_is_read_by_others(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump.jsonl"
    # Without overlap the first decode step sees its prefill in the tree.
    server = serve(dumping(Config("plain", args=("--disable-overlap-schedule",)), file))
    dump = dump_of(server, file)
    prompts = [len(prompt) for prompt in WORKLOADS["ragged"].prompts]
    for batch in dump.batches:
        check_batch(batch, prompts, max(WORKLOADS["ragged"].new_tokens))
        command = ["explain", "--paths", str(file), "--batch", str(batch.number)]
        assert cli.main(command) == 0
        assert f"tokens read: {batch.plan['kv_tokens_read']:,} " in capsys.readouterr().out
        forest = as_forest(batch)
        table, lens = slot_table(forest)
        assert lens.tolist() == batch.seq_lens
        assert set(table[table > 0].tolist()) == set(range(1, forest.unique_tokens + 1))
    assert not server.counters().fallbacks
    header, *lines = map(json.loads, file.read_text().splitlines())
    assert (header["device"], header["page_size"]) == ("cpu", 1)
    assert (header["kv_dtype"], header["draft_tokens"]) == ("float32", 1)
    for line in lines[:-1]:  # no text
        assert set(line) == {"paths", "seq_lens", "plan"}
        assert all(type(value) is int for path in line["paths"] for node in path for value in node)


def check_batch(batch: Batch, prompts: list[int], new_tokens: int) -> None:
    """``prompts``: how many tokens each has."""
    for path, length in zip(batch.paths, batch.seq_lens, strict=True):
        ends = [end for _, _, end in path]
        assert ends == ([SYSTEM] if len(batch.paths) > 1 else []), "where the prompts part"
        assert any(0 < length - prompt <= new_tokens for prompt in prompts)
    assert len({node for path in batch.paths for node, _, _ in path}) <= 1


def test_verify_steps_are_dumped_with_their_draft_tokens(
    serve: Serve, tmp_path: Path, fault: Path
) -> None:
    fault.write_text("")
    file = tmp_path / "dump.jsonl"
    dump = dump_of(serve(dumping(speculating(fault), file)), file)
    assert dump.header["draft_tokens"] == dump.target.draft_tokens == DRAFT_TOKENS
    for batch in dump.batches:
        for path, length in zip(batch.paths, batch.seq_lens, strict=True):
            assert not path or path[-1][2] <= length - DRAFT_TOKENS
