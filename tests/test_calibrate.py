# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat calibrate`` from the command line to the profile, on a machine whose costs are
known; and what it says where it cannot measure."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.machines import H200, LAUNCH_S, TRUTH, SyntheticMachine

from sglang_pat import cli, gpus, profiles
from sglang_pat.bench.common.forests import Forest
from sglang_pat.calibrate import chosen, command, gpu, plans
from sglang_pat.calibrate.fit import FACTORS
from sglang_pat.planner import Plan
from sglang_pat.target import Target

# Heads of whose plans none is chosen by simulation: the synthetic machine is the cost model.
MODELLED = ("--heads", "30/10")
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 64}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang_pat" / "profiles"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a machine; the exit status."""

    def run(machine: SyntheticMachine, *options: str) -> int:
        monkeypatch.setattr(gpu, "reason_against_a_gpu", lambda: "")
        monkeypatch.setattr(gpu, "CudaMachine", lambda: machine)
        monkeypatch.setattr(sys, "argv", ["/somewhere/sglang-pat", "calibrate", *options])
        return cli.main(["calibrate", *options])

    return run


def test_what_is_measured_is_what_plans_are_made_with(
    run: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S, noise=0.003)
    before = Target.gpu(H200, **HEADS)
    assert run(machine, *MODELLED, "--json", str(tmp_path / "rows.json")) == 0
    out = capsys.readouterr().out
    (path,) = folder.iterdir()
    assert str(path) in out and "forest 13 of 13" in out and "not fitted (at most 8%)" in out
    found = profiles.read(path)
    for name, most in (
        ("bytes_per_s", 0.05),
        ("flops_per_s", 0.05),
        ("item_overhead_s", 0.25),
        ("reread_weight", 0.1),
        ("reread_factor", 0.1),
    ):
        assert getattr(found.costs, name) == pytest.approx(getattr(TRUTH, name), rel=most), name
    assert found.costs.merge_factor > TRUTH.merge_factor  # more partials have more items, too
    assert found.fit is not None and found.fit.error < chosen.MAX_ERROR
    assert 20 <= (found.fit.fitted_plans or 0) <= 40 and 10 <= found.fit.held_out_plans <= 20
    taken_over = {name for name, source in found.sources.items() if source == "H200"}
    assert taken_over == {"sm_speedup", "merge_round_s"}  # what splits are weighed by
    assert set(found.sources.values()) == {"measured", "fitted", "H200"}
    assert (found.clocks_mhz, found.versions) == (H200.clocks_mhz, H200.versions)
    options = " ".join((*MODELLED, "--json", str(tmp_path / "rows.json")))
    assert found.date and found.command == f"sglang-pat calibrate {options}"
    after = Target.gpu(H200, **HEADS)
    assert after != before and after.bytes_per_s == found.costs.bytes_per_s
    data = json.loads((tmp_path / "rows.json").read_text())
    assert len(data["rows"]) == found.fit.fitted_plans + found.fit.held_out_plans  # type: ignore[operator]
    assert {row["kind"] for row in data["rows"]} == {"fitted", "held out"}


def keeps_the_factors_of_the_h200(found: profiles.Profile) -> bool:
    """Whether only the bandwidth and the product rate are measured."""
    known = gpus.h200().costs
    own = {name for name in profiles.COSTS if found.sources[name] != "H200"}
    kept = [name for name in profiles.COSTS if name not in own]
    return own == {"bytes_per_s", "flops_per_s"} and all(
        getattr(found.costs, name) == getattr(known, name) for name in kept
    )


