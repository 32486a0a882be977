# SPDX-License-Identifier: Apache-2.0
"""The fit of the judge's costs: times of cuts are taken batch by batch, and costs that are off are
found again from them. No GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.bench import CpuClock, replace_device

from benchmarks.common.forests import PAPER_TREES, Tree, forest
from benchmarks.kernel import fit
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import E4M3, PatOptions


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_times_go_on_where_a_file_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cut that gives a plan of its own is run, in verify steps and with K/V in 8 bits, too."""
    replace_device(monkeypatch, fit)
    monkeypatch.setattr(fit, "Clock", CpuClock)
    settings = (PatOptions(), PatOptions(kv_dtype=E4M3), PatOptions(draft_tokens=4))
    monkeypatch.setattr(fit, "SETTINGS", [(Heads(4, 2, 64), each) for each in settings])
    monkeypatch.setattr(fit, "batches", lambda: (Tree((1, 4, 12), (300, 70, 9)), Tree((3,), (3,))))
    file = tmp_path / "times"
    assert fit.main(["time", str(file), "--budget-s", "0"]) == 0
    assert "0 of 5 batches are timed" in capsys.readouterr().out
    assert fit.main(["time", str(file)]) == 0
    rows = rows_of(file)
    assert [row["batch"] for row in rows] == ["1,4,12_300,70,9", "3_3"] * 2 + ["1,4,12_300,70,9"]
    assert all(row["us"] for row in rows) and len(rows[0]["us"]) > 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert fit.main(["time", str(file)]) == 0
    assert rows_of(file) == rows
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert fit.main(["costs", str(file)]) == 2
    assert "has times of none, here is another" in capsys.readouterr().err


def test_costs_are_found_from_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up times are those that the judge expects with an item's begin three times as long."""
    trees = [*PAPER_TREES[:6], forest("uniform", 0), forest("zipf", 1)]
    cases = [(Heads(32, 8), PatOptions(), tree) for tree in trees]
    monkeypatch.setattr(fit, "cases", lambda: iter(cases))
    monkeypatch.setattr(fit, "LEAST_STEP", 0.1)
    file = tmp_path / "times"
    with file.open("w") as out:
        for heads, settings, tree in cases:
            us = {}
            for cut, planner in fit.plans(heads, settings, tree).items():
                planner.costs = [cost * (1 + 2 * (i == 0)) for i, cost in enumerate(planner.costs)]
                us[cut] = 1e6 * planner.plan_again(tree.seq_lens).seconds
            row = {"device": fit.device_name(), "batch": str(tree), "heads": str(heads)}
            out.write(json.dumps(row | {"noise": 0.01, "us": us}) + "\n")
    found = fit.Fit(rows_of(file))
    before = fit.Planner(PatOptions().target(trees[0], Heads(32, 8))).costs
    truth = [3 * before[0], *before[1:]]
    assert found.regret(truth) == pytest.approx(1.0)
    assert found.loss(found.improved(list(before))) < found.loss(before)
    assert fit.main(["costs", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(before)
    file.write_text(file.read_text().replace("1,10_4096,416", "2,10_4096,416"))
    assert fit.main(["costs", str(file)]) == 2
    assert "time all anew" in capsys.readouterr().err
