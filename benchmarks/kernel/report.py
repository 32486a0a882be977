# SPDX-License-Identifier: Apache-2.0
"""Rows of the kernel benchmark, what follows from them, and how both are printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from benchmarks.common.forests import family_of

TWO = ("fa3", "flashinfer")  # that serve whole batches
PEER_NAMES = (*TWO, "levels")
# Relative norm of a difference of bf16 outputs beyond which one of them is wrong.
MAX_DIFFERENCE = 0.01
# The same with K/V in fp8_e4m3: pat rounds the softmax's weights of items that wgmma runs to fp8,
# FA3 those of all and q.
FP8_LIMITS = {"pat": 0.05, "fa3": 0.15, "levels": 0.15}
# pat's error with K/V in fp8_e4m3 may be so many times FA3's.
MAX_OF_FA3 = 2.0
COLUMNS = "floor us    pat     fa3  flashinf  levels  /floor  peer/pat  read"
# pat may be this much slower than what it is compared with: more is a row that loses.
MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One tree and head configuration. Times are medians in microseconds; None: did not run."""

    heads: str  # query/KV
    spec: str  # the tree
    permuted: bool  # slots at random places, else those of a node consecutive
    floor_us: float
    pat: float  # forward and merge of one layer
    fa3: float | None
    flashinfer: float | None
    levels: float | None
    noise: float  # at worst, between the medians of two turns, as a fraction
    kv_read_over_unique: float  # K/V tokens that the plan reads over those that the batch holds
    degraded: str
    error: float  # of pat against fp32, relative norm over a few queries
    differences: dict[str, float]  # of each peer's output against pat's, relative norm
    kv_dtype: str = "bfloat16"
    # Of rows in fp8_e4m3: of each peer as ``error``, and pat's time with the same K/V in bf16.
    errors: dict[str, float] = field(default_factory=dict)
    bf16: float | None = None
    plain: float | None = None  # of rows with sinks: pat's time without
    draft_tokens: int = 1  # of a query: more than 1 in a verify step

    @property
    def over_floor(self) -> float:
        return self.pat / self.floor_us

    def best(self, names: Iterable[str] = PEER_NAMES) -> float | None:
        """The shortest time among ``names``."""
        times = [time for name in names if (time := getattr(self, name)) is not None]
        return min(times, default=None)

    @property
    def wrong(self) -> dict[str, float]:
        """Outputs that are too far off, by name: from fp32 attention pat's and, with K/V in
        fp8_e4m3, the peers', else the peers' from pat's."""
        errors = {"pat": self.error, **(self.errors or self.differences)}
        # NaN is beyond every limit.
        return {name: off for name, off in errors.items() if not off <= self.limit_of(name)}

    def limit_of(self, name: str) -> float:
        """How far an output may be off."""
        limits = {} if self.kv_dtype == "bfloat16" else FP8_LIMITS
        return limits.get(name, MAX_DIFFERENCE)

    @property
    def of_fa3(self) -> float | None:
        """pat's error over FA3's, with K/V in fp8_e4m3."""
        theirs = self.errors.get("fa3")
        return None if theirs is None else self.error / theirs


def geomean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def summary(rows: Sequence[TreeRow]) -> list[str]:
    """What the rows of one group say, as lines."""
    lines = []
    if shared := [row for row in rows if family_of(row.spec) == "shared"]:
        worst = max(shared, key=lambda row: row.over_floor)
        mean = geomean([row.over_floor for row in shared])
        lines.append(
            f"{len(shared)} trees with sharing, geometric mean over the floor: {mean:.2f}; "
            f"worst {worst.over_floor:.2f} at {worst.spec}"
        )
    lines.append(_against("the better of fa3 and flashinfer", rows, lambda row: row.best(TWO)))
    if any(row.levels for row in rows):
        lines.append(_against("the best peer", rows, TreeRow.best))
    for name, what in (("bf16", "in bf16"), ("plain", "without sinks")):
        if any(getattr(row, name) for row in rows):
            lines.append(_against(f"pat's time {what}", rows, attrgetter(name)))
    if found := [row.of_fa3 for row in rows if row.of_fa3 is not None]:
        lines.append(f"pat's error over fa3's: at most {max(found):.3f}")
    return lines


def _against(what: str, rows: Sequence[TreeRow], time: Callable[[TreeRow], float | None]) -> str:
    """pat's time over another one: geometric means, of all and by family, the worst row, and those
    that are slower."""
    found = [(row, row.pat / other) for row in rows if (other := time(row))]
    if not found:
        return f"over {what}: nothing to compare with"
    families: dict[str, list[float]] = {}
    for row, value in found:
        families.setdefault(family_of(row.spec), []).append(value)
    means = [f"{name} {geomean(values):.3f}" for name, values in families.items()]
    slow = [f"{row.spec} {value:.3f}" for row, value in found if value > MARGIN]
    worst, most = max(found, key=lambda each: each[1])
    return (
        f"over {what}: {geomean([value for _, value in found]):.3f} ({', '.join(means)}), "
        f"at most {most:.3f} at {worst.spec}; more than {MARGIN - 1:.0%} slower, {len(slow)} of "
        f"{len(found)}: {', '.join(slow) or 'none'}"
    )


def table(rows: Iterable[TreeRow]) -> list[str]:
    """The rows as text, with a summary of those of equal heads, layout and draft tokens."""
    lines = []
    for (heads, permuted, drafts), group in groupby(
        rows, lambda row: (row.heads, row.permuted, row.draft_tokens)
    ):
        title = f"{heads} heads, slots {'permuted' if permuted else 'contiguous'}"
        title += f", {drafts} draft tokens" if drafts > 1 else ""
        members = list(group)
        lines += [
            "",
            f"{title:44} {COLUMNS}",
            *map(_line, members),
            *(f"  {said}" for said in summary(members)),
        ]
    return lines


def _line(row: TreeRow) -> str:
    best = row.best()
    return (
        f"{row.spec:44} {row.floor_us:8.1f} {row.pat:6.1f} {_number(row.fa3, 1):>7} "
        f"{_number(row.flashinfer, 1):>9} {_number(row.levels, 1):>7} "
        f"{row.over_floor:7.2f} {_number(best / row.pat if best else None, 2):>9} "
        f"{row.kv_read_over_unique:5.2f}"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def complaints(rows: Iterable[TreeRow]) -> list[str]:
    """Outputs that disagree, pat's errors that are too large beside FA3's, and plans that ran out
    of room, a line each."""
    lines = []
    for row in rows:
        said = [
            f"output of {name} is off by {value:.2g} (at most {row.limit_of(name):g}, relative "
            "norm)"
            for name, value in row.wrong.items()
        ]
        if row.of_fa3 is not None and not row.of_fa3 <= MAX_OF_FA3:
            said.append(f"pat's error is {row.of_fa3:.2f} times fa3's (at most {MAX_OF_FA3:g})")
        said += [row.degraded] if row.degraded else []
        lines += [f"{row.heads} {row.spec}: {each}" for each in said]
    return lines
