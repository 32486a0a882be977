# SPDX-License-Identifier: Apache-2.0
"""The search for the largest load that each backend carries: which load is probed next, by whom.

Loads double from ``Ladder.start`` until no backend holds even the loosest limit, or ``Ladder.most``
is reached; a backend that does not hold the loosest limit at a load takes no part in heavier ones.
Where a limit is broken at the start already, loads halve. Then every interval between a load that
holds a limit and one that breaks it is cut at its geometric mean, the widest first.

A probe has noise, so a limit may hold at a load above one that broke it. The capacity is the
largest load that held below all that broke: what a user can rely on, not the luckiest probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Verdict = tuple[bool, ...]  # whether a load held each limit, from the tightest to the loosest
Probes = dict[str, dict[float, Verdict]]  # by backend and load


@dataclass(frozen=True, slots=True)
class Ladder:
    """The loads that may be probed. ``whole``: only whole numbers, as of agents; ``resolution``:
    how far apart, as a fraction, a load that holds and one that breaks may stay."""

    start: float
    least: float
    most: float
    resolution: float
    whole: bool

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.start <= self.most:
            raise ValueError(
                f"a search cannot begin at a load of {self.start:g}: it must lie between "
                f"{self.least:g} and {self.most:g}"
            )
        if not 0 < self.resolution < math.inf:
            raise ValueError(f"a resolution of {self.resolution:g} must be above 0, as 0.12 is")

    def between(self, held: float, broke: float) -> float | None:
        """The load to probe between two others; None if they are close enough."""
        if close_enough(held, broke, self.resolution, self.whole):
            return None
        middle = math.sqrt(held * broke)
        return min(max(round(middle), held + 1), broke - 1) if self.whole else middle

    def below(self, load: float) -> float | None:
        """Half the load, or ``least``; None below that."""
        if load <= self.least:
            return None
        half = load // 2 if self.whole else load / 2
        return max(half, self.least)


def close_enough(held: float, broke: float, resolution: float, whole: bool) -> bool:
    """Whether nothing is left to probe between two loads; ``whole``: they are whole numbers."""
    return broke <= held * (1 + resolution) or (whole and broke - held <= 1)


@dataclass(frozen=True, slots=True)
class Bracket:
    """Of the capacity under one limit. ``held``: the largest load that held it below all that
    broke it; ``broke``: the smallest load that broke it. None: there is none."""

    held: float | None
    broke: float | None

    @classmethod
    def of(cls, found: Iterable[tuple[float, bool]]) -> Bracket:
        """From loads and whether they held the limit."""
        known = list(found)
        broke = min((load for load, held in known if not held), default=None)
        below = [load for load, held in known if held and (broke is None or load < broke)]
        return cls(max(below, default=None), broke)


def bracket(probes: Mapping[float, Verdict], limit: int) -> Bracket:
    """Under the limit with that index."""
    return Bracket.of((load, verdict[limit]) for load, verdict in probes.items())


def next_probe(
    ladder: Ladder, backends: Sequence[str], limits: int, probes: Probes
) -> tuple[float, list[str]] | None:
    """The load to probe and the backends to probe it on; None when everything is found."""
    return (
        _upwards(ladder, backends, probes)
        or _downwards(ladder, backends, limits, probes)
        or _inwards(ladder, backends, limits, probes)
    )


def _upwards(
    ladder: Ladder, backends: Sequence[str], probes: Probes
) -> tuple[float, list[str]] | None:
    load = ladder.start
    while True:
        # The loosest limit is the last one.
        able = [
            name
            for name in backends
            if all(verdict[-1] for at, verdict in probes[name].items() if at < load)
        ]
        if missing := [name for name in able if load not in probes[name]]:
            return load, missing
        if not able or load >= ladder.most:
            return None
        load = min(2 * load, ladder.most)


def _downwards(
    ladder: Ladder, backends: Sequence[str], limits: int, probes: Probes
) -> tuple[float, list[str]] | None:
    load = ladder.below(ladder.start)
    while load is not None:
        missing = [
            name
            for name in backends
            if load not in probes[name]
            and any(bracket(probes[name], limit).held is None for limit in range(limits))
        ]
        if missing:
            return load, missing
        load = ladder.below(load)
    return None


def _inwards(
    ladder: Ladder, backends: Sequence[str], limits: int, probes: Probes
) -> tuple[float, list[str]] | None:
    open_ones = []  # ratio of the ends, backend, ends, load to probe
    for name in backends:
        for limit in range(limits):
            ends = bracket(probes[name], limit)
            if ends.held is None or ends.broke is None:
                continue
            if (load := ladder.between(ends.held, ends.broke)) is not None:
                open_ones.append((ends.broke / ends.held, name, ends.held, ends.broke, load))
    if not open_ones:
        return None
    load = max(open_ones, key=lambda one: one[0])[-1]
    # Whoever's own interval the load cuts is probed beside.
    taking_part = {name for _, name, held, broke, _ in open_ones if held < load < broke}
    return load, [name for name in backends if name in taking_part]


def search(
    ladder: Ladder,
    backends: Sequence[str],
    limits: int,
    measure: Callable[[float, Sequence[str]], Mapping[str, Verdict]],
) -> Probes:
    """Probe until everything is found or ``measure`` leaves a backend out, as the time is up.

    Args:
        ladder: the loads.
        backends: their names.
        limits: how many; every verdict has as many parts.
        measure: probes a load on backends, and returns what held by backend.
    """
    probes: Probes = {name: {} for name in backends}
    while step := next_probe(ladder, backends, limits, probes):
        load, names = step
        found = measure(load, names)
        for name, verdict in found.items():
            probes[name][load] = verdict
        if set(found) != set(names):
            break
    return probes
