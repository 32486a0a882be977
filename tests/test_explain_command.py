# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat explain`` as a command: what it takes, prints, and says of mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kit.shell import fresh_shell

import sglang_pat
from sglang_pat import cli
from sglang_pat.dump import MAX_REQUESTS
from sglang_pat.explain.command import make_target
from sglang_pat.explain.parts import Explanation
from sglang_pat.explain.reading import explain
from sglang_pat.explain.requests import (
    DEFAULT_TREE,
    MAX_DEPTH,
    parse_tree,
)
from sglang_pat.explain.text import PARTS, node_line


@pytest.fixture(autouse=True)
def as_in_a_fresh_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_shell(monkeypatch):
        yield


def explained(spec: str) -> Explanation:
    """By the defaults of the command."""
    requests = parse_tree(spec)
    parsed = cli.make_parser().parse_args(["explain"])
    target, _ = make_target(parsed, len(requests.seq_lens))
    return explain(sglang_pat.plan(requests.paths, requests.seq_lens, target), requests, target)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["explain", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    return subprocess.run(
        [Path(sys.executable).with_name("sglang-pat"), "explain", *arguments],
        capture_output=True,
        text=True,
        env=clean,
        timeout=120,
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What an explanation that exits with 1 says."""
    assert cli.main(["explain", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sglang-pat explain: ") and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("", "character 1: a number of 1 or more must stand here, not the end"),
        ("512(", "character 5: a number of 1 or more must stand here, not the end"),
        ("512(40", 'character 7: a ")" is missing'),
        ("512(40))", "character 8: ')' is not expected"),
        ("512(40,,3)", "character 8: a number of 1 or more must stand here, not ','"),
        ("512(0,3)", "character 5: a number of 1 or more must stand here, not '0'"),
        ("3x(4)", "character 3: a number of 1 or more must stand here, not '('"),
        ("12;4", "character 3: ';' is not expected"),
        ("\u0663", "character 1: a number of 1 or more must stand here"),
        ("2147483648", "a request has 2,147,483,648 tokens, more than 2,147,483,647"),
        (f"{'1(' * 65}1{')' * 65}", f"nodes are nested deeper than {MAX_DEPTH}"),
        ("200x1(200x1)", f"more than {MAX_REQUESTS:,} requests"),
        ("1,99999_1,1", f"more than {MAX_REQUESTS:,} requests"),
        ("1,8_32", "2 levels of nodes and 1 of tokens"),
    ],
)
def test_a_broken_tree_names_the_place(
    spec: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place in refused(capsys, "--tree", spec)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "h300"], "--target 'h300' is not known; the GPUs are h200, h100"),
        (["--heads", "32"], "--heads is '32', must be query heads / KV heads, as in 32/8"),
        (["--heads", "32/7"], "Target.num_q_heads is 32, must be a positive multiple of"),
        (["--heads", "8/0"], "--heads, KV heads, is 0, must be from 1 to 1,024"),
        (["--heads", "99999/1"], "--heads, query heads, is 99999, must be from 1 to 1,024"),
        (["--head-dim", "0"], "--head-dim is 0, must be from 1 to 1,024"),
        (["--head-dim", "3", "--target", "cpu"], "multiples of 8 up to 512"),
        (["--sms", "0"], "--sms is 0, must be from 1 to 65,536"),
        (["--lines", "-1"], "--lines is -1, must be 0 (all) or more"),
        (["--svg", "/no/such/folder/a.svg"], "/no/such/folder/a.svg"),
    ],
)
def test_a_wrong_option_says_what_would_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *arguments)


def test_the_options_of_a_server_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def has_branches() -> bool:
        return "branch" in printed(capsys, "--part", "items")

    assert not has_branches()
    monkeypatch.setenv("SGLANG_PAT_BRANCHING", "always")
    assert has_branches()
    branch = printed(capsys, "--part", "structs")
    assert "Segment 4: " in branch
    monkeypatch.setenv("SGLANG_PAT_BRANCHNG", "always")
    assert "SGLANG_PAT_BRANCHNG" in refused(capsys)


@pytest.mark.parametrize(
    ("name", "sms"),
    [
        ("h200", 132),
        ("h100", 132),
        ("a100", 108),
        ("l40s", 142),
        ("l4", 58),
        ("rtx4090", 128),
        ("NVIDIA RTX 3090", 82),
        ("cpu", 8),
    ],
)
def test_every_machine_is_planned_for(
    name: str, sms: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", name, "--heads", "16/4", "--head-dim", "64"]
    said = printed(capsys, *arguments)
    assert "16 query and 4 KV heads of dim 64" in said and f"with {sms} " in said
    assert "with 7 " in printed(capsys, *arguments, "--sms", "7", "--part", "sums")


def test_long_lists_are_cut_but_the_sums_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained("512(16x2000(4x1000))")
    assert cli.main(["explain", "--tree", "512(16x2000(4x1000))", "--lines", "3"]) == 0
    short = capsys.readouterr().out
    for count in (len(found.nodes), len(found.items), len(found.merges)):
        assert f"... and {count - 3:,} more: --lines 0 shows all" in short
    assert "K/V tokens read" in short and "the plan:" in short
    assert cli.main(["explain", "--tree", "512(16x2000(4x1000))", "--lines", "0"]) == 0
    whole = capsys.readouterr().out
    assert "more:" not in whole
    assert all(node_line(node) in whole for node in found.nodes)


def test_the_command_needs_neither_sglang_nor_a_gpu(tmp_path: Path) -> None:
    code = (
        "import sys; from sglang_pat import cli; status = cli.main(['explain', '--svg', 'a.svg']); "
        "import torch; print('sglang' in sys.modules, torch.cuda.is_initialized()); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"
    ElementTree.parse(tmp_path / "a.svg")


def test_wrong_usage_and_help() -> None:
    assert run("--tree", "3x9", "--paths", "f").returncode == 2
    assert run("--no-such-option").returncode == 2
    said = run("--help").stdout
    assert "--tree SPEC" in said and DEFAULT_TREE in said


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in ``sglang-pat explain | head -1``; here it leaves before the first line."""
    command = [Path(sys.executable).with_name("sglang-pat"), "explain"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("spec", [DEFAULT_TREE, "4096(8x32(8x24))", "1,8,512_32,512,256"])
def test_the_whole_is_its_parts(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {part: printed(capsys, "--tree", spec, "--part", part) for part in PARTS}
    whole = printed(capsys, "--tree", spec)
    expected = [text for part, text in parts.items() if part != "structs"]
    assert whole.split("\n\n", 1)[1] == "\n".join(expected)


def test_the_structs_are_the_plan_s_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    plan = explained(DEFAULT_TREE).plan
    lines = printed(capsys, "--part", "structs").splitlines()[1:]
    counts = (plan.num_items, plan.num_items, plan.num_members, plan.num_queries, plan.num_segments)
    assert len(lines) == sum(counts)
    assert lines[7].strip().startswith("Item 7: ") and "query 2" in lines[7]
    assert "kv_len -1" in next(line for line in lines if "Segment 9: " in line)
    members = [line for line in lines if "Member" in line]
    assert members[1].strip() == "Member 1: query 1, partial 10"
