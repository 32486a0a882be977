# SPDX-License-Identifier: Apache-2.0
"""What the backend remembers of the forward that runs, and says of one that it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sglang_pat.planner import Plan


class Phase(Enum):
    """What a forward is prepared for."""

    EAGER = auto()
    CAPTURE = auto()
    REPLAY = auto()


@dataclass(slots=True, eq=False)
class Forward:
    """How one forward is served, from its preparation to its last layer.

    ``served``: pat has a plan for it, so its layers run on pat. ``captured``: in the capture of a
    decode graph, the plan that replays of it can always fall back to. ``unprepared``: the batch
    that the base has not prepared yet, kept in case a layer turns out to be the base's.
    ``in_base``: the base prepares it without a graph; some bases call the two methods of graphs
    from there.
    """

    phase: Phase = Phase.EAGER
    served: bool = False
    captured: Plan | None = None
    unprepared: Any = None
    in_base: bool = False


def beyond_workspace(requests: int, room: int) -> str:
    """Why the base serves a batch of ``requests``, of which the workspace holds ``room``: all that
    the server's pool holds, but data parallel attention may pad a batch beyond it."""
    return (
        f"a batch of {requests} requests, padding included, is beyond the {room} that the server "
        "runs, so SGLang's attention serves it"
    )


def no_memory(plan: Plan, instead: str) -> str:
    """Why the list of slots of a plan could not be made longer, and what is done ``instead``."""
    return (
        f"a plan for {plan.num_queries} requests lists {plan.list_tokens} slots, for which the GPU "
        f"has no memory, so {instead}; lower --mem-fraction-static"
    )
