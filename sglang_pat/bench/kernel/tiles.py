# SPDX-License-Identifier: Apache-2.0
"""K/V bandwidth that pat reaches by row tile and length (figures 7c and 7d of the paper):
``python -m sglang_pat.bench.kernel --tiles``.

A batch holds nodes of one length, as many queries at each as fill a row tile, and no tails: an item
a node, without splits and partial results. The kernel takes the path of a tile by the rows that an
item has, so a tile is filled, where the paper forces one on single queries; its KV tile is always
of 64 tokens. Timed are forward and merge, which looks at every query and has nothing to join. That,
q and the output count for much where many queries share few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_pat import Target
from sglang_pat.bench.common.document import Document
from sglang_pat.bench.common.figures import finish, require
from sglang_pat.bench.common.trees import Requests, Tree
from sglang_pat.bench.kernel.clock import Clock, capture
from sglang_pat.bench.kernel.floor import Heads, Rates, floor_us, kv_bytes
from sglang_pat.bench.kernel.layer import Layer, PatOptions, device_batch, error_of
from sglang_pat.bench.kernel.report import MAX_DIFFERENCE, groups

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (128, 1024, 8192)
# K/V of a batch: 20 times an H200's L2, and 0.25 ms, beside which a launch takes little.
LEAST_BYTES = 1 << 30
COLOURS = {16: "#c9b27c", 32: "#8aa0b8", 64: "#3f6f9f", 128: "#c03030"}


@dataclass(frozen=True, slots=True)
class Whole(PatOptions):
    """Options without room for partial results, which would take gigabytes for so many queries.

    With the split ``mean``, items of one length stay whole.
    """

    def target(self, tree: Requests, heads: Heads) -> Target:
        target = PatOptions.target(self, tree, heads)
        return replace(target, max_partials=1, branching="never")


class TileCase(NamedTuple):
    """``tree``: nodes with as many queries as fit ``row_tile``."""

    heads: Heads
    permuted: bool
    row_tile: int
    tree: Tree


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One batch. The time is a median in microseconds."""

    heads: str  # query/KV
    permuted: bool  # slots at random places, else those of an item consecutive
    row_tile: int
    rows: int  # packed rows of an item, queries x GQA group
    kv_len: int  # tokens of an item
    items: int
    kv_bytes: int  # K and V of the batch, each read once
    pat: float  # forward and merge of one layer
    noise: float  # between the medians of two turns, as a fraction
    gb_per_s: float  # kv_bytes over the time, 1e9 bytes a second
    share: float  # of the read ceiling of the same run
    floor_us: float  # with q and the output, and of the products if those take longer
    error: float  # against fp32, relative norm over a few queries


