# SPDX-License-Identifier: Apache-2.0
"""Radix paths -> pack tree -> schedule -> plan (PAT sections 5.1, 5.2 and 6), all in C++."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from sglang_pat import _C
from sglang_pat.plan_text import plan_line, plan_text
from sglang_pat.target import Target

Plan = _C.Plan
Plan.__repr__ = plan_line  # type: ignore[method-assign, assignment]
Plan.__str__ = plan_text  # type: ignore[method-assign, assignment]
Integers = Any  # [B] integers: a sequence, an array or a tensor on the CPU


class Node(NamedTuple):
    """A radix node on a query's path: the tokens [``start``, ``end``) of the query's sequence.

    Queries whose paths name the same ``id`` hold the same K/V slots for these tokens.
    """

    id: int
    start: int
    end: int


PathElement = Node | tuple[int, int, int]


class Planner(_C.Planner):
    """Makes plans for one target and keeps the working memory. Not thread-safe.

    Beside ``plan`` a server calls ``plan_from_handles``, for paths in a tree that a ``RadixPaths``
    reads: ``handles`` are those of the first queries, as ``HandleReader`` gives them, the others
    share nothing; ``leaf(i, id)`` gives the Python node of query i, for a tree of these. And
    ``plan_again(seq_lens)``, for the paths of the last plan, which must not have raised, with other
    lengths. All raise ValueError for numbers that do not fit, and what looking up a node raises.

    ``last_paths()``: of each query of the last plan what it was made from, (node id, start, end)
    from the root on, as far as another query shares it. ``last_tree()``: its pack tree, (parent or
    -1, start, end, queries) of each node, parents first, and the deepest node of each query or -1.

    ``plan_packs(seq_lens, takes_over, piece_tokens)``: an explicit plan, without branches, for the
    batch and the lengths of the last plan. ``takes_over`` [nodes + B]: whether a node of
    ``last_tree`` or a query's tail reads the tokens of the pack above it with its own;
    ``piece_tokens``, likewise: of its pieces, at most 512.

    ``costs``: what the judge charges, values of ``_C.COST_NAMES`` (csrc/pack/target.h); to be set.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.native)
        self.target = target

    def plan(self, paths: Sequence[Sequence[tuple[Any, ...]] | None], seq_lens: Integers) -> Plan:
        """As the function ``plan``, which keeps a planner for each target."""
        given = np.asarray(seq_lens)
        if given.size and given.dtype.kind not in "iu":
            raise ValueError(
                f"seq_lens is of type {given.dtype}, must be integers: round them first"
            )
        return super().plan(paths, np.ascontiguousarray(given, dtype=np.int64))


_planners_lock = Lock()
_planner_for = lru_cache(maxsize=8)(Planner)


def plan(paths: Sequence[Sequence[PathElement] | None], seq_lens: Integers, target: Target) -> Plan:
    """Plan one decode step of B queries for ``target``.

    ``paths[i]``: the radix nodes of query i, each a ``Node`` or a plain tuple (id, start, end), in
    token positions, from 0 on without gaps; ``None`` or empty means that it shares nothing. Queries
    that name the same node must hold the same K/V slots there, which only ``check_slots`` and
    ``decode(..., check=True)`` look at. ``seq_lens`` [B] counts tokens, the one being decoded
    included. The plan stays valid while every length lies in [``Plan.min_seq_lens``,
    ``Plan.max_seq_lens``]; ``print`` shows its tree and its items.

    Raises ValueError naming query, node and position for paths that are not one tree, for lengths
    that are no integers, and for a batch larger than ``target.max_queries``; TypeError for paths
    that are no sequence of sequences of tuples.
    """
    with _planners_lock:
        return _planner_for(target).plan(paths, seq_lens)
