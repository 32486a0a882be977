# SPDX-License-Identifier: Apache-2.0
"""Attention sinks, and plans that a sink must come into once, for both executors."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch

from kit.cases import Case, by_hand, case, random_trees
from kit.drafts import drafted, drafted_forest
from kit.kinds import ROWS, SMALL, items_of
from kit.pieces import DYNAMIC, Piece, forest, shared
from kit.plans import HandPlan, joint

NONE = -math.inf
# Of a layer's query heads by turns. Logits of a random case lie between -5 and 5, so a sink is
# above all of them, far below, among them, or none. Five by turns differ over the KV heads, too.
SINKS = {
    "above": (8.0,),
    "below": (-30.0,),
    "none": (NONE,),
    "mixed": (8.0, NONE, 0.5, -30.0, 4.25),
}
# Queries whose item writes the output, those of two splits and of many, draft tokens; and every
# kind of item.
PLANS = (
    *("one split", "two splits", "many splits", "joint splits"),
    *("chains", "trees", "branches of chains"),
    *SMALL,
)
of_sinks = pytest.mark.parametrize("sinks", SINKS)
of_plans = pytest.mark.parametrize("name", PLANS)


def with_sinks(inputs: Case, sinks: str, dtype: torch.dtype = torch.float32) -> Case:
    """With ``SINKS[sinks]``, where q is."""
    values = list(islice(cycle(SINKS[sinks]), inputs.heads[0]))
    return replace(inputs, sinks=torch.tensor(values, dtype=dtype, device=inputs.q.device))


def planned(name: str, heads: tuple[int, int], head_dim: int = 64) -> tuple[Case, HandPlan]:
    """Inputs and the plan of one of ``PLANS``, without sinks."""
    if name in SMALL:
        return items_of(name, heads, head_dim)
    if name in ("chains", "trees"):
        inputs = drafted(drafted_forest(1, heads, 4), heads, 4, head_dim)
        inputs = random_trees(inputs) if name == "trees" else inputs
    elif name == "branches of chains":
        pieces = forest(np.random.default_rng(2), 8)
        options = {"draft_tokens": 3, "tails": (3, 4, 70)}
        inputs = by_hand(pieces, heads, head_dim=head_dim, **options)
    else:
        everyone = tuple(range(ROWS * heads[1] // heads[0]))
        pieces = {
            "one split": [Piece((query,), 0, DYNAMIC) for query in range(4)],
            "two splits": shared(4, 40),
            "many splits": shared(4, 20 * 33, 33),
            "joint splits": [Piece(everyone, 0, 500), Piece(everyone, 500, 300)],
        }[name]
        inputs = case(pieces, heads, head_dim)
    plan = inputs.plan()
    return inputs, joint(plan) if name == "joint splits" else plan
