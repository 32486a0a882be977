# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate`` as a command: what it prints, writes and says of mistakes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kit.estimates import estimated, refused
from kit.shell import fresh_shell

from sglang_pat import cli
from sglang_pat.demo.tokenizer import make_tokenizer


@pytest.fixture(autouse=True)
def as_in_a_fresh_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_shell(monkeypatch):
        yield


def prompts(folder: Path, shared: int, private: int, count: int = 64, **keys: int) -> Path:
    rng = random.Random(f"{shared} {private} {count}")
    common = rng.choices(range(50_000), k=shared)
    file = folder / "prompts.jsonl"
    lines = [
        json.dumps({"input_ids": common + rng.choices(range(50_000), k=private)} | keys)
        for _ in range(count)
    ]
    file.write_text("\n".join(lines))
    return file


def test_a_long_common_prompt_is_a_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = estimated(capsys, "--prompts", prompts(tmp_path, 8192, 128, 128), "--concurrency", 128)
    assert "verdict: gain: 0.36 of the time per token: 94% of the K/V reads go away" in said
    assert "tokens [0, 8,192)  128 requests" in said
    assert "every time is modelled, none is measured" in said
    assert "no prompts were found that a timestamp" in said


def test_private_prompts_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = estimated(capsys, "--prompts", prompts(tmp_path, 0, 500))
    assert "verdict: none: requests that run at the same time share no tokens" in said
    assert "nothing saved" in said


def test_little_says_what_would_be_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(estimated(capsys, "--prompts", prompts(tmp_path, 400, 800)).split())
    assert "verdict: little: 0.9" in said
    assert "5% would take about" in said and "longer common prompts or more requests" in said


def test_one_request_at_a_time_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = prompts(tmp_path, 4000, 50, 8)
    said = estimated(capsys, "--prompts", file, "--concurrency", 1)
    assert "verdict: none: one request runs at a time" in said


def test_a_timestamp_is_named_with_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Answer politely and briefly. Look up the order before you promise anything. " * 30
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"prompt": f"Time: 2026-11-23 10:{n:02d}:00. {text} Question {n}"})
            for n in range(32)
        )
    )
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    out = tmp_path / "out.json"
    said = estimated(
        capsys, "--prompts", file, "--tokenizer", tokenizer, "--json", out, "--gpu", "L40S"
    )
    assert "lines 1-32: date or time at token" in said and '"2026-11-23 10:00:00"' in said
    assert "at the end of the prompts a token would take 0." in " ".join(said.split())
    found = json.loads(out.read_text())
    assert found["moved"]["kv_reads_saved"] > 0.8 > found["kv_reads_saved"]
    (difference,) = found["differences"]
    assert difference["kind"] == "date or time" and len(difference["prompts"]) == 32
    assert found["verdict"]["word"] in ("none", "little")
    assert found["machine"] == "NVIDIA L40S with 142 SMs"


def test_json_and_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    file = prompts(tmp_path, 1000, 100, 40, output_tokens=50, n=2)
    estimated(
        capsys, "--prompts", file, "--concurrency", 16, "--steps", 4, "--json", out, "--svg", svg
    )
    found = json.loads(out.read_text())
    assert found["prompts"] == 40 and len(found["steps"]) == 4
    assert all(len(step["lines"]) == 16 for step in found["steps"])
    assert found["kv_tokens_held"] <= found["kv_tokens_read"] < found["kv_tokens_unpacked"]
    assert found["modelled_ms"] == pytest.approx(
        found["modelled_attention_ms"] + found["modelled_rest_ms"]
    )
    assert found["ratio"] == pytest.approx(found["modelled_ms"] / found["modelled_unpacked_ms"])
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": number,
            "input_length": 512 * 8 + 100,
            "output_length": 200,
            "hash_ids": [1, 2, 3, 4, 5, 6, *(100 * number + n for n in range(3))],
        }
        for number in range(200)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    said = estimated(capsys, "--trace", file)
    assert "200 prompts of 4,196 tokens, 64 at a time" in said
    assert "tokens [0, 3,072)  64 requests" in said and "verdict: gain" in said
    assert "timestamp" not in said  # blocks have no tokens to compare


def test_models_and_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = prompts(tmp_path, 2000, 50, 64)
    said = estimated(
        capsys, "--prompts", file, "--gpu", "rtx 4090", "--heads", "64/8", "--head-dim", 64,
        "--layers", 10, "--tp", 2, "--kv-dtype", "fp8_e4m3", "--base-ms", 12.5,
    )  # fmt: skip
    assert "10 layers with attention, 32/4 heads of 64 on each of 2, K/V in fp8_e4m3" in said
    assert "NVIDIA GeForce RTX 4090 with 128 SMs" in said and "a step that you measured" in said


def test_more_than_the_gpu_holds_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = estimated(capsys, "--prompts", prompts(tmp_path, 0, 20_000, 16), "--gpu", "L4")
    assert "note: " in said and "lower --concurrency" in said
    assert "(no more are there; --concurrency is 64)" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "--concurrency is 0, must be from 1 to 16,384"),
        (["--steps", "2000"], "--steps is 2000, must be from 1 to 1,000"),
        (["--gpu", "H300"], "--gpu 'H300' is not known; the GPUs are h200, h100"),
        (["--head-dim", "80"], "the head dim is 80: pat's kernels have"),
        (["--heads", "8"], "--heads is '8', must be QUERY/KV"),
        (["--model", "nowhere"], "--model is 'nowhere', must be a folder"),
        (["--output-tokens", "0"], "--output-tokens is 0, must be from 1"),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--prompts", prompts(tmp_path, 10, 10, 2), *arguments)


def test_options_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tokenizer is for --prompts" in refused(
        capsys, "--trace", "file", "--tokenizer", "name"
    )
    assert "drop them with --url" in refused(capsys, "--url", "http://localhost:1", "--svg", "file")
    assert "No such file" in refused(capsys, "--prompts", "nowhere.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--break-even", "--concurrency", "64"],
            "--concurrency is for --prompts and --trace; drop",
        ),
        (["--break-even", "--seconds", "3"], "--seconds is for --url; drop it with --break-even"),
        (["--trace", "file", "--output-tokens", "9"], "--output-tokens is for --prompts; drop it"),
        (["--url", "http://localhost:1", "--lines", "9"], "drop it with --url"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)
    assert "--url is ''" in refused(capsys, "--url", "")
    for arguments in ([], ["--prompts", "a", "--url", "b"]):
        with pytest.raises(SystemExit) as usage:
            cli.main(["estimate", *arguments])
        assert usage.value.code == 2
        assert "--prompts" in capsys.readouterr().err


def test_neither_sglang_nor_a_gpu_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys; from sglang_pat import cli; "
        "status = cli.main(['estimate', '--prompts', sys.argv[1]]); "
        "import torch; assert not torch.cuda.is_initialized(); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'sglang']; "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, prompts(tmp_path, 400, 20, 8)],
        cwd=tmp_path,  # a checkout would shadow the installed package
        env={name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "verdict: " in done.stdout
