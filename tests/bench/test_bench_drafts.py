# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark on verify steps: what is run, what rows say and what is named. No GPU; peers
and device are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.bench import RATES, chain_batch, replace_device

from benchmarks.common.trees import PAPER_TREES
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import peers, rows
from benchmarks.kernel.cases import Case, reason_against
from benchmarks.kernel.floor import Heads, floor_us, flops, least_bytes
from benchmarks.kernel.layer import error_of
from benchmarks.kernel.options import cases, settings_of
from benchmarks.kernel.report import TreeRow
from sglang_pat.explain.tree import Tree


def test_errors_are_of_all_draft_tokens_of_a_query() -> None:
    batch, expected = chain_batch(Tree((1, 3), (9, 5)), 4, permuted=True)
    assert error_of(expected, batch, 0.25) < 1e-6
    for draft_token in range(4):
        wrong = expected.clone()
        wrong[draft_token] *= 2
        assert error_of(wrong, batch, 0.25) > 0.1
    # Of a batch with more queries than are looked at, those from the first to the last.
    many, right = chain_batch(Tree((1, 20), (9, 5)), 2, permuted=False)
    for query, is_seen in ((0, True), (1, False), (19, True)):
        wrong = right.clone()
        wrong[2 * query + 1] *= 2
        assert (error_of(wrong, many, 0.25) > 0.01) is is_seen


def test_the_floor_counts_draft_tokens() -> None:
    heads, tree = Heads(32, 8), Tree((1, 64), (8192, 128))
    q_and_out = 2 * 64 * 32 * 128 * 2
    assert least_bytes(tree, heads, 2, 4) == least_bytes(tree, heads) + 3 * q_and_out
    # The first of two draft tokens does not attend to the second.
    assert flops(tree, heads, 2) == 2 * flops(tree, heads) - 4 * 64 * 32 * 128
    assert flops(tree, heads, 4) == 4 * flops(tree, heads) - 6 * 4 * 64 * 32 * 128
    # 64 query heads over one prefix of 8192 are bound by arithmetic, with four times the queries.
    assert floor_us(tree, heads, RATES, 2, 4) > 3.9 * flops(tree, heads) / RATES.flops_per_s * 1e6


def test_what_is_measured() -> None:
    def todo_of(*arguments: str) -> list[Case]:
        kind, todo = cases(kernel.make_parser("").parse_args(arguments))
        assert kind == "drafts"
        return todo

    todo = todo_of("--draft-tokens", "4,8")
    assert len(todo) == 2 * 3 * (4 + len(PAPER_TREES)) == len(set(todo))
    assert {str(case.heads) for case in todo} == {"32/8", "64/8", "8/1"}
    specs = [str(case.requests) for case in todo[:4]]
    assert specs == ["1,64_8192,128", "64_1024", "1,16_4096,300", "16_2048"]
    quick = todo_of("--draft-tokens", "4", "--quick")
    assert [each.name for each in quick] == [f"{spec}-32/8 x 4" for spec in specs]
    chosen = todo_of("--draft-tokens", "2", "--heads", "28/4", "--trees", "5_64")
    assert chosen == [Case(Heads(28, 4), Tree((5,), (64,)), 2)]
    options = kernel.make_parser("").parse_args(["--draft-tokens", "8,4,8"])
    assert options.draft_tokens == (8, 4) and settings_of(options).draft_tokens == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft-tokens", "0"], "'0' are not whole numbers from 1 to 128, as in 4,8"),
        (["--draft-tokens", "4,"], "'4,' are not whole numbers"),
        (["--draft-tokens", "4", "--ragged"], "--ragged has batches of its own: leave --draft-tok"),
        (
            ["--draft-tokens", "4,40"],
            "--draft-tokens 40: the tails of tree 1,256_256,32 have 32 tokens, which must hold",
        ),
        (["--draft-tokens", "6", "--trees", "5_64", "1,4_64,5"], "tails of tree 1,4_64,5 have 5"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernel.main(arguments)
    assert said in capsys.readouterr().err


def test_what_the_kernels_do_not_take() -> None:
    assert reason_against(Heads(32, 8), 32) == ""
    assert "draft_tokens is 33" in reason_against(Heads(32, 8), 33)
    assert reason_against(Heads(64, 8), 16) == ""
    assert reason_against(Heads(32, 8, 256), 32)


def test_a_run_from_arguments_to_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pat's plans run on the CPU's executor, beside FA3 by definition."""
    replace_device(monkeypatch)
    monkeypatch.setattr(rows, "PEERS", {name: peers.PEERS[name] for name in ("fa3", "levels")})
    asked: dict[str, Any] = {}

    def usable(heads: Any, names: Any, **options: Any) -> dict[str, str]:
        asked.update(options)
        return {"fa3": "", "levels": "", "flashinfer": "ImportError: none"}

    monkeypatch.setattr(kernel, "usable", usable)
    file = tmp_path / "run.json"
    arguments = ["--draft-tokens", "1,3,9", "--heads", "4/2/64", "32/2/64"]
    arguments += ["--trees", "1,6_40,9", "5_20", "--permuted", "--json", str(file)]
    assert kernel.main(arguments) == 0
    assert asked["draft_tokens"] == 9
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["kind"] == "drafts" and document["settings"]["draft_tokens"] == [1, 3, 9]
    assert len(document["left_out"]) == 1 and document["left_out"][0].startswith("32/2/64 x 9: ")
    found = [TreeRow(**each) for each in document["rows"]]
    assert len(found) == 2 * 5
    for each in found:
        assert each.differences.keys() == {"fa3", "levels"} and not each.wrong
        assert (each.pat, each.fa3, each.levels) == (10.0, 11.0, 12.0)
        assert each.permuted and each.error < 0.01
    assert [each.draft_tokens for each in found] == [1] * 4 + [3] * 4 + [9] * 2
    assert "5_20-4/2/64 x 9 10.0 us" in printed and "0.909 (shared 0.909, nothing" in printed
    assert kernel.main(["--from", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.partition("\n\n")[2] in printed and "left out: 32/2/64 x 9" in shown
