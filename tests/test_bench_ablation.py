# SPDX-License-Identifier: Apache-2.0
"""The variants of the ablation: what each has, that all are right, and the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit.bench import replace_device

from sglang_pat import Target, plan
from sglang_pat.bench.common.trees import PAPER_TREES, Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import ablation
from sglang_pat.bench.kernel.ablation import TREES, AblationRow, counted_bytes, variants
from sglang_pat.bench.kernel.floor import Heads

HEADS = Heads(32, 8)
NAMES = [
    "default",
    "no branches",
    "paper+cost",
    "naive+cost",
    "paper+mean",
    "pat",
    "pat-naive",
    "pat-serial",
    "pat-fixed",
    "pat-compute",
    "oracle+cost",
]


def test_variants_have_what_their_names_say() -> None:
    assert PAPER_TREES[:18] == TREES
    found = {each.name: each for each in variants(TREES[5], HEADS)}
    assert list(found) == NAMES
    chosen = {
        name: (s.policy, s.split, s.branching, s.launch)
        for name, s in ((name, each.settings) for name, each in found.items())
    }
    assert chosen == {
        "default": ("bytes", "cost", "cost", "queue"),
        "no branches": ("bytes", "cost", "never", "queue"),
        "paper+cost": ("paper", "cost", "never", "queue"),
        "naive+cost": ("naive", "cost", "never", "queue"),
        "paper+mean": ("paper", "mean", "never", "queue"),
        "pat": ("paper", "mean", "never", "streams"),
        "pat-naive": ("naive", "mean", "never", "streams"),
        "pat-serial": ("paper", "mean", "never", "serial"),
        "pat-fixed": ("paper", "mean", "never", "streams"),
        "pat-compute": ("padding", "mean", "never", "streams"),
        "oracle+cost": ("naive", "cost", "never", "queue"),
    }
    for name, each in found.items():
        target: Target = each.settings.target(each.batch, HEADS)
        made = plan(each.batch.paths, each.batch.seq_lens, target)
        tiles = set(made.items["row_tile"].tolist())
        assert not made.degraded
        assert tiles == {64} if name == "pat-fixed" else len(tiles) > 1 or name == "default"
        assert (made.branch_tokens > 0) == (name == "default")


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_every_variant_has_room(tree: Tree) -> None:
    """A plan without splits would be taken for one of the paper's splits."""
    for each in variants(tree, HEADS):
        target = each.settings.target(each.batch, HEADS)
        assert not plan(each.batch.paths, each.batch.seq_lens, target).degraded, each.name


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_no_rule_is_better_than_the_oracle(tree: Tree) -> None:
    least, counted = counted_bytes(tree, HEADS)
    assert list(counted) == ["greedy", "default", "paper", "compute", "naive"]
    assert all(found >= 0.999999 * least for found in counted.values())
    # The oracle's packs, as a plan has them before it splits.
    (oracle,) = (each for each in variants(tree, HEADS) if each.name == "oracle+cost")
    whole = replace(oracle.settings.target(oracle.batch, HEADS), num_sms=1, row_tiles=(16, 32, 64))
    made = plan(oracle.batch.paths, oracle.batch.seq_lens, whole)
    tokens = made.kv_tokens_read(sum(tree.seq_lens))
    assert tokens * 512 + made.num_partials * 8 * 516 == pytest.approx(least)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_device(monkeypatch)


@pytest.mark.usefixtures("no_device")
def test_a_run_from_arguments_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    trees = ["1,3,12_40,30,9", "1,6_40,9"]
    arguments = ["--ablation", "--heads", "8/2/64", "--trees", *trees, "--permuted"]
    assert kernel.main([*arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "8/2/64 1,6_40,9: default 10.0, no branches 11.0" in printed
    document = json.loads(file.read_text())
    assert document["kind"] == "ablation"
    rows = [AblationRow(**each) for each in document["rows"]]
    assert [each.spec for each in rows] == trees
    for each in rows:
        assert list(each.times) == list(each.items) == list(each.errors) == NAMES
        assert not each.wrong and all(error < 0.01 for error in each.errors.values())
    assert kernel.main(["--from", str(file)]) == 0
    shown = capsys.readouterr().out.partition("\n\n")[2]
    assert shown in printed and "time / floor" in shown and "geometric mean" in shown
    rows[0].errors["pat"] = float("nan")
    document["rows"][0] |= {"errors": rows[0].errors, "degraded": {"pat": "too many items"}}
    file.write_text(json.dumps(document))
    assert kernel.main(["--from", str(file)]) == 1
    complaints = capsys.readouterr().out
    assert "output of pat is off by nan" in complaints and "pat: too many items" in complaints


def test_the_tables_and_the_picture(tmp_path: Path) -> None:
    row = AblationRow(
        heads="32/8",
        spec="1,4_64,16",
        permuted=False,
        floor_us=10.0,
        noise=0.01,
        times={"default": 15.0, "pat": 20.0},
        items={},
        partials={},
        errors={},
        degraded={},
        least_bytes=1000.0,
        bytes={"greedy": 1000.0, "naive": 1500.0},
    )
    lines = ablation.table([row, replace(row, times={"default": 60.0, "pat": 20.0})])
    cells = [line.split() for line in lines]
    assert cells[1][-3:] == ["time", "/", "floor"] and cells[2] == ["tree", "default", "pat"]
    assert cells[3] == ["1,4_64,16", "1.500", "2.000"]
    assert cells[5] == ["geometric", "mean", "3.000", "2.000"]
    assert cells[-1] == ["geometric", "mean", "1.000", "1.500"]
    assert ablation.complaints([row]) == []
    pytest.importorskip("matplotlib")
    ablation.draw([row], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
