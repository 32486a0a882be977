# SPDX-License-Identifier: Apache-2.0
"""PagedAttention: what its partitions gain by length where nothing is shared, and what it costs to
find K and V through a table of slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_pat.bench.common.trees import Requests, Tree
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import options_of
from sglang_pat.bench.kernel.studies import dense
from sglang_pat.bench.kernel.studies.engine import PERMUTED, Study, StudyRow
from sglang_pat.bench.kernel.studies.ratios import by_family, listed, mean

# Tokens of a sequence in the comparison of V1 and V2, and batches of so many.
LENGTHS = (512, 2048, 8192, 32768)
BATCHES = (1, 8, 32)


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    counts = BATCHES[:2] if quick else BATCHES
    return [(f"batch-{b}", Tree((b,), (length,))) for b in counts for length in LENGTHS]


def _by_length(rows: Sequence[StudyRow], name: str, over: str) -> str:
    found = {str(row.tokens // row.queries): mean([row], name, over) for row in rows}
    return listed({length: value for length, value in found.items() if value is not None})


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    """What partitions gain by length, and what slots cost each kernel."""
    for family, members in by_family(rows).items():
        yield f"{family}, paged-v1 over paged by length: {_by_length(members, 'paged-v1', 'paged')}"
    names = dict.fromkeys(name for row in rows for name in row.times)
    layouts = {name: mean(rows, name + PERMUTED, name) for name in names}
    found = {name: value for name, value in layouts.items() if value is not None}
    yield f"permuted slots over consecutive ones, geometric means: {listed(found)}"
    for peer in STUDY.contiguous:
        slots = {name: mean(rows, name, peer) for name in names if name != peer}
        found = {name: value for name, value in slots.items() if value is not None}
        if found:
            yield f"over {peer}, which has no table, geometric means: {listed(found)}"


STUDY = Study(
    title="PagedAttention: partitions by length without sharing, and the cost of a table of slots",
    heads=(Heads(32, 8), Heads(64, 8)),
    batches=batches,
    rules={name: options_of(name, {})[0] for name in ("default", "paged", "paged-v1")},
    summary=summary,
    peers=("fa3", "flashinfer"),
    contiguous=dense.PEERS,
    layouts=(False, True),
)
