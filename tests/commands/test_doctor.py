# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor``, in an environment where all is well and in broken ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import forks
from models.configs import write_config

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


def _says(run: subprocess.CompletedProcess[str], *said: tuple[str, str]) -> None:
    """Its lines have each topic with what was found."""
    for topic, found in said:
        lines = run.stdout.splitlines()
        assert any(topic in line and found in line for line in lines), (topic, run.stdout)


def test_a_good_environment(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("\npat can serve here.\n")
    _says(
        run,
        ("SGLang ", doctor.SUPPORTED_SGLANG),
        ("sglang_pat ", "_C."),
        ("settings ", "policy=default"),
        ("entry point pat ", "sglang_pat.srt.plugin:register"),
        ("entry point pat_cpu ", "sglang_pat.srt.platform:activate"),
        ("registration ", "--attention-backend pat"),
        ("interface ", "ForwardBatch.init_new"),
    )


@pytest.mark.parametrize(
    ("architecture", "flags", "policy", "said", "ends"),
    [
        (
            "Gemma2ForCausalLM",
            ("--gpu", "H100", "--max-running-requests", "64"),
            "default",
            [("layers of pat ", "6 (1, 3, 5,"), ("layers of SGLang ", "10): a sliding window")],
            "served in part",
        ),
        ("DeepseekV2ForCausalLM", (), "default", [("refused ", "uses MLA")], "refused"),
        # A wrong option of a served model, which is not judged then.
        ("LlamaForCausalLM", (), "clever", [("settings ", "POLICY=clever")], "1 to repair"),
    ],
    ids=["part", "refused", "option"],
)
def test_a_model_and_flags_are_judged_without_weights(
    architecture: str,
    flags: tuple[str, ...],
    policy: str,
    said: list[tuple[str, str]],
    ends: str,
    tmp_path: Path,
) -> None:
    model = str(write_config(tmp_path / "model", architecture))
    run = _run(tmp_path, "--model", model, *flags, fork=True, SGLANG_PAT_POLICY=policy)
    assert run.returncode == (ends != "served in part"), run.stdout + run.stderr
    assert run.stdout.endswith(f"\n{ends}.\n")
    _says(run, *said)
    assert ("BLOCK" in run.stdout) == (policy == "clever")
    # The server asked about has a GPU; and where something is to repair, no model is judged.
    assert "--device cpu" not in run.stdout or not flags
    assert "layers" not in run.stdout or policy == "default"


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
    graph = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    wrong = {"SGLANG_PLUGINS": "other", "SGLANG_PAT_POLICY": "clever", graph: "1"}
    run = _run(tmp_path, fork=True, **wrong)
    assert run.returncode == 1, run.stdout + run.stderr
    blocking = dict(re.findall(r"^BLOCK +(\S+) +(.*)$", run.stdout, re.M))
    assert blocking.keys() == {"settings", "SGLANG_PLUGINS", graph, "registration", "interface"}
    assert "-> add pat to it: SGLANG_PLUGINS=other,pat\n" in run.stdout
    assert "hook" in blocking["interface"]


@pytest.mark.parametrize(
    ("chosen", "any_gpu", "status", "found", "way_out"),
    [
        ("", False, "note", "no GPU, SGLANG_PLATFORM is not set", "--device cpu and --attention"),
        ("", True, "note", "no GPU, SGLANG_PLATFORM is not set; --gpu asks about another", ""),
        ("pat_cpu", False, "ok", "SGLANG_PLATFORM=pat_cpu: SGLang runs on the CPU", ""),
        # SGLang then skips pat as well, as one package brings both.
        ("other", False, "block", "SGLANG_PLATFORM=other", "unset SGLANG_PLATFORM"),
    ],
)
def test_where_there_is_no_gpu_the_way_to_serve_is_named(
    chosen: str,
    any_gpu: bool,
    status: str,
    found: str,
    way_out: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", chosen)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    *_, finding = doctor.examine() if chosen == "other" else [doctor._platform(any_gpu=any_gpu)]
    assert (finding.topic, finding.status) == ("platform", status)
    assert finding.found.startswith(found) and way_out in finding.way_out
    assert bool(finding.way_out) == bool(way_out)
    assert os.environ["SGLANG_PLATFORM"] == (chosen or "pat_cpu")


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


def test_a_foreign_sglang_is_a_finding_not_a_traceback() -> None:
    def check() -> Any:
        yield doctor.Finding("interface", "first")
        raise AttributeError("module has no attribute 'ForwardBatch'")

    first, second = doctor._guarded("interface", check)
    assert (first.status, second.status) == ("ok", "block") and "ForwardBatch" in second.found
