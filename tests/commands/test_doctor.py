# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor``, in an environment where all is well and in broken ones; the help of every
program; and wrong usage, which is named in one line."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import forks
from models.configs import write_config

import sglang_pat
from sglang_pat import cli, doctor


def _run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it outside the checkout, without the settings of the shell that runs the tests, in a fork
    of a process that has imported SGLang."""
    names = ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_PAT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return forks.run(["sglang_pat", "doctor", *args], env=kept | env, cwd=folder, timeout=300)


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
        ("settings ", "policy=default"),
        ("entry point pat ", "sglang_pat.srt.plugin:register"),
        ("entry point pat_cpu ", "sglang_pat.srt.platform:activate"),
        ("registration ", "--attention-backend pat"),
        ("interface ", "ForwardBatch.init_new"),
    )


def test_a_model_and_flags_are_judged_without_weights(tmp_path: Path) -> None:
    """A served model's server asked about has a GPU."""
    served = str(write_config(tmp_path / "served", "Gemma2ForCausalLM"))
    flags = ("--gpu", "H100", "--max-running-requests", "64")
    run = _run(tmp_path, "--model", served, *flags)
    assert run.returncode == 0 and "--device cpu" not in run.stdout, run.stdout + run.stderr
    assert run.stdout.endswith("\nserved in part.\n")
    layers = ("layers of SGLang ", "10): a sliding window")
    _says(run, ("layers of pat ", "6 (1, 3, 5,"), layers)
    refused = str(write_config(tmp_path / "refused", "DeepseekV2ForCausalLM"))
    run = _run(tmp_path, "--model", refused)
    assert run.returncode == 1 and run.stdout.endswith("\nrefused.\n"), run.stdout + run.stderr
    _says(run, ("refused ", "uses MLA"))


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("/no/such/model", "H100", "--model /no/such/model: there is no such folder"),
        ("name", "H900", "--gpu 'H900' is not known; the GPUs are"),
    ],
)
def test_a_path_or_gpu_that_is_not_known_is_said_before_sglang_is_imported(
    model: str,
    gpu: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(doctor, "examine")
    assert doctor.run_doctor(question=["--model-path", model], gpu=gpu) == 2
    assert said in capsys.readouterr().err


def test_everything_wrong_at_once_is_all_named_and_no_model_is_judged(tmp_path: Path) -> None:
    graph = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    wrong = {"SGLANG_PLUGINS": "other", "SGLANG_PAT_POLICY": "clever", graph: "1"}
    model = str(write_config(tmp_path / "model", "LlamaForCausalLM"))
    run = _run(tmp_path, "--model", model, **wrong)
    assert run.returncode == 1 and "layers" not in run.stdout, run.stdout + run.stderr
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


PACKAGE = Path(sglang_pat.__file__).parent
ROOT = Path(__file__).parents[2]


def _programs() -> Iterator[Path]:
    """Files that are run by themselves and parse arguments."""
    beside = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for path in sorted([*PACKAGE.rglob("*.py"), *beside]):
        source = path.read_text()
        if '__name__ == "__main__"' in source and ".parse_args(" in source:
            yield path


def test_every_program_and_command_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A help text with a single % ends --help with a traceback."""
    programs: list[tuple[Any, ...]] = [(each,) for each in _programs()]
    for command in ("demo", "doctor", "explain", "estimate"):
        programs.append((PACKAGE / "__main__.py", command))
    for program, *given in programs:
        monkeypatch.setattr(sys, "argv", [str(program), *given, "--help"])
        monkeypatch.syspath_prepend(str(program.parent))  # as for a script
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
        assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: "), program


def test_a_native_module_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    """As in a checkout, whose folder has the sources only and comes first on the path. SGLang goes
    on for a server that does not ask for pat."""
    shutil.copytree(PACKAGE, tmp_path / "sglang_pat", ignore=shutil.ignore_patterns("_C.*.so"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "PYTHONPATH")},
            capture_output=True,
            text=True,
            timeout=120,
        )

    version = run("-m", "sglang_pat", "--version")
    assert (version.returncode, version.stdout) == (1, "")
    assert version.stderr.startswith("sglang-pat: its native module does not load: No module")
    assert version.stderr.count("\n") == 1 and "run it outside of the checkout" in version.stderr
    pytest.importorskip("sglang", reason="needs SGLang 0.5.23")
    load = "import sglang.srt.plugins as p; p.load_plugins(); print('goes on')"
    server = run("-c", load, "--attention-backend=pat")
    assert (server.returncode, server.stdout) == (1, "")
    assert "--attention-backend pat: sglang_pat has no native module" in server.stderr
    assert run("-c", load, "--attention-backend=fa3").stdout == "goes on\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--tp", "2"], "--tp 2: doctor looks at server flags only with --model MODEL"),
        (["doctor", "--gpu", "H100"], "--gpu: doctor looks at server flags only with --model"),
        (["explain", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as usage:
        cli.main(arguments)
    assert usage.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: sglang-pat") and message in said
