# SPDX-License-Identifier: Apache-2.0
"""What ``Workspace.trace`` says of a forward: begin, end, SM and item of all that ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Of csrc/cuda/tiles.h: consumer warps of a half, packed rows that a half takes at a time.
WARPS = 4
PART_ROWS = 64


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
    begin_ns: int
    end_ns: int


def trace_rows(items: npt.NDArray[Any], group: int, num_kv_heads: int) -> int:
    """Rows that ``Workspace.trace`` needs for a plan's ``items``: the count, and at most one for
    each warp of both halves for every 64 of an item's ``group`` x ``num_queries`` packed rows."""
    parts = -(-items["num_queries"].astype(np.int64) * group // PART_ROWS)
    return 1 + 2 * WARPS * num_kv_heads * int(parts.sum())


def bars_of(words: npt.NDArray[np.int64]) -> list[Bar]:
    """What a trace int64 [rows, 4] says (``_C.decode_cuda`` has its form).

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
        bars.append(Bar(item, head, sm, half, warp, rows, min(begins), max(ends)))
    return bars
