# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate --break-even``: what it models, prints, writes, draws and refuses."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit.estimates import estimated, refused
from kit.shell import fresh_shell

from sglang_pat import cli
from sglang_pat.estimate.break_even.compared import COMPARED
from sglang_pat.estimate.break_even.surface import LEVELS, REQUESTS, RESOLUTION, SHARED, Surface
from sglang_pat.estimate.options import make_model

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


@pytest.fixture(autouse=True)
def as_in_a_fresh_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_shell(monkeypatch):
        yield


def arguments_of(*given: str) -> Any:
    return cli.make_parser().parse_args(["estimate", "--break-even", *given])


def surface_of(*given: str, private: int = 256) -> Surface:
    return Surface(make_model(arguments_of(*given), REQUESTS[-1])[0], private)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_time_passes_the_level_at_the_break_even(gpu: str, level: float) -> None:
    surface = surface_of("--gpu", gpu)
    found = {requests: surface.break_even(requests, level) for requests in REQUESTS}
    assert found[1] is None, "one request has nobody to share with"
    assert found[256] is not None
    for requests, shared in found.items():
        if shared is None:
            assert surface.at(requests, SHARED[-1]).ratio > level
            continue
        assert surface.at(requests, shared).ratio <= level
        assert surface.at(requests, shared - RESOLUTION).ratio > level
        behind = [at for at in SHARED if at >= shared]
        assert all(surface.at(requests, at).ratio <= level for at in behind)
    known = [shared for shared in found.values() if shared is not None]
    assert all(more <= fewer for fewer, more in pairwise(known)), "more requests need less"


def test_nothing_shared_and_one_request_take_the_same_time() -> None:
    for row in surface_of().grid():
        for point in row:
            if point.requests == 1 or point.shared == 0:
                assert point.ratio == 1


def test_more_private_tokens_need_more_shared_ones() -> None:
    short, long = (surface_of(private=private).break_even(64, 0.9) for private in (64, 4096))
    assert short is not None and long is not None and short < long


def test_the_model_is_that_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random("prompts")
    common = rng.choices(range(50_000), k=2000)
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    own = (rng.choices(range(50_000), k=100) for _ in range(32))
    lines = [json.dumps({"input_ids": common + tail, "output_tokens": 1}) for tail in own]
    file.write_text("\n".join(lines))
    assert cli.main(["estimate", "--prompts", str(file), "--json", str(out)]) == 0
    capsys.readouterr()
    found = json.loads(out.read_text())
    point = surface_of(private=100).at(32, 2000)
    assert found["modelled_ms"] == pytest.approx(point.packed_s * 1e3)
    assert found["modelled_unpacked_ms"] == pytest.approx(point.unpacked_s * 1e3)
    assert found["ratio"] < 0.95


def test_two_gpus_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    said = estimated(capsys, "--break-even", "--json", out)
    assert said.count("time per token with pat over that without") == 2
    assert "planned for NVIDIA H100" in said and "planned for NVIDIA H200" in said
    assert said.count("every time is modelled, none is measured") == 2
    assert said.count("The model was compared with measurements of this GPU") == 2
    document = json.loads(out.read_text())
    assert [panel["gpu"] for panel in document["gpus"]] == ["h100", "h200"]
    assert document["private"] == 256 and document["versions"].keys() == {"sglang-pat"}
    for panel in document["gpus"]:
        assert panel["compared"] and len(panel["rows"]) == len(REQUESTS) * len(SHARED)
        for row in panel["rows"]:
            mark = "*" if row["ratio"] <= 0.98 else " "
            assert f"{row['ratio']:.3f}{mark}" in said + " "
        for limit in panel["break_even"]:
            cells = [f"{n:,}" if n is not None else "-" for n in limit["shared"].values()]
            assert f"{limit['requests']} {' '.join(cells)}" in " ".join(said.split())


def test_what_was_never_compared_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    never = "The model was never compared with a measurement of this GPU and model"
    for given in (
        ("--gpu", "L40S"),
        ("--gpu", "H100", "--model", "qwen3-8b"),
        ("--gpu", "H100", "--kv-dtype", "fp8_e4m3"),
        ("--gpu", "H200", "--layers", "16"),
        ("--gpu", "H200", "--tp", "4"),
    ):
        assert never in estimated(capsys, "--break-even", *given), given
    assert never not in estimated(capsys, "--break-even", "--gpu", "H200", "--kv-dtype", "fp8_e4m3")


def test_what_was_compared_is_what_was_measured() -> None:
    from test_estimate_measured import FILES

    found = set()
    for name in FILES:
        document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        settings = document["settings"]
        gpu = "h200" if "H200" in document["device"] else "h100"
        dtype = "fp8_e4m3" if "e4m3" in name else "bf16"
        found.add((gpu, settings["model"], dtype, settings["tp"]))
    assert found == COMPARED


def test_what_a_gpu_cannot_hold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    said = estimated(capsys, "--break-even", "--gpu", "L4", "--private", 2000, "--json", out)
    assert "note: 256 requests on 32,768 shared tokens take" in said
    assert "and each has 2,000 of its own" in said
    (panel,) = json.loads(out.read_text())["gpus"]
    fits = {(row["requests"], row["shared"]): row["fits"] for row in panel["rows"]}
    assert fits[1, 0] and not fits[256, 32768]


def test_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.png"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install matplotlib, or drop --plot"):
        cli.main(["estimate", "--break-even", "--plot", str(file)])
    assert not file.exists() and capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    pytest.importorskip("matplotlib")
    estimated(capsys, "--break-even", "--plot", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    estimated(
        capsys, "--break-even", "--plot", file, "--gpu", "l4", "--tp", "8"
    )  # hardly a line in it


def test_options_that_make_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (("--private", 0), "--private is 0, must be from 1 to 16,777,216"),
        (("--gpu", "H300"), "--gpu 'H300' is not known; the GPUs are h200, h100"),
        (("--base-ms", 5), "--base-ms is 5, the time of one GPU: name that one with --gpu"),
        (("--svg", "file"), "--svg draws the plan of a step of requests"),
        (("--tokenizer", "name"), "--tokenizer is for --prompts: --break-even has no text"),
        (("--json", tmp_path / "nowhere" / "file"), "No such file"),
    ):
        assert message in refused(capsys, "--break-even", *given)
    for option, value in (("--plot", "file"), ("--private", 5)):
        said = refused(capsys, "--trace", "file", option, value)
        assert "--plot and --private are for --break-even; drop them with --trace" in said
