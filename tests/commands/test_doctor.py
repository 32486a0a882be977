# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor``, in an environment where all is well and in broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import forks
from kit import models as kit_models

from sglang_pat import doctor


def _run(
    folder: Path, *args: str, fork: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run it outside the checkout, without the settings of the shell that runs the tests. ``fork``:
    of a process that has imported SGLang, so not for settings that are read by an import."""
    dropped = ("SGLANG_PLATFORM", "SGLANG_PLUGINS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith("SGLANG_PAT_")
    }
    if fork:
        command = ["sglang_pat", "doctor", *args]
        return forks.run(command, env=kept | env, cwd=folder, timeout=300)
    return subprocess.run(
        [sys.executable, "-m", "sglang_pat", "doctor", *args],
        cwd=folder,
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_good_environment(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "pat can serve here."
    for topic, found in [
        ("SGLang ", doctor.SUPPORTED_SGLANG),
        ("sglang_pat ", "_C."),
        ("settings ", "policy=default"),
        ("entry point pat ", "sglang_pat.srt.plugin:register"),
        ("entry point pat_cpu ", "sglang_pat.srt.platform:activate"),
        ("registration ", "--attention-backend pat"),
        ("interface ", "ForwardBatch.init_new"),
    ]:
        assert any(topic in line and found in line for line in lines), (topic, run.stdout)


def test_a_model_and_flags_are_judged_without_weights(tmp_path: Path) -> None:
    model = kit_models.write_config(tmp_path / "model", kit_models.GEMMA2)
    flags = ("--gpu", "H100", "--max-running-requests", "64")
    run = _run(tmp_path, "--model", str(model), *flags, fork=True)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "served in part."
    assert "--device cpu" not in run.stdout, "the server asked about has a GPU"
    for topic, found in [
        ("layers of pat ", "2 (1, 3)"),
        ("layers of SGLang ", "2 (0, 2): a sliding window"),
        ("workspace ", "MB on the GPU, for batches of up to 64 requests"),
    ]:
        assert any(topic in line and found in line for line in lines), (topic, run.stdout)


def test_a_refused_model_is_told_from_a_served_one(tmp_path: Path) -> None:
    model = kit_models.write_config(tmp_path / "mla", kit_models.DEEPSEEK)
    run = _run(tmp_path, "--json", "--model", str(model), fork=True)
    assert run.returncode == 1, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert not report["ok"]
    assert report["server"]["verdict"] == "refused"
    assert "uses MLA" in report["server"]["reasons"][0]["words"]
    assert all(finding["status"] != "block" for finding in report["findings"])


def test_a_wrong_option_blocks_before_a_model_is_judged(tmp_path: Path) -> None:
    model = kit_models.write_config(tmp_path / "model", kit_models.LLAMA)
    question = ("--json", "--model", str(model))
    run = _run(tmp_path, *question, fork=True, SGLANG_PAT_POLICY="clever")
    assert run.returncode == 1, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert "server" not in report
    (blocked,) = [f for f in report["findings"] if f["status"] == "block"]
    assert "SGLANG_PAT_POLICY=clever" in blocked["found"]


def test_a_question_that_makes_no_sense_is_wrong_usage(tmp_path: Path) -> None:
    model = kit_models.write_config(tmp_path / "model", kit_models.LLAMA)
    for flags, message in (
        (("--gpu", "H900"), "'H900' is not known; the GPUs are"),
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
    ):
        run = _run(tmp_path, "--model", str(model), *flags, fork=True)
        assert run.returncode == 2, run.stdout + run.stderr
        assert message in run.stderr
        assert run.stderr.splitlines()[-1].startswith("sglang-pat doctor: ")
        assert "usage:" not in run.stderr


def test_a_path_or_gpu_that_is_not_known_is_said_before_sglang_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(**_: Any) -> Any:
        raise AssertionError("SGLang was looked at")

    monkeypatch.setattr(doctor, "examine", never)
    question = ["--model-path", "/no/such/model"]
    assert doctor.run_doctor(question=question, gpu="H100") == 2
    assert "--model /no/such/model: there is no such folder" in capsys.readouterr().err
    assert doctor.run_doctor(question=["--model-path", "name"], gpu="H900") == 2
    assert "--gpu 'H900' is not known; the GPUs are" in capsys.readouterr().err


def test_everything_wrong_at_once_is_all_named(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        "--json",
        fork=True,
        SGLANG_PLUGINS="other",
        SGLANG_PAT_POLICY="clever",
    )
    assert run.returncode == 1, run.stdout + run.stderr
    findings = {found["topic"]: found for found in json.loads(run.stdout)["findings"]}
    blocking = {topic for topic, finding in findings.items() if finding["status"] == "block"}
    assert blocking == {"settings", "SGLANG_PLUGINS", "registration", "interface"}
    assert "SGLANG_PAT_POLICY=clever" in findings["settings"]["found"]
    assert findings["SGLANG_PLUGINS"]["way_out"] == "add pat to it: SGLANG_PLUGINS=other,pat"
    assert "hook" in findings["interface"]["found"]


def test_another_platform_blocks(tmp_path: Path) -> None:
    """SGLang then skips pat as well, as one package brings both."""
    run = _run(tmp_path, "--json", SGLANG_PLATFORM="other")
    assert run.returncode == 1, run.stdout + run.stderr
    *_, platform = json.loads(run.stdout)["findings"]
    assert (platform["topic"], platform["status"]) == ("platform", "block")
    assert "SGLANG_PLATFORM=other" in platform["found"]
    assert "unset SGLANG_PLATFORM" in platform["way_out"]


def test_where_there_is_no_gpu_the_way_to_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    finding = doctor._platform()
    assert (finding.found, finding.status) == ("no GPU, SGLANG_PLATFORM is not set", "note")
    assert finding.way_out.endswith(
        "SGLANG_PLATFORM=pat_cpu, --device cpu and --attention-backend pat"
    )
    for chosen, found in (
        ("", "no GPU, SGLANG_PLATFORM is not set"),
        ("pat_cpu", "SGLANG_PLATFORM=pat_cpu: SGLang runs on the CPU"),
    ):
        monkeypatch.setenv("SGLANG_PLATFORM", chosen)
        finding = doctor._platform(any_gpu=True)
        assert finding.found == f"{found}; --gpu asks about another machine"
        assert finding.way_out == ""


def test_without_sglang_it_says_so_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.metadata.version

    def without_sglang(name: str) -> str:
        if name == "sglang":
            raise doctor.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", without_sglang)
    *_, last = doctor.examine()
    assert (last.topic, last.status) == ("SGLang", "block")
    assert "pip install sglang==" in last.way_out


def test_a_variable_that_pat_refuses_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert list(doctor._environment()) == []
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    (finding,) = doctor._environment()
    assert (finding.topic, finding.status) == ("SGLANG_USE_CPU_ENGINE", "block")


def test_a_foreign_sglang_is_a_finding_not_a_traceback() -> None:
    def check() -> Any:
        yield doctor.Finding("interface", "first")
        raise AttributeError("module has no attribute 'ForwardBatch'")

    first, second = doctor._guarded("interface", check)
    assert first.status == "ok"
    assert second.status == "block"
    assert "ForwardBatch" in second.found
