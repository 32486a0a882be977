# SPDX-License-Identifier: Apache-2.0
"""The load that a server carries under a limit of p99 TPOT: ``--capacity`` with ``--agents`` or
``--trace``.

A probe is one run of ``--duration-s`` seconds at a load: so many agents at once, or so many
requests/s. ``search.py`` says which loads are probed. All backends that take part in a load get the
same requests one after the other, in another order at every load.

What a probe finds does not depend on the probes before it: the prefix cache is emptied, then filled
with the prompts of the roles (agents) or left empty (traces), and its tokens are those of no other
load. An agent begins with its role's prompt alone, so that few seconds see shorter private contexts
than long runs do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.serving.agents import Team
from sglang_pat.bench.serving.closed_loop import prepare_team, team_prompts, warm_up_agents
from sglang_pat.bench.serving.fleet import FleetConfig, Served
from sglang_pat.bench.serving.probe import AGENTS, REQUESTS_PER_S, CapacityRow, broken, row_of
from sglang_pat.bench.serving.replay import make_replay, replay_bodies, warm_up_replay
from sglang_pat.bench.serving.run import REQUEST_TIMEOUT_S, Log, RunOptions, rotated, turn
from sglang_pat.bench.serving.search import Ladder, Probes, Verdict, search
from sglang_pat.bench.serving.sizing import most_agents
from sglang_pat.bench.serving.trace import mooncake

AROUND_S = 2.0  # of a probe, beside its requests: the cache, and pat's counters
LOWEST = 64  # the least rate is the first one over this


class Subject(Protocol):
    """What the capacity is looked for of."""

    @property
    def name(self) -> str: ...
    @property
    def ladder(self) -> Ladder: ...
    @property
    def longest_s(self) -> float:
        """Of a probe."""

    def warm_up(self, fleet: Sequence[Served], budget: Budget) -> None:
        """Requests that no row counts."""

    def at(self, load: float, probe: int) -> Callable[[Served], CapacityRow]:
        """What probes a server at that load, with the same requests for all."""


@dataclass(frozen=True, slots=True)
class AgentsSubject:
    """Agents at once. ``team``: with the agents to begin with; ``most``: agents at most."""

    team: Team
    context: int
    most: int
    resolution: float
    settings: RunOptions

    @property
    def name(self) -> str:
        return str(self.team).rpartition("x")[0]

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.team.agents, 1, self.most, self.resolution, whole=True)

    @property
    def longest_s(self) -> float:
        return self.settings.duration_s + AROUND_S

    def warm_up(self, fleet: Sequence[Served], budget: Budget) -> None:
        largest = replace(self.team, agents=self.most)
        warm_up_agents(fleet, largest, self.context, self.settings, budget)

    def at(self, load: float, probe: int) -> Callable[[Served], CapacityRow]:
        return partial(self._measure, team=replace(self.team, agents=int(load)), probe=probe)

    def _measure(self, served: Served, team: Team, probe: int) -> CapacityRow:
        prompts = team_prompts(team, self.context, self.settings, "capacity")
        prepare_team(served, prompts)
        answers, stopped = served.converse(
            team.agents,
            prompts.next_body,
            prompts.answered,
            duration_s=self.settings.duration_s,
            timeout_s=REQUEST_TIMEOUT_S,
            cut=True,
        )
        firsts = [of_agent[0].times for of_agent in answers]
        # If an agent has not begun, the window is empty: the load was never there.
        begin = max(times[0] if times else stopped for times in firsts)
        return row_of(
            [answer for of_agent in answers for answer in of_agent],
            begin,
            stopped,
            backend=served.backend,
            subject=self.name,
            unit=AGENTS,
            load=team.agents,
            probe=probe,
            grace_s=None,
        )


@dataclass(frozen=True, slots=True)
class TraceSubject:
    """Requests/s of a trace. ``prompts``: how many it has; None: any number."""

    name: str
    rate: float  # to begin with
    prompts: int | None
    grace_s: float
    resolution: float
    settings: RunOptions

    @property
    def ladder(self) -> Ladder:
        most = math.inf
        if self.prompts is not None:  # four standard deviations of a Poisson process below
            most = (self.prompts - 4 * math.sqrt(self.prompts)) / self.settings.duration_s
        return Ladder(self.rate, self.rate / LOWEST, most, self.resolution, whole=False)

    @property
    def longest_s(self) -> float:
        return self.settings.duration_s + self.grace_s + AROUND_S

    def warm_up(self, fleet: Sequence[Served], budget: Budget) -> None:
        warm_up_replay(
            fleet, make_replay(self.name, self.rate, 0, self.settings), self.settings, budget
        )

    def at(self, load: float, probe: int) -> Callable[[Served], CapacityRow]:
        replay = make_replay(self.name, load, probe, self.settings)
        bodies = replay_bodies(replay, self.settings)
        return partial(self._measure, at_s=replay.at_s, bodies=bodies, rate=load, probe=probe)

    def _measure(
        self,
        served: Served,
        at_s: Sequence[float],
        bodies: Sequence[bytes],
        rate: float,
        probe: int,
    ) -> CapacityRow:
        served.flush()
        window_s = self.settings.duration_s
        answers = served.stream(
            bodies,
            at_s=at_s,
            cut_s=window_s + self.grace_s,
            timeout_s=window_s + self.grace_s + REQUEST_TIMEOUT_S,
        )
        begin = min(answer.sent for answer in answers)
        return row_of(
            answers,
            begin,
            begin + window_s,
            backend=served.backend,
            subject=self.name,
            unit=REQUESTS_PER_S,
            load=rate,
            probe=probe,
            grace_s=self.grace_s,
        )


def subjects_of(
    options: argparse.Namespace, settings: RunOptions, config: FleetConfig
) -> list[Subject]:
    """What the command line asks for, each with a ladder that can be climbed.

    Raises:
        ValueError: the load to begin with is too much for the servers or the trace, or the trace
            does not fit the context.
    """
    found: list[Subject] = []
    context, resolution = options.agent_context, options.resolution
    for team in options.agents or ():
        most = most_agents(config, team, context)
        if most < config.max_requests:
            print(
                f"{team}: up to {most} agents, as a pool of {config.pool_tokens} tokens holds no "
                "more full contexts; fewer --backends or a shorter --agent-context make room",
                flush=True,
            )
        found.append(AgentsSubject(team, context, most, resolution, settings))
    grace_s = settings.output_tokens * max(options.limits_ms) / 1e3
    for name in options.trace or ():
        prompts = None
        if settings.trace_file is not None and name == "mooncake":
            longest = settings.context - settings.output_tokens
            prompts = sum(1 for _ in mooncake(settings.trace_file, longest, settings.block_tokens))
        (rate,) = options.rates
        make_replay(name, rate, 0, settings)  # raises if the trace does not fit
        found.append(TraceSubject(name, rate, prompts, grace_s, resolution, settings))
    for subject in found:
        _ = subject.ladder  # raises here, before any server starts
    return found


def run_capacity(
    fleet: Sequence[Served],
    subjects: Sequence[Subject],
    limits_ms: Sequence[float],
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> None:
    """Search the capacity of every subject, one after the other, all backends side by side.

    Raises:
        RequestError: a request failed.
    """
    for subject in subjects:
        subject.warm_up(fleet, budget)
        kind = f"{subject.name} probe"
        budget.took(kind, subject.longest_s)  # the first one must end in time, too
        _search(fleet, subject, kind, sorted(limits_ms), settings, budget, log)


def _search(
    fleet: Sequence[Served],
    subject: Subject,
    kind: str,
    limits_ms: Sequence[float],
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> Probes:
    by_name = {served.backend: served for served in fleet}
    numbers = count()

    def measure(load: float, names: Sequence[str]) -> Mapping[str, Verdict]:
        if not budget.allows(kind):  # before the requests are made, which takes time, too
            return {}
        probe = next(numbers)
        measure_one = subject.at(load, probe)
        rows: list[CapacityRow] = []

        def kept(served: Served) -> CapacityRow:
            rows.append(measure_one(served))
            return rows[-1]

        turn(rotated([by_name[name] for name in names], probe), kind, kept, settings, budget, log)
        return {
            row.backend: tuple(broken(row, limit) is None for limit in limits_ms) for row in rows
        }

    return search(subject.ladder, list(by_name), len(limits_ms), measure)
