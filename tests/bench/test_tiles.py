# SPDX-License-Identifier: Apache-2.0
"""The tile solver: the paper's three constraints, one at a time, and what the command prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.tiles import LATENCY_NS, OTHER_REGISTERS, SIZES, Hardware, Tile, main, solve
from sglang_pat import _C
from sglang_pat.gpus import GPUS
from sglang_pat.target import Target

RATE = 1.8e12
A100 = replace(Hardware.of("a100"), bytes_per_s=RATE)


def tile(m: int, n: int, head_dim: int = 128, **changes: Any) -> Tile:
    found = solve(replace(A100, **changes), head_dim)
    (chosen,) = [each for each in found if (each.m, each.n) == (m, n)]
    return chosen


def test_shared_memory_by_hand() -> None:
    """Q and K/V tile of 2 bytes an element, intermediate results of 4: m h b + n h b + m h b'."""
    exact = tile(64, 32).shared_bytes
    assert exact == 64 * 128 * 2 + 32 * 128 * 2 + 64 * 128 * 4
    assert tile(64, 32, shared_per_block=exact - 1).broken == ("1s",)
    assert "1s" not in tile(64, 32, shared_per_block=exact).broken


def test_registers_of_a_thread_and_of_a_block() -> None:
    """64 rows on 128 threads: 64 accumulators of the output, 32 of scores, 16 of weights."""
    found = tile(64, 64)
    assert found.registers == (64 * 128 + 64 * 64 + 64 * 64 // 2) // 128 + OTHER_REGISTERS
    assert tile(64, 256).registers > 255 and tile(64, 256).broken == ("1r",)
    least = found.registers * 128
    assert "1r" not in tile(64, 64, registers_per_sm=least).broken
    assert tile(64, 64, registers_per_sm=least - 1).broken == ("1r",)


def test_loads_in_flight_give_the_least_n() -> None:
    """The paper's bound: n >= latency x bandwidth / (SMs x blocks x head dim x bytes)."""
    for n in SIZES:
        found = tile(128, n)
        if set(found.broken) <= {"2"}:
            least = RATE * LATENCY_NS * 1e-9 / (108 * found.blocks * 128 * 2)
            assert (n < least) == ("2" in found.broken)
    assert not tile(64, 16).broken
    assert tile(64, 16, bytes_per_s=4 * RATE).broken == ("2",)


def test_blocks_are_limited_by_the_scarcest_resource() -> None:
    assert tile(64, 64).blocks == 2  # 65 KiB each of 164
    assert tile(64, 64, registers_per_sm=20_000).blocks == 1
    assert tile(64, 64, threads_per_sm=128).blocks == 1


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("head_dim", _C.CUDA_HEAD_DIMS)
def test_our_tiles_are_marked(name: str, head_dim: int) -> None:
    found = solve(Hardware.of(name), head_dim)
    assert {(each.m, each.n) for each in found} == {(m, n) for m in SIZES for n in SIZES}
    made_for = Target.h200(num_q_heads=8, num_kv_heads=2, head_dim=head_dim, max_queries=4)
    ours = [(each.m, each.n) for each in found if each.ours]
    assert ours == [(rows, 64) for rows in made_for.row_tiles]
    assert not [each for each in solve(Hardware.of(name), 96) if each.ours]


def test_the_command_prints_a_grid_for_each_head_dim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "A100"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NVIDIA A100-SXM4-80GB, 108 SMs: 163 KiB")
    assert all(f"head dim {head_dim};" in out for head_dim in _C.CUDA_HEAD_DIMS)
    few = out.split("head dim 64;")[1].count("(2)")
    assert main(["--gpu", "A100", "--latency-ns", "2000"]) == 0
    assert capsys.readouterr().out.split("head dim 64;")[1].count("(2)") > few > 0
