# SPDX-License-Identifier: Apache-2.0
"""The offline tile solver of the PAT paper: which tiles of m packed rows and n tokens a kernel can
have on a GPU (its constraints 1 to 3), and which of them ours have.
``python -m benchmarks.tile_solver --gpu A100``; needs no GPU.

1. A block's shared memory holds the Q tile, one K or V tile and the intermediate results in fp32;
   its registers must not spill.
2. The K or V tiles that all resident blocks load at a time are at least bandwidth times latency.
3. m and n are powers of two from 16 on, for the matrix units.

The paper takes registers from compiled kernels. Tiles that have no kernel have an estimate here:
the fp32 accumulators of output and scores, the weights in 16 bits, and some for addresses.
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
KV_BYTES, FP32_BYTES = 2, 4
# Of a load from memory while many are on the way: about twice what one load alone takes on Ampere
# and Hopper, 250 to 350 ns.
LATENCY_NS = 600.0
# Threads of a block: a warp for 16 rows, but four at least.
WARP, WARP_ROWS, LEAST_WARPS = 32, 16, 4
MAX_REGISTERS = 255  # of a thread
OTHER_REGISTERS = 40  # addresses, counters, the state of the softmax
BLOCK_RESERVE = 1024  # bytes of shared memory that CUDA takes for each block

KIB = 1024
# Threads of an SM by compute capability: the CUDA C++ programming guide's technical
# specifications. An SM has as much shared memory as its largest block and what CUDA takes for it.
_THREADS = {8: 1536, 9: 2048, 10: 2048, 12: 1536}  # by major version, but for 8.0


@dataclass(frozen=True)
class Hardware:
    """A GPU's bandwidth, and an SM's resources in bytes, 32-bit registers and threads."""

    name: str
    sms: int
    bytes_per_s: float
    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    registers_per_sm: int = 64 * KIB


def hardware_of(name: str) -> Hardware:
    """Raises ValueError for a GPU that is not known."""
    machine = machine_of(name)
    capability = (machine.major, machine.minor)
    of_block = SHARED_PER_BLOCK[capability]
    return Hardware(
        machine.name,
        machine.multi_processor_count,
        rates_of(machine).bytes_per_s,
        of_block + BLOCK_RESERVE,
        of_block,
        2048 if capability == (8, 0) else _THREADS[machine.major],
    )


@dataclass(frozen=True)
class Tile:
    """A tile with what its block takes: bytes of shared memory, registers of a thread (estimated).
    ``blocks``: resident on an SM at a time. ``broken``: constraints that do not hold, of "memory"
    and "registers" (1) and "loads" (2). ``ours``: our kernels have it."""

    m: int
    n: int
    shared_bytes: int
    registers: int
    blocks: int
    broken: tuple[str, ...]
    ours: bool


def solve(hardware: Hardware, head_dim: int, latency_ns: float = LATENCY_NS) -> list[Tile]:
    """Every tile of SIZES, feasible or not."""
    in_flight = hardware.bytes_per_s * latency_ns * 1e-9
    return [_tile(hardware, in_flight, head_dim, m, n) for m in SIZES for n in SIZES]


def _tile(hardware: Hardware, in_flight: float, head_dim: int, m: int, n: int) -> Tile:
    row = head_dim * KV_BYTES
    shared = m * row + n * row + m * head_dim * FP32_BYTES
    threads = WARP * max(LEAST_WARPS, m // WARP_ROWS)
    accumulators = m * head_dim + m * n + m * n // 2
    registers = ceil(accumulators / threads) + OTHER_REGISTERS
    blocks = min(
        hardware.shared_per_sm // (shared + BLOCK_RESERVE),
        hardware.registers_per_sm // (registers * threads),
        hardware.threads_per_sm // threads,
    )
    loads = hardware.sms * blocks * n * row
    broken = []
    if shared > hardware.shared_per_block:
        broken.append("memory")
    if registers > MAX_REGISTERS or registers * threads > hardware.registers_per_sm:
        broken.append("registers")
    if not broken and loads < in_flight:
        broken.append("loads")
    ours = (
        head_dim in _C.CUDA_HEAD_DIMS and m in row_tiles_for(head_dim) and n == _C.CUDA_TILE_TOKENS
    )
    return Tile(m, n, shared, registers, blocks, tuple(broken), ours)


_MARKS = {"memory": "1s", "registers": "1r", "loads": "2"}


def table(hardware: Hardware, dims: Sequence[int], latency_ns: float) -> list[str]:
    """A grid for each head dim, as lines."""
    in_flight = hardware.bytes_per_s * latency_ns * 1e-9 / hardware.sms
    lines = [
        f"{hardware.name}, {hardware.sms} SMs: {hardware.shared_per_block / KIB:.0f} KiB of shared "
        f"memory a block, {hardware.registers_per_sm} registers an SM",
        f"{hardware.bytes_per_s / 1e12:.2f} TB/s x {latency_ns:.0f} ns: {in_flight / KIB:.1f} KiB "
        "of loads in flight an SM",
        "a number: blocks at a time on an SM; *: our kernels have the tile",
        "not feasible: (1s) shared memory, (1r) registers, estimated, (2) too few loads in flight",
    ]
    for dim in dims:
        tiles = solve(hardware, dim, latency_ns)
        lines += ["", f"head dim {dim}; m packed rows down, n tokens across"]
        lines.append(" " * 6 + "".join(f"{n:>9}" for n in SIZES))
        for m in SIZES:
            cells = [_cell(tile) for tile in tiles if tile.m == m]
            lines.append(f"{m:>6}" + "".join(f"{cell:>9}" for cell in cells))
    return lines


def _cell(tile: Tile) -> str:
    marks = ",".join(_MARKS[each] for each in tile.broken)
    return (f"({marks})" if marks else str(tile.blocks)) + ("*" if tile.ours else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tile_solver",
        description="Print which tiles a kernel can have on a GPU by the three constraints of the "
        "PAT paper, and which of them ours have.",
    )
    parser.add_argument("--gpu", default="h200", help="name of a GPU (default: h200)")
    how = f"nanoseconds of a load from memory (default: {LATENCY_NS:.0f})"
    parser.add_argument("--latency-ns", type=float, default=LATENCY_NS, metavar="NS", help=how)
    arguments = parser.parse_args(argv)
    try:
        hardware = hardware_of(arguments.gpu)
    except ValueError as error:
        parser.error(f"--gpu {error}")
    if not arguments.latency_ns > 0:
        parser.error(f"--latency-ns is {arguments.latency_ns:g}, must be more than 0")
    print("\n".join(table(hardware, _C.CUDA_HEAD_DIMS, arguments.latency_ns)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
