# SPDX-License-Identifier: Apache-2.0
"""The model of a plan's time by hand: what it counts of a plan, and what it charges for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.trees import target

from benchmarks.common.trees import PAPER_TREES
from sglang_pat import _C, plan
from sglang_pat.explain.tree import Tree
from sglang_pat.target import Target


@pytest.mark.parametrize(
    "name", ["reread_factor", "wide_factor", "merge_factor", "branch_overhead_s"]
)
def test_factors_of_a_target_are_checked(name: str) -> None:
    for value in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"Target.{name} is .*, must be a finite number of 0"):
            target(**{name: value})
    target(**{name: 0.0})


def terms_of(tree: Tree, made_for: Target) -> Any:
    made = plan(tree.paths, tree.seq_lens, made_for)
    return _C.plan_terms(made, np.array(tree.seq_lens), tree.unique_tokens), made


def test_terms_of_a_plan_by_hand() -> None:
    """Queries of 4 packed rows on 4096 common tokens, with a private tail of 200 each."""
    tree = Tree((1, 16), (4096, 200))
    unique = 4096 + 16 * 200
    packs, made = terms_of(tree, target(branching="never"))
    assert (packs.unique_tokens, packs.reread_tokens) == (unique, 0)
    assert (packs.items, packs.partials) == (made.num_items, made.num_partials)
    assert packs.partials > 16
    assert (packs.branches, packs.wide_tokens, packs.longest_branch_tokens) == (0, 0, 0)
    private, made = terms_of(tree, target(branching="never", row_tiles=(4,)))
    assert private.reread_tokens == 15 * 4096
    assert private.reread_tokens == made.kv_tokens_read(sum(tree.seq_lens)) - unique
    branches, made = terms_of(tree, target(branching="always", branch_rows=(64,)))
    assert branches.branches == branches.items == 1 and branches.partials == 0
    assert branches.longest_branch_tokens == unique
    wide, _ = terms_of(Tree((1, 32), (8192, 1)), target(branching="never", num_sms=2))
    assert wide.wide_tokens == 8192 and wide.unique_tokens == 8192 + 32


@pytest.mark.parametrize(
    ("name", "tree", "options"),
    [
        ("reread_factor", Tree((1, 16), (4096, 200)), {"row_tiles": (4,), "branching": "never"}),
        ("wide_factor", Tree((1, 64), (8192, 16)), {"branching": "never"}),
        ("merge_factor", Tree((1, 64), (8192, 16)), {"branching": "never"}),
        ("branch_overhead_s", PAPER_TREES[8], {"branching": "always"}),
    ],
)
def test_a_factor_charges_for_what_the_plan_has(
    name: str, tree: Tree, options: dict[str, Any]
) -> None:
    """Seconds are linear in the factor, with what the plan has of it as the slope."""
    made_for = target(**options)
    terms, _ = terms_of(tree, made_for)
    token_s = 2 * 128 * 2 / made_for.bytes_per_s
    partial_s = 2 * 4 * (128 * 4 + 4) / made_for.bytes_per_s
    slope = {
        "reread_factor": terms.reread_tokens * token_s,
        "wide_factor": terms.wide_tokens * token_s,
        "merge_factor": terms.partials * partial_s,
        "branch_overhead_s": terms.branches / made_for.num_sms,
    }[name]
    assert slope > 0
    seconds = [
        _C.plan_seconds(replace(made_for, **{name: value}).native, terms) for value in (2.0, 3.0)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(8 * slope)


@pytest.mark.parametrize(("queries", "joint"), [(256, True), (400, False)])
def test_a_long_branch_slows_all_sms(queries: int, joint: bool) -> None:
    """A plan takes longer than its bytes and than its longest branch, the more the nearer these
    are; but not a joint one, whose branches have an SM each."""
    made_for = target(
        branching="always", branch_rows=(64,), branch_overhead_s=0.0, max_queries=queries
    )
    terms, made = terms_of(Tree((1, queries), (2048, 100)), made_for)
    assert terms.branches == terms.items and terms.partials == 0
    assert (made.num_items * 8 <= made_for.num_sms) == joint
    token_s = 2 * 128 * 2 / made_for.bytes_per_s
    read = terms.unique_tokens + made_for.reread_factor * terms.reread_tokens
    in_bytes = 8 * read * token_s
    longest = terms.longest_branch_tokens * token_s * made_for.num_sms
    both = max(in_bytes, 0.6 * longest) if joint else (in_bytes**4 + longest**4) ** 0.25
    assert _C.plan_seconds(made_for.native, terms) == pytest.approx(both)
    assert 0.5 < in_bytes / longest < 2


def test_lengths_of_another_batch_are_refused() -> None:
    tree = PAPER_TREES[0]
    made = plan(tree.paths, tree.seq_lens, target())
    with pytest.raises(ValueError, match="does not hold for these 10 sequence lengths"):
        _C.plan_terms(made, np.array([1] * 10), tree.unique_tokens)
    with pytest.raises(ValueError, match="does not hold for these 3 sequence lengths"):
        _C.plan_terms(made, np.array(tree.seq_lens[:3]), tree.unique_tokens)
