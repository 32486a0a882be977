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
from kit.machines import H200, SyntheticMachine

from sglang_pat import cli, gpus, profiles
from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.calibrate import batches, command, gpu, plans, rates
from sglang_pat.calibrate.fit import FACTORS
from sglang_pat.calibrate.machine import CalibrationError
from sglang_pat.planner import Plan
from sglang_pat.profiles import Costs
from sglang_pat.target import Target

HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 64}
TRUTH = Costs(
    bytes_per_s=3.3e12,
    flops_per_s=450e12,
    item_overhead_s=0.4e-6,
    sm_speedup=1.6,
    merge_round_s=1.1e-6,
    reread_weight=0.6,  # of a token read again: the model's factor, too
    reread_factor=0.6,
    wide_factor=0.0,
    merge_factor=1.2,
    branch_overhead_s=2e-7,
)
LAUNCH_S = 7e-6


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
    assert run(machine, "--json", str(tmp_path / "rows.json")) == 0
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
    assert found.fit is not None and found.fit.error < command.MAX_ERROR
    assert 20 <= (found.fit.fitted_plans or 0) <= 40 and 10 <= found.fit.held_out_plans <= 20
    taken_over = {name for name, source in found.sources.items() if source == "H200"}
    assert taken_over == {"sm_speedup", "merge_round_s"}  # what splits are weighed by
    assert set(found.sources.values()) == {"measured", "fitted", "H200"}
    assert (found.clocks_mhz, found.versions) == (H200.clocks_mhz, H200.versions)
    assert found.date and found.command == f"sglang-pat calibrate --json {tmp_path / 'rows.json'}"
    after = Target.gpu(H200, **HEADS)
    assert after != before and after.bytes_per_s == found.costs.bytes_per_s
    data = json.loads((tmp_path / "rows.json").read_text())
    assert len(data["rows"]) == found.fit.fitted_plans + found.fit.held_out_plans  # type: ignore[operator]
    assert {row["kind"] for row in data["rows"]} == {"fitted", "held out"}


def test_a_bad_fit_is_not_written_unless_forced(
    run: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = SyntheticMachine(TRUTH, launch_s=LAUNCH_S, noise=0.2)
    assert run(noisy) == 1
    said = capsys.readouterr()
    assert "more than 8%" in said.err and "--force" in said.err and "written" not in said.out
    assert not folder.exists()
    noisy = SyntheticMachine(TRUTH, launch_s=LAUNCH_S, noise=0.2)
    assert run(noisy, "--force") == 0
    (path,) = folder.iterdir()
    error = profiles.read(path).fit
    assert error is not None and error.error > command.MAX_ERROR


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
    known = gpus.h200().costs
    assert found.costs.bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.05)
    assert found.sources["bytes_per_s"] == "measured"
    for name in (*FACTORS, "item_overhead_s", "reread_weight"):
        assert getattr(found.costs, name) == getattr(known, name), name
        assert found.sources[name] == "H200", name
    choice = json.loads((tmp_path / "rows.json").read_text())["choice"]
    assert choice["changed"] > 0 and 1.0 < choice["ratio"] <= 1.1 + 1e-9
    assert f"plans by the fitted ones take {choice['ratio']:.3f}" in capsys.readouterr().out


def test_factors_that_make_faster_plans_are_taken(run: Any, folder: Path, tmp_path: Path) -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    assert run(machine, "--json", str(tmp_path / "rows.json")) == 0
    found = profiles.read(next(folder.iterdir()))
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["choice"]["changed"] > 0 and data["choice"]["ratio"] < 1.0
    assert found.sources["merge_factor"] == "fitted"
    assert found.costs.merge_factor == data["fitted"]["merge_factor"]


