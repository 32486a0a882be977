# SPDX-License-Identifier: Apache-2.0
"""Rows of the kernel benchmark, what follows from them, and how both are printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sglang_pat.explain.tree import Tree

PEER_NAMES = ("fa3", "flashinfer", "levels")
# Relative norm of a difference of bf16 outputs beyond which one of them is wrong.
MAX_DIFFERENCE = 0.01
# The same with K/V in fp8_e4m3: pat rounds the softmax's weights of items that wgmma runs to fp8,
# FA3 those of all and q.
FP8_LIMITS = {"pat": 0.05, "fa3": 0.15, "levels": 0.15}
# pat's error with K/V in fp8_e4m3 may be so many times FA3's.
MAX_OF_FA3 = 2.0
# pat may be this much slower than a peer before a summary names it.
MARGIN = 1.03
# pat may be this much slower than the better of FA3 and FlashInfer: more is a row that loses.
DECODE_MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One tree and head configuration. Times are medians in microseconds; None: did not run."""

    heads: str  # query/KV
    spec: str  # the tree
    permuted: bool  # slots at random places, else those of a node consecutive
    floor_us: float
    bound: str  # memory or compute: which term the floor is
    pat: float  # forward and merge of one layer
    fa3: float | None
    flashinfer: float | None
    levels: float | None
    noise: float  # at worst, between the medians of two turns, as a fraction
    snapshot_us: float  # once a step, on the device
    plan_us: float  # when the tree changes, on the host
    items: int
    shared_items: int
    partials: int
    kv_read_over_unique: float  # K/V tokens that the plan reads over those that the batch holds
    degraded: str
    error: float  # of pat against fp32, relative norm over a few queries
    differences: dict[str, float]  # of each peer's output against pat's, relative norm
    branches: int = 0  # of the items
    kv_dtype: str = "bfloat16"
    # Of rows in fp8_e4m3: of each peer as ``error``, and pat's time with the same K/V in bf16.
    errors: dict[str, float] = field(default_factory=dict)
    bf16: float | None = None
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

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, and pat is no less exact than it may be."""
        return not self.wrong and (self.of_fa3 is None or self.of_fa3 <= MAX_OF_FA3)


def geomean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def mean_over_floor(rows: Sequence[TreeRow], names: Sequence[str]) -> float | None:
    """Geometric mean of the best of ``names`` as a multiple of the floor; None unless every row
    has a time."""
    times = [row.best(names) for row in rows]
    if not times or None in times:
        return None
    return geomean([t / r.floor_us for t, r in zip(times, rows, strict=True) if t is not None])


def title(row: TreeRow) -> str:
    """Heads and layout, and the draft tokens of a verify step."""
    layout = f"{row.heads} heads, slots {'permuted' if row.permuted else 'contiguous'}"
    return f"{layout}, {row.draft_tokens} draft tokens" if row.draft_tokens > 1 else layout


def groups(rows: Iterable[TreeRow]) -> list[tuple[str, list[TreeRow]]]:
    """Rows by heads and layout, with a title, in the order in which they come."""
    return [(text, list(members)) for text, members in groupby(rows, title)]


def summary(rows: Sequence[TreeRow]) -> list[str]:
    """What the rows of one group say, as lines."""
    shared = [row for row in rows if Tree.parse(row.spec).shares]
    private = [row for row in rows if not Tree.parse(row.spec).shares]
    lines = []
    if shared:
        means = [
            f"{label} {_number(mean_over_floor(shared, names), 2)}"
            for label, names in (
                ("pat", ("pat",)),
                ("best peer per tree", PEER_NAMES),
                *((name, (name,)) for name in PEER_NAMES),
            )
        ]
        worst = max(shared, key=lambda row: row.over_floor)
        lines += [
            f"{len(shared)} trees with sharing, geometric mean over the floor: {', '.join(means)}",
            f"worst: {worst.over_floor:.2f} times the floor at {worst.spec}",
            f"more than {MARGIN - 1:.0%} slower than the best peer: {_slower(shared)}",
        ]
    if private:
        ratios = [f"{row.spec} {_number(decode_ratio(row), 3)}" for row in private]
        lines.append(f"nothing shared, over the better of fa3 and flashinfer: {', '.join(ratios)}")
    return lines


def title_line(title: str) -> str:
    """The heads of the columns of ``line``."""
    return f"{title:44} floor us    pat     fa3  flashinf  levels  /floor  peer/pat  read  plan us"


def line(row: TreeRow) -> str:
    best = row.best()
    return (
        f"{row.spec:44} {row.floor_us:8.1f} {row.pat:6.1f} {_number(row.fa3, 1):>7} "
        f"{_number(row.flashinfer, 1):>9} {_number(row.levels, 1):>7} "
        f"{row.over_floor:7.2f} {_number(best / row.pat if best else None, 2):>9} "
        f"{row.kv_read_over_unique:5.2f} {row.plan_us:8.0f}"
    )


def table(
    rows: Iterable[TreeRow], summarise: Callable[[Sequence[TreeRow]], Iterable[str]] = summary
) -> list[str]:
    """The rows as text, with what ``summarise`` says of those of equal heads and layout."""
    lines = []
    for title, members in groups(rows):
        lines += ["", title_line(title), *map(line, members)]
        lines += [f"  {text}" for text in summarise(members)]
    return lines


def complaints(rows: Iterable[TreeRow]) -> list[str]:
    """Outputs that disagree and plans that ran out of room, a line each."""
    lines = []
    for row in rows:
        lines += [
            f"{row.heads} {row.spec}: output of {name} is off by {value:.2g} (at most "
            f"{row.limit_of(name):g}, relative norm)"
            for name, value in row.wrong.items()
        ]
        if row.of_fa3 is not None and not row.of_fa3 <= MAX_OF_FA3:
            lines.append(
                f"{row.heads} {row.spec}: pat's error is {row.of_fa3:.2f} times fa3's (at most "
                f"{MAX_OF_FA3:g})"
            )
        if row.degraded:
            lines.append(f"{row.heads} {row.spec}: {row.degraded}")
    return lines


def decode_ratio(row: TreeRow) -> float | None:
    """pat's time over that of the better of FA3 and FlashInfer; None if neither ran."""
    best = row.best(("fa3", "flashinfer"))
    return row.pat / best if best else None


def _slower(rows: Iterable[TreeRow]) -> str:
    found = [
        f"{row.spec} {row.pat / best:.2f}"
        for row in rows
        if (best := row.best()) is not None and row.pat > MARGIN * best
    ]
    return ", ".join(found) or "none"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
