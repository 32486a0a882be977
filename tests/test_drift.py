# SPDX-License-Identifier: Apache-2.0
"""A plan ends where one of its branches comes to hold up the other work (csrc/pack/drift.h)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from kit.trees import Batch, batch_of, batches, target

from benchmarks.common.forests import skew
from benchmarks.common.trees import Requests
from sglang_pat import _C
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Plan, plan
from sglang_pat.target import Target

LEAST, MOST_DRIFT = _C.LEAST_GROWTH, _C.MOST_DRIFT
# Long requests beside a branch of many short ones, of which the second holds up the rest at once.
SOON, AT_ONCE = skew(2), skew(1)


def h200(batch: Requests, **changes: object) -> Target:
    heads: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return Target.h200(max_queries=batch.num_queries, **(heads | changes))


def seconds(made: Plan, made_for: Target, batch: Requests, growth: int = 0) -> float:
    """Modelled, with ``growth`` more tokens in every sequence."""
    lengths = np.asarray(batch.seq_lens, dtype=np.int64) + growth
    unique = batch.unique_tokens + growth * batch.num_queries
    return _C.plan_seconds(made_for.native, _C.plan_terms(made, lengths, unique))


def room(made: Plan, batch: Requests | Batch) -> npt.NDArray[np.int64]:
    """Tokens that each sequence may grow."""
    return made.max_seq_lens - np.asarray(batch.seq_lens, dtype=np.int64)


def test_a_plan_holds_until_a_branch_holds_up_the_others() -> None:
    made_for = h200(SOON, branching="always")
    made = plan(SOON.paths, SOON.seq_lens, made_for)
    assert made.branch_tokens > 0
    growth = int(room(made, SOON).max())
    assert room(made, SOON).min() == growth
    assert LEAST < growth < 128

    def fair(tokens: int) -> float:
        added_bytes = tokens * SOON.num_queries * 8 * 2 * 128 * 2
        return seconds(made, made_for, SOON) + added_bytes / made_for.bytes_per_s

    last, before = (seconds(made, made_for, SOON, growth - back) for back in (0, 1))
    assert last <= MOST_DRIFT * fair(growth)
    assert last + (last - before) > MOST_DRIFT * fair(growth + 1)


def test_a_plan_for_the_present_lengths_is_modelled_to_be_faster() -> None:
    made_for = h200(AT_ONCE, num_q_heads=8, num_kv_heads=1)
    old = plan(AT_ONCE.paths, AT_ONCE.seq_lens, made_for)
    growth = int(room(old, AT_ONCE).max())
    assert growth == LEAST
    later = replace(AT_ONCE, seq_lens=[length + growth for length in AT_ONCE.seq_lens])
    new = plan(later.paths, later.seq_lens, made_for)
    assert MOST_DRIFT * seconds(new, made_for, later) < seconds(old, made_for, AT_ONCE, growth)


@pytest.mark.parametrize("spec", ["1,1024_2048,32", "1,4,256_1024,128,32"])
def test_even_branches_hold_each_other_up_no_more_than_before(spec: str) -> None:
    tree = Tree.parse(spec)
    made = plan(tree.paths, tree.seq_lens, h200(tree, branching="always"))
    assert made.branch_tokens > 0
    assert room(made, tree).min() >= 128


def test_draft_tokens_have_no_such_limit() -> None:
    made = plan(SOON.paths, SOON.seq_lens, h200(SOON, draft_tokens=2))
    assert made.branch_tokens > 0
    assert room(made, SOON).min() >= 128


@settings(max_examples=100, deadline=None)
@given(batches())
def test_a_plan_always_holds_for_some_steps(batch: Batch) -> None:
    made = plan(batch.paths, batch.seq_lens, target(branching="always"))
    for tokens, path, length in zip(room(made, batch), batch.paths, batch.seq_lens, strict=True):
        in_the_tree = (path[-1][2] if path else 0) == length
        assert tokens >= LEAST or (tokens == 0 and in_the_tree)


def test_a_tree_without_branches_is_as_before() -> None:
    batch = batch_of(Tree.parse("1,64_4096,512"))
    made = plan(batch.paths, batch.seq_lens, target(branching="never"))
    assert room(made, batch).min() >= 128
