# SPDX-License-Identifier: Apache-2.0
"""Begin, end, SM and item of all that pat's forward runs for one layer, as the kernel itself notes
them (figure 12 of the paper): ``python -m sglang_pat.bench.kernel --timeline``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat.bench.common.figures import finish, require
from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.clock import Clock
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.kv import quantised
from sglang_pat.bench.kernel.layer import Layer, PatOptions, device_batch
from sglang_pat.bench.kernel.report import title

WARMUPS = 10
# Of csrc/cuda/tiles.h: consumer warps of a half, packed rows that a half takes at a time.
WARPS = 4
PART_ROWS = 64
TAIL = 0.1  # of the span, at its end
COLOURS = ("#c9b27c", "#8aa0b8", "#3f6f9f", "#c03030", "#402040", "#6a9a5b")


@dataclass(frozen=True, slots=True)
class Bar:
    """An item and KV head, or up to 64 of its packed rows, on a half of an SM. A wide item and an
    item of a joint plan, on which both halves work, have a bar on each. Times in nanoseconds since
    the first begin."""

    item: int  # in the plan
    head: int  # KV head
    sm: int
    half: int
    warp: int | None  # that did it alone, as narrow units are done; None: all four
    rows: int  # packed; 0: the half only loaded K/V for the other
    row_tile: int  # of the item
    begin_ns: int
    end_ns: int

    @property
    def kind(self) -> str:
        return f"{self.row_tile} rows" + ("" if self.warp is None else ", one warp")

    @property
    def warps(self) -> Sequence[int]:
        return range(WARPS) if self.warp is None else (self.warp,)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One forward over a cold L2."""

    heads: str  # query/KV
    spec: str  # the tree
    permuted: bool
    sms: int  # of the device
    halves: int  # of an SM
    call_us: float  # between events around forward and merge
    bars: list[Bar]  # by begin

    @property
    def span_ns(self) -> int:
        """From the first begin to the last end."""
        return max(bar.end_ns for bar in self.bars)

    def to_json(self) -> dict[str, Any]:
        """With the bars by columns."""
        columns = {name: [getattr(bar, name) for bar in self.bars] for name in _BAR_FIELDS}
        return {name: getattr(self, name) for name in _FIELDS} | {"bars": columns}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Timeline:
        columns = [found["bars"][name] for name in _BAR_FIELDS]
        bars = [Bar(*values) for values in zip(*columns, strict=True)]
        return cls(**found | {"bars": bars})


_BAR_FIELDS = [field.name for field in fields(Bar)]
_FIELDS = [field.name for field in fields(Timeline)]


