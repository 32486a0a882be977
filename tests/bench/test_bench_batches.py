# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark on batches of a running server: what is made of a dump, what is run and
said. No GPU; it is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.bench import replace_device

from benchmarks.common.forests import Forest
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import batches
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import slot_table
from benchmarks.kernel.options import settings_of
from benchmarks.kernel.report import TreeRow
from sglang_pat import Target, plan
from sglang_pat.dump import Batch

HEADER = {
    "sglang_pat_dump": 1,
    "date": "2026-11-23T12:00:00+00:00",
    "device": "NVIDIA H200",
    "versions": {"sglang": "0.5.23"},
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "draft_tokens": 1,
    "kv_dtype": "bfloat16",
    "page_size": 1,
    "policy": "default",
}
PATHS = [[(7, 0, 40), (2**40, 40, 60)], [(7, 0, 40), (2**40, 40, 60)], [(7, 0, 40)], []]
LENGTHS = [70, 64, 45, 9]


def dump(file: Path, count: int = 3, **header: Any) -> Path:
    lines: list[dict[str, Any]] = [HEADER | header]
    for number in range(1, count + 1):
        lengths = [length + number for length in LENGTHS]
        lines.append({"paths": PATHS, "seq_lens": lengths})
    lines.append({"end": "complete"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def replay(*arguments: str) -> batches.Replay:
    return batches.replay(kernel.make_parser("").parse_args(["--batches", *arguments]))


def test_heads_and_kv_are_the_servers_unless_asked(tmp_path: Path) -> None:
    file = str(dump(tmp_path / "dump", draft_tokens=4, kv_dtype="float8_e4m3fn", num_q_heads=8))
    own = replay(file)
    assert own.heads == (Heads(8, 2, 64),)
    assert (own.draft_tokens, own.kv_dtype, own.remarks) == (4, "fp8_e4m3", ())
    chosen = settings_of(kernel.make_parser("").parse_args(["--batches", file]))
    assert (chosen.draft_tokens, chosen.kv_dtype) == (4, "fp8_e4m3")
    other = replay(file, "--heads", "16/2", "32/8", "8/2", "--kv-dtype", "bfloat16")
    assert other.kv_dtype == "bfloat16"
    assert other.remarks == ("K and V are bfloat16 here, the server's were float8_e4m3fn",)
    # Cases of one pool of K and V are neighbours.
    assert [str(case.heads) for case in other.cases] == ["16/2"] * 3 + ["8/2"] * 3 + ["32/8"] * 3
    assert {case.draft_tokens for case in other.cases} == {4}


def test_what_differs_from_the_server_is_said(tmp_path: Path) -> None:
    file = dump(tmp_path / "dump", page_size=64, kv_dtype="float32", policy="pat")
    file.write_text("\n".join(file.read_text().splitlines()[:-1]))
    dtype, pages, policy, end = replay(str(file)).remarks
    assert dtype == "K and V are bfloat16 here, the server's were float32"
    assert "had pages of 64 tokens; here every slot is a page" in pages
    assert "the server had the policy pat" in policy and "was cut off" in end


def test_a_sample_goes_from_the_first_to_the_last(tmp_path: Path) -> None:
    file = str(dump(tmp_path / "dump", 11))
    names = [case.name for case in replay(file).cases]
    assert names[:3] == ["batch-1-4/2/64", "batch-2-4/2/64", "batch-3-4/2/64"] and len(names) == 11
    assert [str(each) for each in replay(file, "--sample", "3").forests] == [
        "batch-1",
        "batch-6",
        "batch-11",
    ]
    assert [str(each) for each in replay(file, "--sample", "1").forests] == ["batch-1"]
    assert len(replay(file, "--sample", "99").forests) == 11


def test_the_planner_makes_the_same_plan_of_a_replayed_batch(tmp_path: Path) -> None:
    target = Target.h200(num_q_heads=4, num_kv_heads=2, head_dim=64, max_queries=64)
    (replayed,) = replay(str(dump(tmp_path / "dump", 1))).forests
    of_server = plan(PATHS, [length + 1 for length in LENGTHS], target)
    here = plan(replayed.paths, replayed.seq_lens, target)
    for name in ("items", "segments", "members"):
        assert np.array_equal(getattr(of_server, name), getattr(here, name))


def test_nodes_of_which_a_query_shares_a_part_are_cut() -> None:
    """Only then has each node its slots."""
    paths = [
        [(5, 0, 30), (6, 30, 50)],
        [(5, 0, 30), (6, 30, 41)],
        [(5, 0, 12)],
        [(6 + 2**40, 0, 8)],
        [(5, 0, 30), (6, 30, 50), (9, 50, 51)],
    ]
    lengths = [60, 41, 20, 9, 70]
    found = batches.as_forest(Batch(paths, lengths))
    assert found.paths == [
        [(0, 0, 12), (1, 12, 30), (2, 30, 41), (3, 41, 50)],
        [(0, 0, 12), (1, 12, 30), (2, 30, 41)],
        [(0, 0, 12)],
        [(4, 0, 8)],
        [(0, 0, 12), (1, 12, 30), (2, 30, 41), (3, 41, 50), (5, 50, 51)],
    ]
    assert found.unique_tokens == 50 + 8 + 1 + (10 + 0 + 8 + 1 + 19)
    table, _ = slot_table(found, permuted=True)
    assert set(table[table > 0].tolist()) == set(range(1, found.unique_tokens + 1))
    assert table[1, :41].tolist() == table[2, :41].tolist() != table[1, 1:42].tolist()
    target = Target.h200(num_q_heads=4, num_kv_heads=2, head_dim=64, max_queries=64)
    plans = (plan(each, lengths, target) for each in (paths, found.paths))
    first, second = ((made.num_items, made.kv_tokens_read(sum(lengths))) for made in plans)
    assert first == second


def test_queries_without_tokens_are_left_out() -> None:
    found = batches.as_forest(Batch([[], [(1, 0, 5)]], [0, 9], 4))
    assert found == Forest("batch-4", [[(0, 0, 5)]], [9])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trees", "5_20"], "--batches has batches of its own: leave --trees out"),
        (["--draft-tokens", "4"], "leave --draft-tokens out"),
        (["--ragged"], "leave --batches out"),
        (["--sample", "0"], "'0' is not a whole number, 1 or more"),
        (["--only", "batch-1"], "--only goes with --ragged only"),
        (["--heads", "64/2"], "on 64/2 heads: "),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = dump(tmp_path / "dump")
    with pytest.raises(SystemExit):
        kernel.main(["--batches", str(file), *arguments])
    assert said in capsys.readouterr().err


def test_files_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            kernel.main(list(arguments))
        return capsys.readouterr().err

    none = tmp_path / "none"
    assert "No such file" in refused("--batches", str(none))
    none.write_text("{}")
    assert "is no dump of version 1" in refused("--batches", str(none))
    assert "has no batch: no decode step" in refused("--batches", str(dump(none, 0)))
    short = dump(tmp_path / "short", draft_tokens=8)
    assert "batch 1: query 1: node 1 ends at 60, among the 8 draft" in refused(
        "--batches", str(short)
    )
    bare = dump(tmp_path / "bare", head_dim="64")
    assert "its header has no head_dim" in refused("--batches", str(bare))
    assert "--sample goes with --batches only" in refused("--sample", "3")


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_a_run_from_arguments_to_json(
    draft_tokens: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pat's plans run on the CPU's executor, beside FA3 by definition."""
    replace_device(monkeypatch)
    source = dump(tmp_path / "dump", 4, draft_tokens=draft_tokens)
    file = tmp_path / "run.json"
    arguments = ["--batches", str(source), "--sample", "3", "--permuted", "--json", str(file)]
    assert kernel.main(arguments) == 0
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["kind"] == "batches" and document["left_out"] == []
    assert document["server"]["device"] == "NVIDIA H200" and "generator" not in document
    assert document["settings"]["draft_tokens"] == draft_tokens
    found = [TreeRow(**each) for each in document["rows"]]
    assert [each.spec for each in found] == ["batch-1", "batch-3", "batch-4"]
    for each in found:
        assert (each.heads, each.draft_tokens, each.permuted) == ("4/2/64", draft_tokens, True)
        assert each.differences.keys() == {"fa3"} and not each.wrong and each.error < 0.01
    assert "batches of 2026-11-23T12:00:00+00:00, NVIDIA H200, sglang 0.5.23" in printed
    assert "fa3 and flashinfer: 0.909 (batch 0.909)" in printed
    assert kernel.main(["--from", str(file)]) == 0
    assert "batch 0.909" in capsys.readouterr().out
