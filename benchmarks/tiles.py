# SPDX-License-Identifier: Apache-2.0
"""The offline tile solver of the PAT paper (section 5.2): which tiles of m packed rows and n tokens
a kernel can have on a GPU, and which ours have. ``python -m benchmarks.tiles --gpu A100``; needs
no GPU.

1. A block's shared memory holds the Q tile, one K or V tile and the intermediate results in fp32;
   its registers must not spill.
2. The K or V tiles that all resident blocks load at a time are at least bandwidth times latency.
3. m and n are powers of two from 16 on, for the matrix units.

The paper takes registers from compiled kernels. Here they are estimated: the fp32 accumulators of
output and scores, the weights in 16 bits, and some for addresses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from sglang_pat import _C
from sglang_pat.gpus import SHARED_PER_BLOCK, machine_of, rates_of
from sglang_pat.target import row_tiles_for

SIZES = (16, 32, 64, 128, 256)
KV_BYTES, FP32_BYTES, KIB = 2, 4, 1024
# Of a load from memory while many are on the way: about twice what one load alone takes on Ampere
# and Hopper, 250 to 350 ns.
LATENCY_NS = 600.0
WARP, WARP_ROWS, LEAST_WARPS = 32, 16, 4  # a block has a warp for 16 rows, but four at least
MAX_REGISTERS = 255  # of a thread
OTHER_REGISTERS = 40  # addresses, counters, the state of the softmax
BLOCK_RESERVE = KIB  # bytes of shared memory that CUDA takes for each block


@dataclass(frozen=True)
class Hardware:
    """A GPU's bandwidth, and an SM's resources in bytes, threads and 32-bit registers."""

    name: str
    sms: int
    bytes_per_s: float
    shared_per_block: int
    threads_per_sm: int
    registers_per_sm: int = 64 * KIB

    @classmethod
    def of(cls, name: str) -> Hardware:
        """Raises ValueError for a GPU that is not known."""
        gpu = machine_of(name)
        shared = SHARED_PER_BLOCK[gpu.major, gpu.minor]
        # Those with little shared memory have fewer threads, too (CUDA C++ programming guide).
        threads = 1536 if shared < 100 * KIB else 2048
        return cls(gpu.name, gpu.multi_processor_count, rates_of(gpu).bytes_per_s, shared, threads)


@dataclass(frozen=True)
class Tile:
    """A tile with the bytes of shared memory of its block, the registers of a thread and the
    ``blocks`` on an SM at a time. ``broken``: constraints that do not hold, "1s" (shared memory),
    "1r" (registers) and "2". ``ours``: our kernels have it."""

    m: int
    n: int
    shared_bytes: int
    registers: int
    blocks: int
    broken: tuple[str, ...]
    ours: bool

    def __str__(self) -> str:
        marks = ",".join(self.broken)
        return (f"({marks})" if marks else str(self.blocks)) + ("*" if self.ours else "")


def solve(gpu: Hardware, head_dim: int) -> list[Tile]:
    """Every tile of SIZES, feasible or not."""
    return [_tile(gpu, head_dim, m, n) for m in SIZES for n in SIZES]


def _tile(gpu: Hardware, head_dim: int, m: int, n: int) -> Tile:
    row = head_dim * KV_BYTES
    shared = m * row + n * row + m * head_dim * FP32_BYTES
    threads = WARP * max(LEAST_WARPS, m // WARP_ROWS)
    registers = ceil((m * head_dim + m * n + m * n // 2) / threads) + OTHER_REGISTERS
    blocks = min(
        (gpu.shared_per_block + BLOCK_RESERVE) // (shared + BLOCK_RESERVE),
        gpu.registers_per_sm // (registers * threads),
        gpu.threads_per_sm // threads,
    )
    broken = []
    if shared > gpu.shared_per_block:
        broken.append("1s")
    if registers > MAX_REGISTERS or registers * threads > gpu.registers_per_sm:
        broken.append("1r")
    if not broken and gpu.sms * blocks * n * row < gpu.bytes_per_s * LATENCY_NS * 1e-9:
        broken.append("2")
    has_kernels = head_dim in _C.CUDA_HEAD_DIMS and n == _C.CUDA_TILE_TOKENS
    ours = has_kernels and m in row_tiles_for(head_dim)
    return Tile(m, n, shared, registers, blocks, tuple(broken), ours)


def table(gpu: Hardware) -> list[str]:
    """A grid for each head dim, as lines."""
    in_flight = gpu.bytes_per_s * LATENCY_NS * 1e-9 / gpu.sms
    lines = [
        f"{gpu.name}, {gpu.sms} SMs: {gpu.shared_per_block / KIB:.0f} KiB of shared memory a "
        f"block, {gpu.registers_per_sm} registers an SM",
        f"{gpu.bytes_per_s / 1e12:.2f} TB/s x {LATENCY_NS:.0f} ns: {in_flight / KIB:.1f} KiB "
        "of loads in flight an SM",
        "a number: blocks at a time on an SM; *: our kernels have the tile",
        "not feasible: (1s) shared memory, (1r) registers, estimated, (2) too few loads in flight",
    ]
    for dim in _C.CUDA_HEAD_DIMS:
        tiles = solve(gpu, dim)
        lines += ["", f"head dim {dim}; m packed rows down, n tokens across"]
        lines.append(" " * 6 + "".join(f"{n:>9}" for n in SIZES))
        for m in SIZES:
            lines.append(f"{m:>6}" + "".join(f"{tile!s:>9}" for tile in tiles if tile.m == m))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiles", description=__doc__)
    how = "name of a GPU (default: h200)"
    parser.add_argument("--gpu", default="h200", help=how)
    print("\n".join(table(Hardware.of(parser.parse_args(arguments).gpu))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
