# SPDX-License-Identifier: Apache-2.0
"""``SGLANG_PAT_CHECK=1``: prove at every step that a plan shares only what is the same.

The one place that compares slots; it never decides what is shared, only whether that was right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_pat.planning import BRANCH, Plan
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
    for shared in shared_ranges(plan):
        span = slice(shared.begin, shared.begin + shared.tokens)
        expected = req_to_token[rows[shared.reader], span]
        for query in shared.queries:
            held = req_to_token[rows[query], span]
            pack = f"{_name(reqs, shared.reader)} of its pack"
            _compare(held, expected, shared.begin, _name(reqs, query), pack)
    if view.disabled:
        return
    for query, req in enumerate(reqs):
        lock = view.lock_of(req)
        if lock is None or req.kv.req_pool_idx != rows[query]:
            continue
        protected = req.kv.cache_protected_len
        _compare(
            req_to_token[rows[query], :protected],
            view.slots(lock)[:protected].to(req_to_token.dtype),
            0,
            _name(reqs, query),
            "the radix tree",
        )


class Shared(NamedTuple):
    """Tokens that an item reads in the row of ``reader`` for all of ``queries``."""

    reader: int
    begin: int
    tokens: int
    queries: list[int]


def shared_ranges(plan: Plan) -> Iterator[Shared]:
    """What the plan reads once for several queries; a pack may be in several such ranges."""
    members = plan.members["query"]
    for item in plan.items[plan.items["num_queries"] > 1]:
        first = int(item["member_offset"])
        count = int(item["num_queries"])
        if item["kv_len"] != BRANCH:
            ranges = [(item["row"], item["kv_start"], item["kv_len"], 0, count)]
        else:
            segments = plan.segments[item["row"] : item["row"] + item["partial"]]
            names = ["row", "kv_start", "kv_len", "first", "num_queries"]
            ranges = segments[segments["num_queries"] > 1][names].tolist()
        for reader, begin, tokens, offset, queries in ranges:
            of_range = members[first + offset : first + offset + queries]
            yield Shared(int(reader), int(begin), int(tokens), of_range.tolist())


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
