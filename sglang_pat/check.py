# SPDX-License-Identifier: Apache-2.0
"""``SGLANG_PAT_CHECK=1``: prove at every step that a plan shares only what is the same.

The one place that compares slots; it never decides what is shared, only whether that was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_pat.planning import Plan
from sglang_pat.radix import RadixView


class SlotMismatch(AssertionError):
    """Two places that must hold one slot hold two."""


def check_plan(
    plan: Plan,
    reqs: Sequence[Any],
    view: RadixView,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Check a decode step's plan against ``req_to_token`` [rows, max_context]; ``rows`` on the CPU.

    Members of an item must hold equal slots over the item's tokens, and a request's row must repeat
    the slots of its radix path as far as that is protected. Raises SlotMismatch naming request,
    node, token position and both slots.
    """
    members = plan.members
    for item in plan.items[plan.items["num_queries"] > 1]:
        begin = int(item["kv_start"])
        span = slice(begin, begin + int(item["kv_len"]))
        reader = int(item["row"])
        expected = req_to_token[rows[reader], span]
        first = int(item["member_offset"])
        for query in members["query"][first : first + int(item["num_queries"])].tolist():
            held = req_to_token[rows[query], span]
            _compare(
                held, expected, begin, _name(reqs, query), f"{_name(reqs, reader)} of its pack"
            )
    if view.disabled:
        return
    for query, req in enumerate(reqs):
        if req.lock is None or req.kv.req_pool_idx != rows[query]:
            continue
        protected = req.kv.cache_protected_len
        _compare(
            req_to_token[rows[query], :protected],
            view.slots(req)[:protected].to(req_to_token.dtype),
            0,
            _name(reqs, query),
            "the radix tree",
        )


def _name(reqs: Sequence[Any], query: int) -> str:
    if query >= len(reqs):
        return f"query {query} (no request)"
    req = reqs[query]
    node = getattr(req.lock, "node", None)
    return f"request {req.rid} (query {query}, node {getattr(node, 'id', node)})"


def _compare(
    held: torch.Tensor, expected: torch.Tensor, begin: int, holder: str, other: str
) -> None:
    if torch.equal(held, expected):
        return
    if len(held) != len(expected):
        raise SlotMismatch(
            f"SGLANG_PAT_CHECK: {holder} protects {len(held)} tokens, {other} has {len(expected)}"
        )
    at = int(np.flatnonzero((held != expected).cpu().numpy())[0])
    raise SlotMismatch(
        f"SGLANG_PAT_CHECK: {holder} holds slot {int(held[at])} at token {begin + at}, "
        f"{other} holds slot {int(expected[at])}"
    )
