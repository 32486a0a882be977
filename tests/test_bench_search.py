# SPDX-License-Identifier: Apache-2.0
"""The search for a capacity, on response curves instead of servers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from sglang_pat.bench.serving.search import Bracket, Ladder, Probes, Verdict, bracket, search

LIMITS = (25.0, 50.0)
AGENTS = Ladder(start=16, least=1, most=256, resolution=0.12, whole=True)
Curve = Callable[[float], float]  # p99 TPOT over the load


def run(
    ladder: Ladder, curves: Mapping[str, Curve], turns: int = 1000
) -> tuple[Probes, list[tuple[float, list[str]]]]:
    """What is found, and the loads with the backends that were probed, in order."""
    asked: list[tuple[float, list[str]]] = []

    def measure(load: float, names: Sequence[str]) -> dict[str, Verdict]:
        if len(asked) == turns:
            return {}
        asked.append((load, list(names)))
        return {name: tuple(curves[name](load) < limit for limit in LIMITS) for name in names}

    return search(ladder, list(curves), len(LIMITS), measure), asked


def test_capacities_are_found_to_the_resolution() -> None:
    curves: dict[str, Curve] = {
        "pat": lambda load: 5 + load / 5,  # 25 ms at 100, 50 ms at 225
        "fa3": lambda load: 5 + load / 3,  # at 60 and 135
    }
    probes, asked = run(AGENTS, curves)
    for name, limit, true in (("pat", 0, 100), ("pat", 1, 225), ("fa3", 0, 60), ("fa3", 1, 135)):
        found = bracket(probes[name], limit)
        assert found.held is not None and found.broke is not None
        assert found.held < true <= found.broke <= found.held * 1.12
    # fa3 breaks 50 ms at 256, as pat does; both are there at every doubling.
    assert asked[:5] == [(16 * 2**step, ["pat", "fa3"]) for step in range(5)]
    assert all(load == int(load) for load, _ in asked)
    pairs = [(load, name) for load, names in asked for name in names]
    assert len(pairs) == len(set(pairs)), "nothing is probed twice"


def test_who_breaks_the_loosest_limit_takes_no_part_in_heavier_loads() -> None:
    curves: dict[str, Curve] = {"pat": lambda load: load / 8, "fa3": lambda load: load}
    probes, asked = run(AGENTS, curves)
    assert max(probes["fa3"]) == 64 and max(probes["pat"]) == 256
    assert (128, ["pat"]) in asked
    # At least all that the servers take: 256 agents give 32 ms.
    assert bracket(probes["pat"], 1) == Bracket(256, None)
    assert bracket(probes["fa3"], 1).held == pytest.approx(50, rel=0.12)


def test_loads_halve_where_the_start_is_too_much() -> None:
    probes, asked = run(AGENTS, {"pat": lambda load: 12 * load, "fa3": lambda load: 80.0})
    assert [load for load, _ in asked[:5]] == [16, 8, 4, 2, 1]
    assert bracket(probes["pat"], 0) == Bracket(2, 3)
    assert bracket(probes["pat"], 1) == Bracket(4, 5)
    assert bracket(probes["fa3"], 1) == Bracket(None, 1)
    rates = Ladder(start=8.0, least=0.5, most=1e6, resolution=0.12, whole=False)
    probes, _ = run(rates, {"pat": lambda load: 10 * load})
    for limit, true in ((0, 2.5), (1, 5.0)):
        found = bracket(probes["pat"], limit)
        assert (found.held or 0) < true <= (found.broke or 0) <= (found.held or 0) * 1.12


def test_the_top_is_probed_though_it_is_no_doubling() -> None:
    ladder = Ladder(start=16, least=1, most=100, resolution=0.12, whole=True)
    probes, asked = run(ladder, {"pat": lambda load: load / 10})
    assert [load for load, _ in asked] == [16, 32, 64, 100]
    assert bracket(probes["pat"], 0) == Bracket(100, None)


def test_a_limit_that_holds_again_above_a_broken_load_does_not_count() -> None:
    assert Bracket.of([(16, True), (32, False), (64, True), (128, False)]) == Bracket(16, 32)
    assert Bracket.of([(16, False), (32, True)]) == Bracket(None, 16)
    assert Bracket.of([]) == Bracket(None, None)
    # 64 agents met a hiccup that the tighter limit saw alone; the looser one goes on to the top.
    probes, _ = run(AGENTS, {"pat": lambda load: 30.0 if load == 64 else load / 8})
    found = bracket(probes["pat"], 0)
    assert found.broke == 64 and 57 <= (found.held or 0) < 64
    assert bracket(probes["pat"], 1) == Bracket(256, None)


@pytest.mark.parametrize("seed", range(20))
def test_noise_ends_the_search_between_a_load_that_held_and_one_that_broke(seed: int) -> None:
    rng = random.Random(seed)
    slopes = {"pat": rng.uniform(0.05, 3), "fa3": rng.uniform(0.05, 3), "other": 1e3}
    curves: dict[str, Curve] = {
        name: lambda load, slope=slope: slope * load * rng.uniform(0.6, 1.6)  # type: ignore[misc]
        for name, slope in slopes.items()
    }
    probes, asked = run(AGENTS, curves)
    assert len(asked) < 40
    for name in slopes:
        for limit in range(len(LIMITS)):
            found = bracket(probes[name], limit)
            if found.broke is None:
                assert found.held == AGENTS.most
            elif found.held is None:
                assert found.broke == AGENTS.least
            else:
                assert found.broke <= max(found.held * 1.12, found.held + 1)


def test_without_time_what_is_known_are_bounds() -> None:
    curves: dict[str, Curve] = {"pat": lambda load: load / 5, "fa3": lambda load: load / 3}
    assert run(AGENTS, curves, turns=0)[0] == {"pat": {}, "fa3": {}}
    probes, asked = run(AGENTS, curves, turns=4)
    assert len(asked) == 4
    assert bracket(probes["pat"], 0) == Bracket(64, 128)
    assert bracket(probes["pat"], 1) == Bracket(128, None)
    # The time may end between two backends of a turn.
    left = search(AGENTS, ["pat", "fa3"], 1, lambda load, names: {names[0]: (True,)})
    assert left == {"pat": {16: (True,)}, "fa3": {}}


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        ((300, 1, 256, 0.1, True), "begin at a load of 300: it must lie between 1 and 256"),
        ((2, 1, 4, 0.0, True), "a resolution of 0 must be above 0"),
    ],
)
def test_ladders_that_lead_nowhere_are_refused(ladder: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ladder(*ladder)  # type: ignore[arg-type]
