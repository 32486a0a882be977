# SPDX-License-Identifier: Apache-2.0
"""Agents that come and go, in a closed loop: ``python -m benchmarks.serving --agents``.

All agents share a system prompt, those of one role a prompt behind it. Both are in the cache when a
run begins. An agent sends its next turn, its whole context and some new tokens, when the last one
has been answered in full; the answer's tokens stay in its context. An agent whose context has no
room for its next turn ends, and a new one of a random role takes its place.

The lengths of all turns and the new tokens are drawn before the run, so every backend is asked the
same; what it answers, and how far each agent gets in the time, is the backend's. Times count from
when every agent's first answer has begun until no further turn is sent.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.client import AnswerTimes, body
from benchmarks.serving.rows import (
    COUNTED_HEADS,
    Counted,
    Spread,
    counted_cells,
    unique,
)
from benchmarks.serving.timing import (
    TooShort,
    intervals_ms,
    tokens_between,
)
from benchmarks.serving.workload import Prompt

NEW_TOKENS, OUTPUT_TOKENS = (20, 300), (20, 160)  # of a turn
DEFAULT_AGENTS = "3000+4*1200x64"
DEFAULT_CONTEXT = 6144
# The goals for one H200, Llama-3-8B shape: pat's median inter-token time over that of the better of
# the others, at most, and its output tokens/s over the better's, at least.
MOST_ITL, LEAST_TOKENS = 0.72, 1.20

_SPEC = re.compile(r"(\d+)\+(\d+)\*(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Team:
    """``SYSTEM+ROLES*ROLExAGENTS``, as ``3000+4*1200x64``: AGENTS agents behind a system prompt of
    SYSTEM tokens, in ROLES roles with a prompt of ROLE tokens each."""

    system: int
    roles: int
    role: int
    agents: int

    @classmethod
    def parse(cls, text: str) -> Team:
        """Raises ValueError for what is not a team, with an example of one."""
        found = _SPEC.fullmatch(text)
        team = cls(*map(int, found.groups())) if found else None
        if team is None or not (team.roles and team.agents):
            raise ValueError(
                f"{text!r} is not a team of agents: write SYSTEM+ROLES*ROLExAGENTS with at least "
                f"one role and one agent, as {DEFAULT_AGENTS}"
            )
        return team

    def __str__(self) -> str:
        return f"{self.system}+{self.roles}*{self.role}x{self.agents}"

    def check(self, context: int) -> None:
        """Raise ValueError if a context of so many tokens has no room for a turn."""
        least = self.system + self.role + NEW_TOKENS[1] + OUTPUT_TOKENS[1]
        if context < least:
            raise ValueError(
                f"a context of {context} tokens has no room for a turn of agents {self}: "
                f"--agent-context must be {least} or more"
            )

    def kv_tokens(self, context: int) -> int:
        """K/V tokens of all agents with full contexts, shared ones once."""
        shared = self.system + self.roles * self.role
        return shared + self.agents * self.private_tokens(context)

    def private_tokens(self, context: int) -> int:
        """K/V tokens of one agent with a full context that it shares with no other."""
        return context - self.system - self.role


class Agent:
    """One place of a team, through all the agents that take it."""

    def __init__(self, roles: Sequence[Prompt], context: int, vocab: int, seed: str) -> None:
        """``roles``: the prompts of all roles, the system prompt included."""
        self.ended = 0  # agents that have had this place and have ended
        self._roles, self._limit, self._vocab = roles, context, vocab
        self._rng = random.Random(seed)
        self._context: Prompt = []
        self._begin()

    def _begin(self) -> None:
        self._context = list(self._rng.choice(self._roles))

    def next_turn(self) -> tuple[Prompt, int]:
        """The prompt of the next turn, and how many tokens it asks for."""
        new, output = self._rng.randint(*NEW_TOKENS), self._rng.randint(*OUTPUT_TOKENS)
        if len(self._context) + new + output > self._limit:
            self.ended += 1
            self._begin()
        self._context += self._rng.choices(range(self._vocab), k=new)
        return self._context, output

    def answered(self, token_ids: Sequence[int]) -> None:
        self._context += token_ids


@dataclass(slots=True)
class TeamPrompts:
    """``prime``: prompts to cache beforehand, level after level; the last level are the roles."""

    prime: list[list[Prompt]]
    agents: list[Agent]
    stream_interval: int
    prompt_tokens: int = 0  # of all turns so far

    def next_body(self, place: int, output_tokens: int | None = None) -> bytes:
        """The request of the next turn of the agent at ``place``, for as many tokens as the turn
        asks for unless ``output_tokens`` says another number."""
        prompt, output = self.agents[place].next_turn()
        self.prompt_tokens += len(prompt)
        return body(prompt, output_tokens or output, self.stream_interval)

    def answered(self, place: int, token_ids: list[int]) -> None:
        self.agents[place].answered(token_ids)


def make_team(
    team: Team, *, context: int, vocab: int, seed: str, stream_interval: int
) -> TeamPrompts:
    """Fresh random tokens for every seed; equal arguments give equal teams."""
    rng = random.Random(seed)
    system = rng.choices(range(vocab), k=team.system)
    roles = [system + rng.choices(range(vocab), k=team.role) for _ in range(team.roles)]
    agents = [Agent(roles, context, vocab, f"{seed} agent {place}") for place in range(team.agents)]
    levels = [[system]] if team.system else []
    return TeamPrompts([*levels, roles], agents, stream_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsRow(Counted):
    """One run of a team."""

    backend: str
    agents: str  # the team
    context: int
    run: int
    window_s: float  # that the times below are of
    turns: int  # answered in full in the whole run
    ended: int  # agents whose context was full
    cached: float  # fraction of the prompt tokens that the cache had, in the whole run
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float


def row_of(
    answers: Sequence[Sequence[AnswerTimes]],
    stopped: float,
    prompt_tokens: int,
    *,
    backend: str,
    agents: str,
    context: int,
    run: int,
    ended: int,
) -> AgentsRow:
    """A row from the answers by agent. ``stopped``: when no further turn was sent, by their clock;
    ``prompt_tokens``: of all turns.

    Raises:
        TooShort: an agent has had no answer before ``stopped``, or no interval lies in the window.
    """
    begin = max(of_agent[0].times[0] for of_agent in answers)
    if begin >= stopped:
        raise TooShort(
            f"the last agent's first answer began {begin - stopped:.1f} s after the time was up: "
            "raise --duration-s"
        )
    flat = [answer for of_agent in answers for answer in of_agent]
    intervals = intervals_ms(flat, begin, stopped)
    waits = [1e3 * (a.times[0] - a.sent) for a in flat if begin <= a.sent <= stopped]
    if not intervals or not waits:
        raise TooShort("no turn was sent while all agents ran: raise --duration-s")
    window_s = stopped - begin
    return AgentsRow(
        backend=backend,
        agents=agents,
        context=context,
        run=run,
        window_s=window_s,
        turns=len(flat),
        ended=ended,
        cached=sum(answer.cached for answer in flat) / prompt_tokens,
        ttft_p50_ms=float(np.percentile(waits, 50)),
        ttft_p99_ms=float(np.percentile(waits, 99)),
        itl_p50_ms=float(np.percentile(intervals, 50)),
        itl_p99_ms=float(np.percentile(intervals, 99)),
        tokens_per_s=tokens_between(flat, begin, stopped) / window_s,
    )


def team_ratio(
    rows: Sequence[AgentsRow], name: str, *, least_is_best: bool
) -> tuple[float, str] | None:
    """pat's median of field ``name`` over the best other backend's, and that backend; None if there
    is nothing to divide."""
    found = {
        backend: Spread.of(getattr(row, name) for row in rows if row.backend == backend)
        for backend in unique(row.backend for row in rows)
    }
    medians = {backend: each.median for backend, each in found.items() if each}
    ours = medians.pop("pat", None)
    # 0: most tokens came together with others, as the client was kept from reading them.
    if not ours or not medians:
        return None
    best = min(medians, key=lambda name: medians[name] if least_is_best else -medians[name])
    return (ours / medians[best], best) if medians[best] else None


def agents_table(rows: Sequence[AgentsRow], limits: bool) -> list[str]:
    """Medians and spreads by team and backend, then pat against the better of the others; with
    ``limits``, whether that meets the goals."""
    lines = [
        f"{'agents':16} {'backend':12} runs  {'ITL p50 ms':>22} {'p99':>7} {'TTFT p50':>9} "
        f"{'p99':>8} {'tokens/s':>9} {'turns':>6} {'ended':>5} {'cached':>6} {'plans':>6} "
        f"{COUNTED_HEADS}"
    ]
    for team in unique(row.agents for row in rows):
        of_team = [row for row in rows if row.agents == team]
        for backend in unique(row.backend for row in of_team):
            lines.append(_line([row for row in of_team if row.backend == backend]))
        for name, title, least, goal in (
            ("itl_p50_ms", "inter-token time", True, MOST_ITL),
            ("tokens_per_s", "output tokens/s", False, LEAST_TOKENS),
        ):
            ratio = team_ratio(of_team, name, least_is_best=least)
            if ratio is None:
                continue
            met = ratio[0] <= goal if least else ratio[0] >= goal
            bound = f", {'at most' if least else 'at least'} {goal:.2f}: " if limits else ""
            verdict = ("met" if met else "MISSED") if limits else ""
            lines.append(f"{team}: {title}, pat / {ratio[1]}: {ratio[0]:.3f}{bound}{verdict}")
    return lines


def _line(rows: Sequence[AgentsRow]) -> str:
    def median(name: str) -> float:
        return float(np.median([getattr(row, name) for row in rows]))

    plans = Spread.of(row.plans_made for row in rows)
    return (
        f"{rows[0].agents:16} {rows[0].backend:12} {len(rows):4}  "
        f"{Spread.of(row.itl_p50_ms for row in rows)!s:>22} {median('itl_p99_ms'):7.2f} "
        f"{median('ttft_p50_ms'):9.1f} {median('ttft_p99_ms'):8.1f} "
        f"{median('tokens_per_s'):9.0f} {median('turns'):6.0f} {median('ended'):5.0f} "
        f"{median('cached'):6.0%} {f'{plans.median:.0f}' if plans else '-':>6} "
        f"{counted_cells(rows)}"
    )
