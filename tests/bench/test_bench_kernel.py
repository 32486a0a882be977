# SPDX-License-Identifier: Apache-2.0
"""Arithmetic, reports and inputs of the kernel benchmark; no GPU needed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.bench import RATES, replace_device, row

from benchmarks.common.trees import PAPER_TREES
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel.cases import Case
from benchmarks.kernel.floor import Heads, floor_us
from benchmarks.kernel.layer import PatOptions
from benchmarks.kernel.options import cases, settings_of
from benchmarks.kernel.report import (
    PEER_NAMES,
    TreeRow,
    complaints,
    summary,
)
from sglang_pat.explain.tree import Tree
from sglang_pat.target import CUTS, WITHOUT_BRANCHES


def test_the_summary_compares_with_the_floor_and_with_peers() -> None:
    """Geometric means, the worst row, and by name the rows that lose."""
    rows = [row(), row("1,8_64,16", pat=31.0), row("5_64", pat=27.0, fa3=40.0, levels=20.0)]
    floor, worst, decode, best = summary(rows)
    assert "2 trees with sharing" in floor and "pat 2.16, best peer per tree 3.00" in floor
    assert worst == "worst: 3.10 times the floor at 1,8_64,16"
    assert decode.startswith("over the better of fa3 and flashinfer: 0.775 (shared 0.719, nothing")
    assert "at most 1.033 at 1,8_64,16; more than 2% slower, 1 of 3: 1,8_64,16 1.033" in decode
    assert best.startswith("over the best peer: ") and "2 of 3: 1,8_64,16 1.033, 5_64 1.350" in best


def test_the_summary_of_drawn_batches_is_by_family() -> None:
    rows = [
        row("skew-0", pat=30.5, levels=None),  # 1.017 is within the margin
        row("skew-1", pat=31.0, fa3=30.0, flashinfer=40.0, levels=None),
        row("single-8k", fa3=30.0, flashinfer=None, levels=None),
    ]
    (text,) = summary(rows)
    assert "skew 1.025, single 0.500" in text and "1 of 3: skew-1 1.033" in text
    alone = [row("skew-0", fa3=None, flashinfer=None, levels=None)]
    assert summary(alone) == ["over the better of fa3 and flashinfer: nothing to compare with"]


def test_a_peer_that_did_not_run_has_no_mean() -> None:
    first, *_ = summary([row(), row("1,8_64,16", fa3=None)])
    assert "best peer per tree 3.00, fa3 -, flashinfer 3.00" in first


def test_rows_come_back_from_json() -> None:
    for each in (row(), row(fa3=None, permuted=True)):
        assert TreeRow(**json.loads(json.dumps(asdict(each)))) == each
    assert {"heads", "spec", "floor_us", "pat", *PEER_NAMES} <= asdict(row()).keys()


@pytest.mark.parametrize("bad", [0.02, math.nan, math.inf])
def test_outputs_that_disagree_are_named(bad: float) -> None:
    assert complaints([row()]) == []
    assert not row().wrong
    peer = row(differences={"fa3": 0.003, "levels": bad})
    assert list(peer.wrong) == ["levels"]
    assert "output of levels" in complaints([peer])[0]
    assert list(row(error=bad).wrong) == ["pat"]
    assert "too small" in complaints([row(degraded="max_items too small")])[0]


@pytest.mark.parametrize("tree", PAPER_TREES, ids=str)
def test_trees_are_parsed_back(tree: Tree) -> None:
    assert Tree.parse(str(tree)) == tree


@pytest.mark.parametrize("spec", ["", "1,2", "1,2_3", "1_2_3", "a_b", "0,4_16,16", "4,6_16,16"])
def test_a_spec_that_is_no_tree_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match="tree '" + spec):
        Tree.parse(spec)


def test_heads() -> None:
    for spec in ("32/8", "64/8/64"):
        assert str(Heads.parse(spec)) == spec
    assert Heads.parse("64/8/64") == Heads(64, 8, 64)
    for spec in ("32", "32/8/128/1", "7/2", "8/0", "x/1"):
        with pytest.raises(ValueError, match=f"heads '{spec}'"):
            Heads.parse(spec)


def test_what_is_measured() -> None:
    def todo_of(*arguments: str) -> list[Case]:
        kind, todo = cases(kernel.make_parser("").parse_args(arguments))
        assert kind == "trees"
        return todo

    assert len(set(todo_of())) == 80
    chosen = todo_of("--heads", "64/8", "28/4", "--trees", "1,4_64,16")
    assert chosen == [Case(Heads(q, kv), Tree((1, 4), (64, 16))) for q, kv in ((64, 8), (28, 4))]
    assert {str(case.heads) for case in todo_of("--quick")} == {"32/8"}


def test_the_papers_rules() -> None:
    options = kernel.make_parser("").parse_args(["--policy", "pat"])
    assert settings_of(options) == PatOptions("pat")


def test_the_floor_is_bytes_or_operations() -> None:
    """As other code gave it for an H200's rates, in microseconds."""
    for spec, floor in (("1,10_4096,416", 7.7), ("1,1024_2048,32", 48.3), ("256_1024", 243.6)):
        assert floor_us(Tree.parse(spec), Heads(32, 8), RATES) == pytest.approx(floor, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ragged", "--trees", "1,2_3,4"], "batches of its own: leave --trees out"),
        (["--trees", "1,4"], "tree '1,4' is not NODES_TOKENS"),
        (["--only", "skew"], "--only goes with --ragged only"),
        (["--sample", "9" * 10], "9999999999 is too large, must be at"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernel.main(arguments)
    assert said in capsys.readouterr().err


def test_the_target_is_that_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server's is: rates of an H200 would be wrong on an H100, branches on an A100."""
    tree, heads = PAPER_TREES[0], Heads(32, 8)
    assert PatOptions().target(tree, heads).cuts == CUTS
    assert PatOptions().target(tree, Heads(32, 8, 256)).cuts == CUTS
    a100 = SimpleNamespace(
        name="NVIDIA A100-SXM4-80GB", multi_processor_count=108, major=8, minor=0
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: a100)
    found = PatOptions().target(tree, heads)
    assert (found.num_sms, found.cuts) == (108, WITHOUT_BRANCHES)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_stored_results_are_printed_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    document = {
        "kind": "trees",
        "date": "2026-11-21T11:00:00+00:00",
        "device": "NVIDIA H200",
        "settings": asdict(PatOptions()),
        "versions": {"torch": "2.11.0"},
        "bytes_per_s": 4.4e12,
        "flops_per_s": 7.2e14,
        "empty_us": 3.2,
        "absent": {"flashinfer": "ImportError: No module named 'flashinfer'"},
        "rows": [asdict(row())],
    }
    kernel.write(document, file)
    assert kernel.main(["--from", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "4.40 TB/s" in printed and "720 TFLOP/s" in printed
    assert "without flashinfer: ImportError" in printed and "worst: 1.50" in printed
    document["rows"] = [asdict(row(error=0.5))]
    kernel.write(document, file)
    assert kernel.main(["--from", str(file)]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n{}\n", "is not JSON (Extra data"),
        ('{"device": "NVIDIA H200", "rows": []}', "is JSON, but not of a benchmark"),
        (
            '{"kind": "traces", "command": "python -m benchmarks.serving --runs 3", '
            '"settings": {}, "rows": []}',
            "rows of kind 'traces', which this program does not print: use python -m "
            "benchmarks.serving --from",
        ),
        (None, "No such file"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    if text is not None:
        file.write_text(text)
    assert kernel.main(["--from", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("benchmarks.kernel: ")
    assert message in said.err and said.err.count("\n") == 1


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_device(monkeypatch)


@pytest.mark.usefixtures("no_device")
def test_a_run_from_arguments_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    arguments = ["--heads", "4/2/64", "--trees", "1,6_40,9", "5_20", "--permuted"]
    assert kernel.main([*arguments, "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "flashinfer did not run: RuntimeError: workspace too small" in printed
    assert "output of levels is off" in printed and "output of fa3" not in printed
    document = json.loads(file.read_text())
    assert document["settings"] == asdict(PatOptions())
    assert [each["spec"] for each in document["rows"]] == ["1,6_40,9", "5_20"]
    first = TreeRow(**document["rows"][0])
    assert (first.heads, first.permuted, first.bound) == ("4/2/64", True, "memory")
    assert (first.pat, first.fa3, first.flashinfer, first.levels) == (10.0, 11.0, None, 12.0)
    assert first.error < 0.01 and set(first.wrong) == {"levels"}
    assert first.items > 0 and first.kv_read_over_unique >= 1
