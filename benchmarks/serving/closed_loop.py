# SPDX-License-Identifier: Apache-2.0
"""Runs of agents in a closed loop: see ``agents.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.common.budget import Budget
from benchmarks.serving.agents import AgentsRow, Team, TeamPrompts, make_team, row_of
from benchmarks.serving.fleet import Served
from benchmarks.serving.run import (
    REQUEST_TIMEOUT_S,
    WARM_UP_TOKENS,
    Log,
    RunOptions,
    rotated,
    turn,
    warm_up,
)


def run_agents(
    fleet: Sequence[Served],
    teams: Sequence[Team],
    context: int,
    settings: RunOptions,
    budget: Budget,
    log: Log,
) -> None:
    """All backends in turns on a team, in another order every run, each from an empty cache; then
    the next team, then all again.

    Raises:
        RequestError: a request failed.
    """
    largest = max(teams, key=lambda team: team.agents)
    warm_up_agents(fleet, largest, context, settings, budget)
    for run in range(settings.runs):
        for team in teams:
            measure = partial(_measure, team=team, context=context, settings=settings, run=run)
            turn(rotated(fleet, run), str(team), measure, settings, budget, log)


def warm_up_agents(
    fleet: Sequence[Served], team: Team, context: int, settings: RunOptions, budget: Budget
) -> None:
    """The beginnings of the first turns of all agents of ``team``, on every server."""
    prompts = team_prompts(team, context, settings, "warm-up")
    bodies = [prompts.next_body(place, WARM_UP_TOKENS) for place in range(team.agents)]
    warm_up(fleet, bodies, budget, partial(prepare_team, prompts=prompts))


def team_prompts(team: Team, context: int, settings: RunOptions, name: str) -> TeamPrompts:
    """The agents of the run ``name``, the same for every backend."""
    return make_team(
        team,
        context=context,
        vocab=settings.vocab,
        seed=f"{settings.seed} {team} {name}",
        stream_interval=settings.stream_interval,
    )


def prepare_team(served: Served, prompts: TeamPrompts) -> None:
    served.flush()
    for level in prompts.prime:
        served.prime(level)


def _measure(served: Served, team: Team, context: int, settings: RunOptions, run: int) -> AgentsRow:
    prompts = team_prompts(team, context, settings, str(run))
    prepare_team(served, prompts)
    answers, stopped = served.converse(
        team.agents,
        prompts.next_body,
        prompts.answered,
        duration_s=settings.duration_s,
        timeout_s=REQUEST_TIMEOUT_S,
    )
    return row_of(
        answers,
        stopped,
        prompts.prompt_tokens,
        backend=served.backend,
        agents=str(team),
        context=context,
        run=run,
        ended=sum(agent.ended for agent in prompts.agents),
    )
