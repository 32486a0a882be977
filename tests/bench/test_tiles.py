# SPDX-License-Identifier: Apache-2.0
"""The tile solver: the paper's three constraints, one at a time, and what the command prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.tiles import LATENCY_NS, OTHER_REGISTERS, SIZES, Hardware, Tile, main, solve
from sglang_pat import _C
from sglang_pat.gpus import GPUS
from sglang_pat.target import row_tiles_for

RATE = 1.8e12
A100 = replace(Hardware.of("a100"), bytes_per_s=RATE)


def tile(m: int, n: int, head_dim: int = 128, **changes: Any) -> Tile:
    found = solve(replace(A100, **changes), head_dim)
    (chosen,) = [each for each in found if (each.m, each.n) == (m, n)]
    return chosen


def test_the_papers_constraints_by_hand() -> None:
    """Shared memory: Q and K/V tile of 2 bytes an element, intermediate results of 4. Registers of
    64 rows on 128 threads: accumulators of the output, scores, weights of half the size."""
    bytes_ = 64 * 128 * 2 + 64 * 128 * 2 + 64 * 128 * 4
    registers = (64 * 128 + 64 * 64 + 64 * 64 // 2) // 128 + OTHER_REGISTERS
    found = tile(64, 64)
    assert (found.shared_bytes, found.registers, found.broken) == (bytes_, registers, ())
    for name, least, broken in (
        ("shared_per_block", bytes_, "1s"),
        ("registers_per_sm", registers * 128, "1r"),
    ):
        assert broken not in tile(64, 64, **{name: least}).broken
        assert tile(64, 64, **{name: least - 1}).broken == (broken,)
    # The paper's bound: n >= latency x bandwidth / (SMs x blocks x head dim x bytes).
    most = 16 * 108 * tile(64, 16).blocks * 128 * 2 / (LATENCY_NS * 1e-9)
    assert tile(64, 16, bytes_per_s=0.999 * most).broken == ()
    assert tile(64, 16, bytes_per_s=1.001 * most).broken == ("2",)
    assert tile(64, 256).registers > 255 and tile(64, 256).broken == ("1r",)
    assert tile(64, 64).blocks == 2  # 65 KiB each of 164
    assert tile(64, 64, registers_per_sm=20_000).blocks == 1
    assert tile(64, 64, threads_per_sm=128).blocks == 1


def test_the_command_prints_a_grid_for_each_head_dim_and_marks_our_tiles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in GPUS:
        assert main(["--gpu", name]) == 0
        _, *grids = capsys.readouterr().out.split("head dim ")
        for dim, grid in zip(_C.CUDA_HEAD_DIMS, grids, strict=True):
            assert grid.startswith(f"{dim};") and len(grid.split()) > len(SIZES) ** 2
            assert grid.count("*") == len(row_tiles_for(dim))
