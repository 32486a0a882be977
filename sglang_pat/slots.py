# SPDX-License-Identifier: Apache-2.0
"""Does a plan share only what is the same? The one comparison of slots, which never decides what is
shared: it only says whether that was right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_pat.plan_text import Plan, ranges


class SlotMismatch(ValueError):
    """Two places that must hold one slot hold two."""


def require_tensor(name: str, value: object) -> None:
    """Raise ValueError, saying what to do, unless ``value`` is a tensor."""
    # isinstance() of a tensor is slow.
    if type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{name} is of type {type(value).__name__}, must be a torch.Tensor: "
            f"convert it with torch.as_tensor"
        )


def check_slots(plan: Plan, req_to_token: torch.Tensor, rows: torch.Tensor) -> None:
    """Check that the queries of every shared item hold the same K/V slots for its tokens.

    A plan believes its paths. Where they claim a node for queries whose rows of ``req_to_token``
    differ there, ``decode`` reads one query's K/V for all of them, and the output of the others is
    wrong without a word. This compares the slots; on a GPU it waits for the device.

    Args:
        plan: made for the first queries of the batch, or all of them.
        req_to_token: int32 [R, max_context], slot of each token of each row.
        rows: int [B], the row of ``req_to_token`` that query i reads; those beyond the plan's
            queries are not looked at.

    Raises SlotMismatch, a ValueError, naming both queries, the token and both slots, and ValueError
    for rows or tokens that the table does not have.
    """
    for name, value, dims in (("req_to_token", req_to_token, 2), ("rows", rows, 1)):
        require_tensor(name, value)
        if value.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, must have {dims} dimensions")
    if rows.is_floating_point():
        raise ValueError(f"rows is {rows.dtype}, must be an integer type")
    num_rows, max_context = req_to_token.shape
    table_rows = rows[: plan.num_queries].tolist()
    if len(table_rows) < plan.num_queries:
        raise ValueError(f"the plan is for {plan.num_queries} queries, rows has {len(table_rows)}")
    for query, row in enumerate(table_rows):
        if not 0 <= row < num_rows:
            raise ValueError(f"query {query}: row {row} is not one of the table's {num_rows}")
    for shared in ranges(plan, shared=True):
        end = shared.begin + shared.tokens
        if end > max_context:
            raise ValueError(
                f"query {shared.reader} shares tokens up to {end}, req_to_token has {max_context} "
                f"a row: plan for these rows"
            )
    try:
        compare_shared(plan, req_to_token, table_rows, "query {}".format)
    except SlotMismatch as mismatch:
        raise SlotMismatch(
            f"{mismatch}: the paths that the plan was made from share a node which these queries "
            f"do not share in req_to_token; give it two ids, or end the paths before it"
        ) from None


def compare_shared(
    plan: Plan,
    req_to_token: torch.Tensor,
    rows: list[int] | torch.Tensor,
    name: Callable[[int], str],
) -> None:
    """Compare the slots of the queries for which an item reads tokens once. ``name``: of a query.
    ``rows`` on the CPU; they and the plan's tokens must be in the table."""
    for shared in ranges(plan, shared=True):
        span = slice(shared.begin, shared.begin + shared.tokens)
        expected = req_to_token[rows[shared.reader], span]
        for query in shared.queries:
            held = req_to_token[rows[query], span]
            other = f"{name(shared.reader)}, which shares it,"
            compare(held, expected, shared.begin, name(query), other)


def compare(
    held: torch.Tensor, expected: torch.Tensor, begin: int, holder: str, other: str
) -> None:
    """Raise SlotMismatch unless the slots [tokens] that ``holder`` and ``other`` have from token
    ``begin`` on are the same."""
    if torch.equal(held, expected):
        return
    if len(held) != len(expected):
        raise SlotMismatch(f"{holder} protects {len(held)} tokens, {other} has {len(expected)}")
    at = int(np.flatnonzero((held != expected).cpu().numpy())[0])
    raise SlotMismatch(
        f"{holder} holds slot {int(held[at])} at token {begin + at}, "
        f"{other} holds slot {int(expected[at])}"
    )
