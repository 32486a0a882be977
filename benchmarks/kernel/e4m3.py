# SPDX-License-Identifier: Apache-2.0
"""What rows of K/V in fp8_e4m3 say beyond others: errors beside FA3's, and times beside those of
K/V in bf16.

FA3 casts the queries and the weights of the softmax to fp8, FlashInfer widens K and V instead, and
pat casts the weights alone, in items that wgmma runs. So FA3's outputs are the furthest from fp32
attention of the same stored K/V, and it is the measure of what is accurate enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.kernel.layer import E4M3
from benchmarks.kernel.report import DECODE_MARGIN, MAX_OF_FA3, TreeRow, decode_ratio, geomean
from sglang_pat.explain.tree import Tree


def summary(rows: Sequence[TreeRow]) -> list[str]:
    """Errors and times of rows in fp8_e4m3, as lines; none of others."""
    rows = [row for row in rows if row.kv_dtype == E4M3]
    if not rows:
        return []
    names = [
        name for name in ("fa3", "flashinfer", "levels") if any(name in r.errors for r in rows)
    ]
    worst = [f"{name} {max(r.errors.get(name, 0.0) for r in rows):.2g}" for name in names]
    ours = max(row.error for row in rows)
    lines = [
        "",
        f"K/V in {E4M3}, {len(rows)} rows; relative errors against fp32 attention of the "
        f"dequantised K/V, at most: {', '.join([f'pat {ours:.2g}', *worst])}",
        f"pat's error over fa3's: {_ratios([row.of_fa3 for row in rows])}, at most "
        f"{MAX_OF_FA3:g} is asked for",
    ]
    trees = [row for row in rows if row.bf16 is not None]
    shared = [row for row in trees if _shares(row)]
    private = [row for row in trees if not _shares(row)]
    if shared:
        over = _ratios([row.pat / row.bf16 for row in shared if row.bf16])
        lines.append(f"time over pat's in bf16, {len(shared)} rows with sharing: {over}")
    if private:
        each = [f"{r.heads} {r.spec} {r.pat / r.bf16:.3f}" for r in private if r.bf16]
        lines.append(f"time over pat's in bf16, nothing shared: {', '.join(each)}")
    slower = [
        f"{row.heads} {row.spec} {ratio:.3f}"
        for row in rows
        if (ratio := decode_ratio(row)) is not None and ratio > DECODE_MARGIN
    ]
    limit = f"{DECODE_MARGIN:g} x the better of fa3 and flashinfer"
    lines.append(f"slower than {limit}: {', '.join(slower) or 'none'}")
    return lines


def _shares(row: TreeRow) -> bool:
    """Whether requests of the row's batch share anything; batches that are no trees do."""
    try:
        return Tree.parse(row.spec).shares
    except ValueError:
        return True


def _ratios(values: Sequence[float | None]) -> str:
    """Geometric mean and extremes; "-" if one is missing."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values) or not all(map(math.isfinite, found)):
        return "-"
    return f"{geomean(found):.3f} in the geometric mean, {min(found):.3f} to {max(found):.3f}"
