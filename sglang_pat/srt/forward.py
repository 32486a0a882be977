# SPDX-License-Identifier: Apache-2.0
"""What the backend remembers of the forward that runs, and says of one that it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Forward:
    """How one forward is served, from its preparation to its last layer.

    ``served``: pat has a plan for it, so its layers run on pat. ``unprepared``: the batch that the
    base has not prepared yet, kept in case a layer turns out to be the base's. ``in_base``: the
    base prepares it without a graph; some bases call the two methods of graphs from there.
    """

    served: bool = False
    unprepared: Any = None
    in_base: bool = False


def beyond_workspace(requests: int, room: int, pool_requests: int) -> str:
    """Why the base serves a batch of ``requests``, of which the workspace holds ``room``."""
    text = (
        f"a batch of {requests} requests is beyond the {room} that the workspace holds, so "
        "SGLang's attention serves it"
    )
    # Only the padding of data parallel attention goes beyond the pool's requests.
    by_budget = room < pool_requests
    return f"{text}; raise SGLANG_PAT_WORKSPACE_MB" if by_budget else text