def tree_of(heads: Heads, row_tile: int, kv_len: int, sms: int) -> Tree:
    """Nodes of ``kv_len`` tokens without tails, each of the queries that fit ``row_tile``: at least
    LEAST_BYTES, and so many that all halves of the ``sms`` have equal work, as in the paper."""
    halves = 2 * sms
    wave = halves // math.gcd(halves, heads.kv)
    items = wave * math.ceil(LEAST_BYTES / kv_bytes(wave * kv_len, heads))
    return Tree((items, items * (row_tile // (heads.q // heads.kv))), (kv_len, 0))


def cases(heads: Sequence[Heads], lengths: Sequence[int], sms: int) -> list[TileCase]:
    """Both layouts, every length, every row tile that one query fits."""
    found = []
    for each in heads:
        shape = {"num_q_heads": each.q, "num_kv_heads": each.kv, "head_dim": each.dim}
        tiles = [t for t in Target.h200(**shape, max_queries=1).row_tiles if t >= each.q // each.kv]
        found += [
            TileCase(each, permuted, tile, tree_of(each, tile, length, sms))
            for permuted in (False, True)
            for length in lengths
            for tile in tiles
        ]
    return found


def measure(case: TileCase, timer: Clock, rates: Rates, settings: PatOptions) -> Bandwidth:
    """Capture, check and time one case; ``settings`` are ``Whole``. Raises RuntimeError for a plan
    of other items than the case's."""
    heads, permuted, row_tile, tree = case
    torch.cuda.empty_cache()
    batch = device_batch(tree, heads, permuted)
    scale = heads.dim**-0.5
    layer = Layer(batch, tree, heads, settings, scale)
    made = layer.plan
    planned = sorted(set(made.items["row_tile"].tolist()))
    if (made.num_items, planned, made.num_partials) != (tree.nodes[0], [row_tile], 0):
        raise RuntimeError(
            f"{heads} {tree}: the plan has {made.num_items} items of {planned} rows and "
            f"{made.num_partials} partials, must have {tree.nodes[0]} of {row_tile} and none"
        )
    graph = capture(layer.attend)
    assert graph.out is not None
    graph.out.fill_(float("nan"))
    graph.replay()
    times, noise = timer.compare({"pat": graph.replay})
    us = times["pat"]
    read = kv_bytes(tree.unique_tokens, heads)
    return Bandwidth(
        heads=str(heads),
        permuted=permuted,
        row_tile=row_tile,
        rows=tree.num_queries // tree.nodes[0] * (heads.q // heads.kv),
        kv_len=tree.tokens[0],
        items=tree.nodes[0],
        kv_bytes=read,
        pat=us,
        noise=noise,
        gb_per_s=read / us / 1e3,
        share=read / us * 1e6 / rates.bytes_per_s,
        floor_us=floor_us(tree, heads, rates),
        error=error_of(graph.out, batch, scale),
    )


def table(rows: Sequence[Bandwidth]) -> list[str]:
    """By length and row tile: GB/s, their share of the read ceiling, the time over the floor."""
    lines = []
    for title, members in groups(rows):
        tiles = sorted({row.row_tile for row in members})
        lines += ["", title + "; GB/s of K/V, share of the read ceiling, time / floor"]
        lines.append("  tokens" + "".join(f"{f'{tile} rows':>22}" for tile in tiles))
        by_place = {(row.kv_len, row.row_tile): row for row in members}
        for length in sorted({row.kv_len for row in members}):
            cells = [_cell(by_place.get((length, tile))) for tile in tiles]
            lines.append(f"  {length:6}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def complaints(rows: Sequence[Bandwidth]) -> list[str]:
    """Outputs that are too far off, a line each; NaN is."""
    return [
        f"{row.heads} {row.row_tile} rows, {row.kv_len} tokens: output is off by {row.error:.2g} "
        f"(at most {MAX_DIFFERENCE:g}, relative norm)"
        for row in rows
        if not row.error <= MAX_DIFFERENCE
    ]


def draw(rows: Sequence[Bandwidth], ceiling: float, path: Path) -> None:
    """Write a picture, a panel for heads and layout: a line a row tile over the length; ``ceiling``
    in bytes per second."""
    panels = groups(rows)
    figure = require().Figure(figsize=(10, 3.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, sharey=True)[:, 0]
    for axis, (title, members) in zip(axes, panels, strict=True):
        for tile in sorted({row.row_tile for row in members}):
            line = sorted((row.kv_len, row.gb_per_s) for row in members if row.row_tile == tile)
            style = {"marker": "o", "markersize": 3, "color": COLOURS[tile]}
            axis.plot(*zip(*line, strict=True), label=f"{tile} rows", **style)
        axis.axhline(ceiling / 1e9, color="black", linewidth=0.8, label="read ceiling")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens of an item")
        axis.set_ylabel("K/V, GB/s")
        finish(axis, title)
    figure.savefig(path, dpi=150)


def show(document: Document, picture: Path | None) -> int:
    """Print and draw a document of kind ``tiles``; 1 where an output was wrong, else 0."""
    rows = [Bandwidth(**row) for row in document["rows"]]
    wrong = complaints(rows)
    print("\n".join(table(rows) + wrong))
    if picture:
        draw(rows, document["bytes_per_s"], picture)
    return 1 if wrong else 0


def _cell(row: Bandwidth | None) -> str:
    return f"{row.gb_per_s:.0f} {row.share:4.0%} {row.pat / row.floor_us:5.2f}" if row else "-"