def test_the_error_is_that_on_plans_that_were_not_fitted(
    run: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that takes twice as long for the others."""
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    measured = machine.seconds
    others = {f"forest {seed}" for seed in plans.HELD_OUT}
    machine.seconds = lambda batch, plan, target: (  # type: ignore[method-assign]
        measured(batch, plan, target) * (2 if batch.name in others else 1)
    )
    assert run(machine) == 1
    assert "more than 8%" in capsys.readouterr().err and not folder.exists()


def test_the_plans_of_forests_have_every_term_and_run_on_the_machine_there_is() -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    bench = rates.Bench(machine, Heads(32, 8), gpus.vendor_profile(H200))
    rows = plans.measure(bench, range(30), lambda _line: None)
    assert 2 * 30 < len(rows) == machine.measured < 3 * 30
    assert {row.target.num_sms for row in rows} == {H200.multi_processor_count}
    assert any(row.terms.branches for row in rows) and any(row.terms.wide_tokens for row in rows)
    assert any(row.terms.reread_tokens for row in rows)


def test_a_plan_that_does_not_fit_is_not_measured() -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    bench = rates.Bench(machine, Heads(32, 8), gpus.vendor_profile(H200))
    batch = batches.forest(4)
    with pytest.raises(CalibrationError, match="the plan of forest 4 for 32/8 heads was made"):
        bench.plan(batch, max_partials=0, max_segments=0)
    assert bench.plan(batch, branching="never")[0].num_partials > 0


def test_a_gpu_without_branches_keeps_the_overhead_of_the_h200(run: Any, folder: Path) -> None:
    device = replace(H200, name="NVIDIA A100-SXM4-80GB", multi_processor_count=108, major=8)
    truth = replace(TRUTH, bytes_per_s=1.7e12, flops_per_s=220e12)
    assert run(SyntheticMachine(truth, launch_s=LAUNCH_S, device=device)) == 0
    found = profiles.read(folder / "nvidia-a100-sxm4-80gb-108sm.json")
    assert found.sources["branch_overhead_s"] == "H200"
    assert found.costs.branch_overhead_s == gpus.h200().costs.branch_overhead_s
    assert found.costs.bytes_per_s == pytest.approx(1.7e12, rel=0.05)


def test_other_heads_give_the_same_rates(run: Any, folder: Path) -> None:
    assert run(SyntheticMachine(TRUTH, launch_s=LAUNCH_S), "--heads", "16/4/64", "--force") == 0
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
    assert run(machine, "--force") == 1
    assert "took 0.0 us more, which cannot be" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("heads", [Heads(32, 8), Heads(8, 1), Heads(32, 32), Heads(16, 2, 64)])
@pytest.mark.parametrize("sms", [58, 108, 132])
def test_plans_that_measure_rates_have_what_they_measure(heads: Heads, sms: int) -> None:
    """No splits where items are counted or tokens read, and wide items for the products."""
    machine = SyntheticMachine(
        TRUTH, launch_s=LAUNCH_S, device=replace(H200, multi_processor_count=sms)
    )
    given_plans = []
    measured = machine.seconds
    machine.seconds = lambda *given: given_plans.append(given) or measured(*given)  # type: ignore
    bench = rates.Bench(machine, heads, gpus.vendor_profile(machine.device))
    rates.measure(bench, lambda _line: None)
    wide, plain = [], []
    for _batch, plan, target in given_plans:
        (wide if target.policy == "naive" and plan.num_wide_items else plain).append(plan)
    assert len(wide) == len(rates.PRODUCT_TOKENS) and len(plain) == 8
    assert [plan.num_partials for plan in plain] == [0] * 8
    once, twice = plain[-2:]
    assert once.num_shared_items == once.num_items == twice.num_items / 2


def test_an_overhead_that_hides_is_said_and_not_taken_for_nothing() -> None:
    machine = SyntheticMachine(replace(TRUTH, item_overhead_s=1e-9), launch_s=LAUNCH_S)
    said: list[str] = []
    bench = rates.Bench(machine, Heads(32, 8), gpus.vendor_profile(H200))
    assert rates.measure(bench, said.append).item_overhead_s == rates.LEAST_OVERHEAD_S
    found = command.measure(machine, Heads(32, 8), said.append)
    assert found.profile.sources["item_overhead_s"] == "chosen"
    assert any("hidden behind loads: taken as 0.1 us" in line for line in said)


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


def test_forests_are_random_but_the_same_for_a_seed() -> None:
    one, again, other = batches.forest(5), batches.forest(5), batches.forest(6)
    assert (one.paths, one.seq_lens) == (again.paths, again.seq_lens) != (other.paths, 0)
    for seed in range(40):
        batch = batches.forest(seed)
        assert batches.QUERIES[0] <= batch.num_queries <= batches.QUERIES[1]
        bounds: dict[int, tuple[int, int]] = {}
        for path, length in zip(batch.paths, batch.seq_lens, strict=True):
            ends = [0, *(end for _, _, end in path)]
            assert [start for _, start, _ in path] == ends[:-1] and length > ends[-1]
            for node, start, end in path:
                assert bounds.setdefault(node, (start, end)) == (start, end)
        tails = sum(
            n - (p[-1][2] if p else 0) for p, n in zip(batch.paths, batch.seq_lens, strict=True)
        )
        assert batch.unique_tokens == tails + sum(end - start for start, end in bounds.values())


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
