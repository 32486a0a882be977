# SPDX-License-Identifier: Apache-2.0
"""The tile solver: the paper's three constraints, one at a time, and what the command prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_pat import _C, cli
from sglang_pat.calibrate import tiles
from sglang_pat.calibrate.tiles import KNOWN, SIZES, Tile, solve
from sglang_pat.target import Target

A100 = KNOWN["A100"]
RATE = 1.8e12


@pytest.fixture(autouse=True)
def no_profiles_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tile(m: int, n: int, head_dim: int = 128, rate: float = RATE, **changes: int) -> Tile:
    found = solve(replace(A100, **changes), rate, head_dim)
    (chosen,) = [each for each in found if (each.m, each.n) == (m, n)]
    return chosen


def test_shared_memory_by_hand() -> None:
    """Q and K/V tile of 2 bytes an element, intermediate results of 4: m h b + n h b + m h b'."""
    assert tile(64, 32).shared_bytes == 64 * 128 * 2 + 32 * 128 * 2 + 64 * 128 * 4
    assert tile(128, 128).shared_bytes == 128 * 1024
    exact = tile(64, 32).shared_bytes
    assert "memory" not in tile(64, 32, shared_memory_per_block_optin=exact).broken
    assert "memory" in tile(64, 32, shared_memory_per_block_optin=exact - 1).broken


def test_registers_of_a_thread_and_of_a_block() -> None:
    """64 rows on 128 threads: 64 accumulators of the output, 32 of scores, 16 of weights."""
    found = tile(64, 64)
    assert found.registers == (64 * 128 + 64 * 64 + 64 * 64 // 2) // 128 + tiles.OTHER_REGISTERS
    assert "registers" in tile(64, 256).broken and tile(64, 256).registers > tiles.MAX_REGISTERS
    least = found.registers * 128
    assert "registers" not in tile(64, 64, regs_per_multiprocessor=least).broken
    assert "registers" in tile(64, 64, regs_per_multiprocessor=least - 1).broken


def test_loads_in_flight_give_the_least_n() -> None:
    """The paper's bound: n >= latency x bandwidth / (SMs x blocks x head dim x bytes)."""
    for n in SIZES:
        found = tile(128, n)
        if set(found.broken) <= {"loads"}:
            least = RATE * tiles.LATENCY_NS * 1e-9 / (108 * found.blocks * 128 * 2)
            assert (n < least) == ("loads" in found.broken)
    assert not tile(64, 16).broken
    assert tile(64, 16, rate=4 * RATE).broken == ("loads",)


def test_blocks_are_limited_by_the_scarcest_resource() -> None:
    blocks = tile(64, 64).blocks
    assert blocks == 2  # 65 KiB each of 164
    assert tile(64, 64, regs_per_multiprocessor=20_000).blocks == 1
    assert tile(64, 64, max_threads_per_multi_processor=128).blocks == 1


def test_all_sizes_are_powers_of_two_from_16_on() -> None:
    found = solve(A100, RATE, 128)
    assert len(found) == len(SIZES) ** 2 and min(SIZES) == 16
    assert all(size & (size - 1) == 0 for each in found for size in (each.m, each.n))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("head_dim", _C.CUDA_HEAD_DIMS)
def test_our_tiles_are_marked(name: str, head_dim: int) -> None:
    ours = [(each.m, each.n) for each in solve(KNOWN[name], RATE, head_dim) if each.ours]
    made_for = Target.h200(num_q_heads=8, num_kv_heads=2, head_dim=head_dim, max_queries=4)
    assert ours == [(rows, 64) for rows in made_for.row_tiles]
    assert not [each for each in solve(KNOWN[name], RATE, 96) if each.ours]


def test_the_known_gpus_are_within_their_generation() -> None:
    for each in KNOWN.values():
        assert each.shared_memory_per_block_optin < each.shared_memory_per_multiprocessor
        assert _C.cuda_min_shared_bytes(128) <= each.shared_memory_per_block_optin


def test_the_command_prints_a_grid_for_each_head_dim(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--tiles", "--gpu", "A100"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NVIDIA A100-SXM4-80GB, 108 SMs: 163 KiB")
    for head_dim in _C.CUDA_HEAD_DIMS:
        assert f"head dim {head_dim};" in out
    few = out.split("head dim 64;")[1].count("(2)")
    assert cli.main(["calibrate", "--tiles", "--gpu", "A100", "--latency-ns", "2000"]) == 0
    assert capsys.readouterr().out.split("head dim 64;")[1].count("(2)") > few > 0


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "calibrate.md"
    shown = page.read_text().split("$ sglang-pat calibrate --tiles --gpu A100\n")[1].split("```")[0]
    assert cli.main(["calibrate", "--tiles", "--gpu", "A100"]) == 0
    out = capsys.readouterr().out
    for part in shown.split("...\n"):
        assert part and part in out


def test_what_was_measured_of_our_tiles_stands_below(capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(__file__).resolve().parents[1] / "docs" / "results"
    file = results / "h200-2026-11-22-kernel-tiles.json"
    assert cli.main(["calibrate", "--tiles", "--gpu", "H200", "--measured", str(file)]) == 0
    below = capsys.readouterr().out.split("measured on NVIDIA H200, 2026-11-22")[1].splitlines()
    lengths = below[3].split()
    assert lengths[0] == "64" and lengths[-1] == "16384"
    rows = {line.split()[0]: line.split()[1:] for line in below[4:]}
    assert list(rows) == ["16", "32", "64", "128"]
    page = Path(__file__).resolve().parents[1] / "docs" / "calibrate.md"
    assert "\n".join(below[1:]) in page.read_text()
    shares = [row["share"] for row in json.loads(file.read_text())["rows"] if row["row_tile"] == 16]
    assert rows["16"][0] == f"{shares[0]:.2f}" and len(rows["16"]) == len(lengths)
    for wrong in ("nowhere.json", results / "h200-2026-11-26-kernel.json"):
        assert cli.main(["calibrate", "--tiles", "--gpu", "H200", "--measured", str(wrong)]) == 1
        assert "sglang-pat calibrate: --measured: " in capsys.readouterr().err
    assert cli.main(["calibrate", "--measured", str(file)]) == 2


def test_the_gpu_at_hand_is_read_from_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = SimpleNamespace(**vars(KNOWN["L4"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    assert cli.main(["calibrate", "--tiles"]) == 0
    assert capsys.readouterr().out.startswith("NVIDIA L4, 58 SMs: 99 KiB")


def test_what_cannot_be_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate", "--tiles"]) == 1
    assert "name one with --gpu, H200, H100" in capsys.readouterr().err
    for latency in ("0", "-1", "nan"):
        assert cli.main(["calibrate", "--tiles", "--gpu", "L4", "--latency-ns", latency]) == 1
        assert "--latency-ns is" in capsys.readouterr().err
