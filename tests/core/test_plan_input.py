# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from: paths, lengths and targets, and what is wrong with them."""

from __future__ import annotations

import pytest
from kit.trees import target

from sglang_pat.planner import Planner, plan


@pytest.mark.parametrize(
    ("paths", "lens", "message"),
    [
        ([[(1, 0, 5), (2, 6, 9)]], [10], r"query 0: node 2 starts at 6 and leaves a gap after 5"),
        ([[(1, 0, 5), (2, 4, 9)]], [10], r"query 0: node 2 starts at 4 and overlaps .* before 5"),
        ([[(1, 1, 5)]], [10], r"node 1 starts at 1 and leaves a gap after 0"),
        ([[(1, 0, 0)]], [10], r"node 1 has the empty or negative span \[0, 0\)"),
        ([[(1, 0, 11)]], [10], r"node 1 ends at 11 beyond its sequence of 10 tokens"),
        ([[(1, 0, 5), (1, 5, 9)]], [10], r"node 1 stands under node 1, another .* under node -1"),
        ([[(1, 0, 2), (3, 2, 4)], [(2, 0, 3), (3, 3, 5)]], [9, 9], r"query 1: node 3 stands under"),
        ([[]], [-1], r"query 0: sequence length -1 is not in"),
        ([[]], [2**31], r"query 0: sequence length 2147483648 is not in"),
        ([[]], [2**30 + 1], r"reads 1073741825 different tokens, a plan can have 1073741824"),
        ([[]], [1, 2], r"paths of 1 queries.*2 sequence lengths"),
        ([[]], [1.5], r"seq_lens is of type float64, must be integers"),
        ([[]] * 5, [1] * 5, r"a batch of 5 queries does not fit the plan's 4 rows .*max_queries"),
    ],
)
def test_bad_input_is_named(paths, lens, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(paths, lens, target(max_queries=4))


class Short:
    """Paths that are fewer than they say."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, query: int) -> list[tuple[int, int, int]]:
        return [[(1, 0, 5)]][query]


def test_elements_of_another_form_are_refused() -> None:
    for path in ([(1, 0)], [1, 2, 3], [("a", 0, 5)], 7, [(1, 0.5, 5)]):
        with pytest.raises(TypeError):
            plan([path], [10], target())
    with pytest.raises(ValueError, match=r"paths of 1 queries.*3 sequence lengths"):
        plan(Short(), [9, 9, 9], target())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_sms": 0}, "num_sms is 0"),
        ({"num_q_heads": 30}, "num_q_heads is 30"),
        ({"row_tiles": (16, 16)}, "row_tiles"),
        ({"row_tiles": ()}, "row_tiles"),
        ({"row_tiles": (2,)}, "fewer than the 4 of one query"),
        ({"kv_tiles": (0, 32)}, "kv_tiles"),
        ({"reread_weight": 0.0}, "reread_weight is 0"),
        ({"partial_bytes": 3}, "partial_bytes is 3"),
        ({"max_items": 10}, "max_items is 10"),
        ({"policy": "magic"}, "policy is 'magic', must be one of default, pat"),
        ({"cuts": ("halves",)}, "cuts is 'halves', must be one of branches, half_branches"),
        ({"max_items": 2**31}, "max_items is 2147483648, must be at most 2147483647"),
        ({"draft_tokens": 0}, "draft_tokens is 0, must be from 1 to 32767"),
        ({"draft_tokens": 33}, "fewer than the 132 of one query: a GQA group of 4 .* tokens, 33"),
        ({"max_segments": -1}, "max_segments is -1"),
    ],
)
def test_targets_are_checked(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        target(**overrides)


def test_clipped_paths_share_what_both_have_also_with_other_lengths() -> None:
    # Query 2 is protected to token 30 of node 1: it shares these and keeps the rest private.
    planner = Planner(target())
    paths = [[(1, 0, 80)], [(1, 0, 80)], [(1, 0, 30)]]
    planner.plan(paths, [90] * 3)
    assert planner.last_paths() == paths
    assert planner.last_tree() == ([(-1, 0, 30, 3), (0, 30, 80, 2)], [1, 1, 0])
    again, fresh = planner.plan_again([500, 600, 700]), plan(paths, [500, 600, 700], target())
    assert again.items.tobytes() == fresh.items.tobytes()
    with pytest.raises(ValueError, match="2 sequence lengths for the paths of 3 queries"):
        planner.plan_again([90, 95])
    with pytest.raises(ValueError, match="query 1: node 1 ends at 80 beyond its sequence of 79"):
        planner.plan_again([90, 79, 90])


def test_draft_tokens_that_do_not_fit() -> None:
    made_for = target(draft_tokens=4)
    with pytest.raises(ValueError, match=r"query 1: node 7 ends at 98, among the 4 draft tokens"):
        plan([[(7, 0, 96)], [(7, 0, 98)]], [101, 101], made_for)
    with pytest.raises(ValueError, match="sequence of 3 tokens does not hold the 4 draft tokens"):
        plan([[]], [3], made_for)
    assert plan([[]], [0], made_for).num_items == 0
