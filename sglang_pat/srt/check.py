# SPDX-License-Identifier: Apache-2.0
"""``SGLANG_PAT_CHECK=1``: prove at every step that a plan shares only what is the same.

It never decides what is shared, only whether that was right. The slots are compared in ``slots``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_pat.planner import Plan
from sglang_pat.slots import SlotMismatch, compare, compare_shared
from sglang_pat.srt.radix import RadixView

__all__ = ["SlotMismatch", "check_plan"]


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
    try:
        compare_shared(plan, req_to_token, rows, lambda query: _name(reqs, query))
        _compare_with_tree(reqs, view, req_to_token, rows)
    except SlotMismatch as mismatch:
        raise SlotMismatch(f"SGLANG_PAT_CHECK: {mismatch}") from None


def _compare_with_tree(
    reqs: Sequence[Any], view: RadixView, req_to_token: torch.Tensor, rows: torch.Tensor
) -> None:
    if view.disabled:
        return
    for query, req in enumerate(reqs):
        lock = view.lock_of(req)
        if lock is None or req.kv.req_pool_idx != rows[query]:
            continue
        protected = req.kv.cache_protected_len
        compare(
            req_to_token[rows[query], :protected],
            view.slots(lock)[:protected].to(req_to_token.dtype),
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
