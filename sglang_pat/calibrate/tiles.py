# SPDX-License-Identifier: Apache-2.0
"""The offline tile solver of the PAT paper: which tiles of m packed rows and n tokens a kernel can
have on a GPU (its constraints 1 to 3), and which of them ours have.

1. A block's shared memory holds the Q tile, one K or V tile and the intermediate results in fp32;
   its registers must not spill.
2. The K or V tiles that all resident blocks load at a time are at least bandwidth times latency.
3. m and n are powers of two from 16 on, for the matrix units.

The paper takes registers from compiled kernels. Tiles that have no kernel have an estimate here:
the fp32 accumulators of output and scores, the weights in 16 bits, and some for addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from sglang_pat import _C
from sglang_pat.bench.common.document import Document
from sglang_pat.gpus import SHARED_PER_BLOCK
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
# specifications. An SM has as much shared memory as its largest block and what CUDA takes for it,
# and 64 Ki registers.
_THREADS = {(8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048}
_REGISTERS = 64 * KIB


@dataclass(frozen=True)
class Hardware:
    """An SM's resources in bytes, 32-bit registers and threads. Named as in torch's properties of a
    device, so that ``gpus`` takes it for one."""

    name: str
    multi_processor_count: int
    major: int
    minor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    regs_per_multiprocessor: int
    max_threads_per_multi_processor: int


def _of(name: str, sms: int, major: int, minor: int) -> Hardware:
    of_block, threads = SHARED_PER_BLOCK[major, minor], _THREADS[major, minor]
    shared = of_block + BLOCK_RESERVE
    return Hardware(name, sms, major, minor, shared, of_block, _REGISTERS, threads)


# GPUs that need not be here, by the names of ``--gpu``.
KNOWN = {
    "H200": _of("NVIDIA H200", 132, 9, 0),
    "H100": _of("NVIDIA H100 80GB HBM3", 132, 9, 0),
    "H20": _of("NVIDIA H20", 78, 9, 0),
    "A100": _of("NVIDIA A100-SXM4-80GB", 108, 8, 0),
    "A10": _of("NVIDIA A10", 72, 8, 6),
    "L40S": _of("NVIDIA L40S", 142, 8, 9),
    "L4": _of("NVIDIA L4", 58, 8, 9),
    "RTX4090": _of("NVIDIA GeForce RTX 4090", 128, 8, 9),
    "RTX3090": _of("NVIDIA GeForce RTX 3090", 82, 8, 6),
}


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


def solve(
    hardware: Any, bytes_per_s: float, head_dim: int, latency_ns: float = LATENCY_NS
) -> list[Tile]:
    """Every tile of SIZES, feasible or not. ``hardware``: ``Hardware``, or torch's properties of a
    device; ``bytes_per_s``: bandwidth of all SMs."""
    return [
        _tile(hardware, bytes_per_s * latency_ns * 1e-9, head_dim, m, n)
        for m in SIZES
        for n in SIZES
    ]


def _tile(hardware: Any, in_flight: float, head_dim: int, m: int, n: int) -> Tile:
    row = head_dim * KV_BYTES
    shared = m * row + n * row + m * head_dim * FP32_BYTES
    threads = WARP * max(LEAST_WARPS, m // WARP_ROWS)
    accumulators = m * head_dim + m * n + m * n // 2
    registers = ceil(accumulators / threads) + OTHER_REGISTERS
    blocks = min(
        hardware.shared_memory_per_multiprocessor // (shared + BLOCK_RESERVE),
        hardware.regs_per_multiprocessor // (registers * threads),
        hardware.max_threads_per_multi_processor // threads,
    )
    loads = hardware.multi_processor_count * blocks * n * row
    broken = []
    if shared > hardware.shared_memory_per_block_optin:
        broken.append("memory")
    if registers > MAX_REGISTERS or registers * threads > hardware.regs_per_multiprocessor:
        broken.append("registers")
    if not broken and loads < in_flight:
        broken.append("loads")
    ours = (
        head_dim in _C.CUDA_HEAD_DIMS and m in row_tiles_for(head_dim) and n == _C.CUDA_TILE_TOKENS
    )
    return Tile(m, n, shared, registers, blocks, tuple(broken), ours)


_MARKS = {"memory": "1s", "registers": "1r", "loads": "2"}


def table(hardware: Any, bytes_per_s: float, dims: Sequence[int], latency_ns: float) -> list[str]:
    """A grid for each head dim, as lines."""
    in_flight = bytes_per_s * latency_ns * 1e-9 / hardware.multi_processor_count
    lines = [
        f"{hardware.name}, {hardware.multi_processor_count} SMs: "
        f"{hardware.shared_memory_per_block_optin / KIB:.0f} KiB of shared memory a block, "
        f"{hardware.regs_per_multiprocessor} registers an SM",
        f"{bytes_per_s / 1e12:.2f} TB/s x {latency_ns:.0f} ns: {in_flight / KIB:.1f} KiB of loads "
        "in flight an SM",
        "a number: blocks at a time on an SM; *: our kernels have the tile",
        "not feasible: (1s) shared memory, (1r) registers, estimated, (2) too few loads in flight",
    ]
    for dim in dims:
        tiles = solve(hardware, bytes_per_s, dim, latency_ns)
        lines += ["", f"head dim {dim}; m packed rows down, n tokens across"]
        lines.append(" " * 6 + "".join(f"{n:>9}" for n in SIZES))
        for m in SIZES:
            cells = [_cell(tile) for tile in tiles if tile.m == m]
            lines.append(f"{m:>6}" + "".join(f"{cell:>9}" for cell in cells))
    return lines


def _cell(tile: Tile) -> str:
    marks = ",".join(_MARKS[each] for each in tile.broken)
    return (f"({marks})" if marks else str(tile.blocks)) + ("*" if tile.ours else "")


def measured_table(document: Document) -> list[str]:
    """What ``bench.kernel --tiles`` measured of our tiles, as lines: the share of the memory's
    bandwidth that K/V are read with, by row tile and K/V tokens. All tiles have 64 tokens."""
    rows = [row for row in document["rows"] if not row["permuted"]]
    lines = [
        f"measured on {document['device']}, {document['date'][:10]}: share of "
        f"{document['bytes_per_s'] / 1e12:.2f} TB/s with which K/V are read"
    ]
    for heads in sorted({row["heads"] for row in rows}):
        share = {
            (row["row_tile"], row["kv_len"]): row["share"] for row in rows if row["heads"] == heads
        }
        lengths = sorted({length for _, length in share})
        lines += ["", f"{heads} heads; row tiles down, K/V tokens of a query across"]
        lines.append(" " * 6 + "".join(f"{length:>7}" for length in lengths))
        for m in sorted({m for m, _ in share}):
            cells = (share.get((m, length)) for length in lengths)
            lines.append(
                f"{m:>6}" + "".join(f"{'-' if x is None else f'{x:.2f}':>7}" for x in cells)
            )
    return lines