def test_of_a_bad_fit_only_the_rates_are_written(
    run: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured exactly but for the plans that were not fitted, which take twice as long."""
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    measured = machine.seconds
    others = {f"forest {seed}" for seed in plans.HELD_OUT}
    machine.seconds = lambda batch, plan, target: (  # type: ignore[method-assign]
        measured(batch, plan, target) * (2 if batch.name in others else 1)
    )
    assert run(machine, *MODELLED, "--json", str(tmp_path / "rows.json")) == 0
    (path,) = folder.iterdir()
    found = profiles.read(path)
    assert keeps_the_factors_of_the_h200(found) and found.fit is None
    assert found.costs.bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.05)
    assert found.costs.flops_per_s == pytest.approx(TRUTH.flops_per_s, rel=0.05)
    data = json.loads((tmp_path / "rows.json").read_text())
    # By the times of plans alone the fitted factors would have been taken.
    assert data["choice"]["ratio"] < 1.0 and data["choice"]["error"] > chosen.MAX_ERROR
    assert data["fitted"]["merge_factor"] != found.costs.merge_factor
    said = capsys.readouterr()
    assert (
        "factors          the H200's, with the measured bandwidth and product rate: the error of "
        f"the fitted ones is {data['choice']['error']:.2%}, more than 8%\n"
    ) in said.out
    assert "stop it and calibrate again" in said.out and str(path) in said.out and not said.err
    assert said.out.count("fitted, not kept") == len(FACTORS)


def test_a_gpu_that_is_disturbed_gets_no_fitted_factors(run: Any, folder: Path) -> None:
    assert run(SyntheticMachine(TRUTH, launch_s=LAUNCH_S, noise=0.2)) == 0
    assert keeps_the_factors_of_the_h200(profiles.read(next(folder.iterdir())))


@pytest.mark.parametrize(
    ("ratio", "error", "fitted", "why"),
    [
        (0.99, 0.08, True, "fitted: over 32 batches, plans by the fitted ones take 0.990"),
        (1.0, 0.02, True, "fitted: over 32 batches, plans by the fitted ones take 1.000"),
        (1.01, 0.02, False, "product rate: over 32 batches, plans by the fitted ones take 1.010"),
        (0.99, 0.0802, False, "product rate: the error of the fitted ones is 8.02%, more than 8%"),
        (0.9995, 0.1228, False, "product rate: the error of the fitted ones is 12.28%"),
        (1.01, 0.1228, False, "product rate: the error of the fitted ones is 12.28%"),
    ],
)
def test_fitted_factors_must_be_accurate_and_no_slower(
    ratio: float, error: float, fitted: bool, why: str
) -> None:
    choice = chosen.Choice(ratio, 32, 11, error)
    assert choice.fitted is fitted and why in str(choice)


def test_the_page_shows_the_line_of_an_inaccurate_fit() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "calibrate.md").read_text()
    line = f"factors          {chosen.Choice(0.9995, 32, 11, 0.1228)}"
    assert f"{line}\n{command.RUN_AGAIN}\n" in page


class MisledMachine(SyntheticMachine):
    """Plans by fitted factors take longer on it than their terms say."""

    def seconds(self, batch: Forest, plan: Plan, target: Target) -> float:
        fitted = target.merge_factor != gpus.h200().costs.merge_factor
        return super().seconds(batch, plan, target) * (1.1 if fitted else 1.0)


def test_factors_that_make_slower_plans_are_not_taken(
    run: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MisledMachine(TRUTH, launch_s=LAUNCH_S), "--json", str(tmp_path / "rows.json")) == 0
    (path,) = folder.iterdir()
    found = profiles.read(path)
    assert found.costs.bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.05)
    assert found.sources["bytes_per_s"] == "measured"
    assert keeps_the_factors_of_the_h200(found) and found.fit is None
    choice = json.loads((tmp_path / "rows.json").read_text())["choice"]
    assert choice["changed"] > 0 and 1.0 < choice["ratio"] <= 1.1 + 1e-9
    out = capsys.readouterr().out
    assert f"plans by the fitted ones take {choice['ratio']:.3f}" in out
    assert "calibrate again" not in out  # nothing is wrong with the measurement


def test_factors_that_make_faster_plans_are_taken(run: Any, folder: Path, tmp_path: Path) -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    assert run(machine, *MODELLED, "--json", str(tmp_path / "rows.json")) == 0
    found = profiles.read(next(folder.iterdir()))
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["choice"]["changed"] > 0 and data["choice"]["ratio"] < 1.0
    assert found.sources["merge_factor"] == "fitted"
    assert found.costs.merge_factor == data["fitted"]["merge_factor"]


def test_a_gpu_without_branches_keeps_the_overhead_of_the_h200(run: Any, folder: Path) -> None:
    device = replace(H200, name="NVIDIA A100-SXM4-80GB", multi_processor_count=108, major=8)
    truth = replace(TRUTH, bytes_per_s=1.7e12, flops_per_s=220e12)
    assert run(SyntheticMachine(truth, launch_s=LAUNCH_S, device=device)) == 0
    found = profiles.read(folder / "nvidia-a100-sxm4-80gb-108sm.json")
    assert found.sources["branch_overhead_s"] == "H200"
    assert found.costs.branch_overhead_s == gpus.h200().costs.branch_overhead_s
    assert found.costs.bytes_per_s == pytest.approx(1.7e12, rel=0.05)


def test_other_heads_give_the_same_rates(run: Any, folder: Path) -> None:
    assert run(SyntheticMachine(TRUTH, launch_s=LAUNCH_S), "--heads", "16/4/64") == 0
    (path,) = folder.iterdir()
    assert profiles.read(path).costs.bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.05)


def test_a_damaged_profile_does_not_stop_the_command_that_mends_it(run: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    path = folder / profiles.file_name(H200.name, H200.multi_processor_count)
    path.write_text("{")
    with pytest.raises(profiles.ProfileError):
        Target.gpu(H200, **HEADS)
    assert run(SyntheticMachine(TRUTH, launch_s=LAUNCH_S)) == 0
    assert Target.gpu(H200, **HEADS).bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.05)


def test_a_folder_of_ones_own(run: Any, folder: Path, tmp_path: Path) -> None:
    assert run(SyntheticMachine(TRUTH, launch_s=LAUNCH_S), "--out", str(tmp_path / "here")) == 0
    assert not folder.exists() and len(list((tmp_path / "here").iterdir())) == 1


def test_times_that_cannot_be_end_it(run: Any, folder: Path, capsys: Any) -> None:
    """A machine on which more work takes no more time."""
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    machine.seconds = lambda batch, plan, target: 1e-4  # type: ignore[method-assign]
    assert run(machine) == 1
    assert "took 0.0 us more, which cannot be" in capsys.readouterr().err
    assert not folder.exists()


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate"]) == 1
    said = capsys.readouterr().err
    assert "there is no CUDA device that torch" in said and "Run it where the server runs" in said


def test_heads_without_a_kernel_are_refused(run: Any, capsys: Any) -> None:
    for heads in ("32/8/96", "256/1"):
        assert run(SyntheticMachine(TRUTH, launch_s=LAUNCH_S), "--heads", heads) == 1
        assert f"--heads is {heads}: the CUDA kernels have head dims" in capsys.readouterr().err


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--heads", "32"], ["--heads", "32/5"], ["--gpu", "Voodoo"], ["--fast"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(["calibrate", *wrong])
        assert raised.value.code == 2


def test_a_gpu_without_memory_is_said(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_given: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    machine = gpu.CudaMachine.__new__(gpu.CudaMachine)
    machine.device = H200
    monkeypatch.setattr(machine, "_seconds", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 24 * 2**30))
    assert run(machine) == 1
    assert "1.0 of 24.0 GiB are free. Stop what else runs" in capsys.readouterr().err