@dataclass(frozen=True, slots=True)
class Kind:
    """Durations of the bars of one kind, in microseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    max: float
    last_end: float  # since the first begin


def trace_rows(items: npt.NDArray[Any], group: int, num_kv_heads: int) -> int:
    """Rows that ``Workspace.trace`` needs for a plan's ``items``: the count, and at most one for
    each warp of both halves for every 64 of an item's ``group`` x ``num_queries`` packed rows."""
    parts = -(-items["num_queries"].astype(np.int64) * group // PART_ROWS)
    return 1 + 2 * WARPS * num_kv_heads * int(parts.sum())


def bars_of(words: npt.NDArray[np.int64], items: npt.NDArray[Any]) -> list[Bar]:
    """What a trace int64 [rows, 4] of the plan of ``items`` says (``_C.decode_cuda`` has its form).

    The entries of a half's warps for the same rows become one bar. Raises ValueError for a trace
    that was not written, is too short for its entries or lacks some warp's.
    """
    count = int(words[0, 0])
    if not 1 <= count < len(words):
        raise ValueError(
            f"a trace of {len(words)} rows counts {count} entries, must be 1 to {len(words) - 1}"
        )
    entries = words[1 : 1 + count]
    zero = int(entries[:, 2].min())
    done: Counter[tuple[int, ...]] = Counter()
    found: defaultdict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for unit, place, begin, end in entries.tolist():
        item, head = unit >> 32, unit & 0xFFFFFFFF
        sm, half = place >> 32, place >> 24 & 0xFF
        warp, rows = place >> 16 & 0xFF, place & 0xFFFF
        # Each warp enters the parts of an item in their order: its n-th entry is the n-th part.
        part = done[item, head, sm, half, warp]
        done[item, head, sm, half, warp] += 1
        found[item, head, sm, half, rows, part].append((warp, begin - zero, end - zero))
    bars = []
    for (item, head, sm, half, rows, _), parts in found.items():
        warps, begins, ends = zip(*parts, strict=True)
        if len(warps) not in (1, WARPS):
            raise ValueError(
                f"item {item}, KV head {head}, SM {sm}: entries of warps {sorted(warps)}, must be "
                f"of one or of all {WARPS}"
            )
        warp = warps[0] if len(warps) == 1 else None
        tile = int(items["row_tile"][item])
        bars.append(Bar(item, head, sm, half, warp, rows, tile, min(begins), max(ends)))
    return sorted(bars, key=lambda bar: (bar.begin_ns, bar.sm, bar.half))


def trace(layer: Layer, timer: Clock) -> tuple[npt.NDArray[np.int64], float]:
    """The trace, int64 [rows, 4], of a layer's forward over a cold L2, after some runs without;
    and microseconds of forward and merge."""
    workspace, plan = layer.workspace, layer.plan
    timer.times_us(layer.attend, WARMUPS)
    group = plan.num_q_heads // plan.num_kv_heads
    rows = trace_rows(plan.items, group, plan.num_kv_heads)
    words = torch.zeros((rows, 4), dtype=torch.int64, device=workspace.device)
    workspace.trace = words
    try:
        (call_us,) = timer.times_us(layer.attend, 1)
    finally:
        workspace.trace = None
    return words.cpu().numpy(), call_us


def record(
    tree: Requests, heads: Heads, permuted: bool, settings: PatOptions, timer: Clock
) -> Timeline:
    """Run the attention of one layer and see what was where."""
    batch = device_batch(tree, heads, permuted)
    if settings.e4m3:
        batch = quantised(batch)
    layer = Layer(batch, tree, heads, settings, heads.dim**-0.5)
    words, call_us = trace(layer, timer)
    properties: Any = torch.cuda.get_device_properties(layer.workspace.device)
    return Timeline(
        heads=str(heads),
        spec=str(tree),
        permuted=permuted,
        sms=properties.multi_processor_count,
        halves=2 if heads.dim <= 128 else 1,  # with the shared memory of an H200
        call_us=call_us,
        bars=bars_of(words, layer.plan.items),
    )


def kinds(bars: Sequence[Bar]) -> dict[str, Kind]:
    """By row tile, those of one warp before those of four."""
    found: defaultdict[str, list[Bar]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: (bar.row_tile, bar.warp is None)):
        found[bar.kind].append(bar)
    shown = {}
    for name, members in found.items():
        times = np.array([bar.end_ns - bar.begin_ns for bar in members]) / 1e3
        p50, p90 = np.percentile(times, (50, 90)).tolist()
        last = max(bar.end_ns for bar in members) / 1e3
        shown[name] = Kind(len(members), float(times.mean()), p50, p90, float(times.max()), last)
    return shown


def idle_shares(line: Timeline, since_ns: int = 0) -> list[float]:
    """Of each SM: the share of its consumer warps' time, from ``since_ns`` to the end of the span,
    in which they had no unit in hand. To wait for K/V counts as work."""
    lanes: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for bar in line.bars:
        for warp in bar.warps:
            lanes[bar.sm, bar.half, warp].append((bar.begin_ns, bar.end_ns))
    busy: Counter[int] = Counter()
    for (sm, _, _), stretches in lanes.items():
        reached = since_ns  # bars of one half may overlap: its warps go on one by one
        for begin, end in sorted(stretches):
            busy[sm] += max(0, end - max(begin, reached))
            reached = max(reached, end)
    most = max(1, line.span_ns - since_ns) * WARPS * line.halves
    unused = [1.0] * (line.sms - len(busy))
    return [1 - busy[sm] / most for sm in sorted(busy)] + unused


def summary(line: Timeline) -> list[str]:
    """Durations by row tile, idle time and the end of the span, as lines."""
    span = line.span_ns
    lines = [
        "",
        f"{line.spec}, {title(line)}: {span / 1e3:.1f} us from first begin to last end, "
        f"{line.call_us:.1f} us with launch and merge; {len(line.bars)} bars on {line.sms} SMs",
        f"  {'row tile':18}  bars  mean us     p50     p90     max  last end",
    ]
    for name, kind in kinds(line.bars).items():
        lines.append(
            f"  {name:18} {kind.count:5} {kind.mean:8.2f} {kind.p50:7.2f} {kind.p90:7.2f} "
            f"{kind.max:7.2f} {kind.last_end:9.1f}"
        )
    shares = np.array(idle_shares(line))
    since = round((1 - TAIL) * span)
    running = Counter(bar.kind for bar in line.bars if bar.end_ns > since)
    return [
        *lines,
        f"  warps without a unit: {shares.mean():.1%} of the time; by SM {shares.min():.1%} to "
        f"{shares.max():.1%}, median {np.median(shares):.1%}",
        f"  last {TAIL:.0%}, from {since / 1e3:.1f} us: {np.mean(idle_shares(line, since)):.1%}; "
        "bars that end there: "
        + ", ".join(f"{running[name]} of {name}" for name in kinds(line.bars) if running[name]),
    ]


def draw(lines: Sequence[Timeline], path: Path) -> None:
    """Write a picture, a panel a timeline: every bar over time, at the SM, half and, for what one
    warp did, warp that ran it; coloured by row tile."""
    figure = require().Figure(figsize=(12, 5 * len(lines)), layout="constrained")
    polygons = import_module("matplotlib.collections").PolyCollection
    every = kinds([bar for line in lines for bar in line.bars])
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(every)}
    axes = figure.subplots(len(lines), squeeze=False)[:, 0]
    for axis, line in zip(axes, lines, strict=True):
        for name, colour in colours.items():
            boxes = [_box(bar, line.halves) for bar in line.bars if bar.kind == name]
            if boxes:
                style = {"facecolors": colour, "edgecolors": "white", "linewidths": 0.1}
                axis.add_collection(polygons(boxes, label=name, **style))
        axis.set_xlim(0, line.span_ns / 1e3)
        axis.set_ylim(0, max(line.sms, *(bar.sm + 1 for bar in line.bars)))
        axis.set_xlabel("us since the first begin")
        axis.set_ylabel("SM")
        finish(axis, f"{line.spec}\n{title(line)}")
    figure.savefig(path, dpi=150)


def _box(bar: Bar, halves: int) -> list[tuple[float, float]]:
    """Its corners: microseconds, SMs."""
    left, right = bar.begin_ns / 1e3, bar.end_ns / 1e3
    low = bar.sm + (bar.half + bar.warps[0] / WARPS) / halves
    high = low + len(bar.warps) / WARPS / halves
    return [(left, low), (right, low), (right, high), (left, high)]
