# SPDX-License-Identifier: Apache-2.0
"""What a printed plan shows."""

from __future__ import annotations

from kit.trees import first_segments, target

from sglang_pat.planner import Planner, plan

SMALL = """\
<Plan: 3 queries, 8 query and 2 KV heads, 5 items (2 shared), 8 partial results>
tree:
  tokens [0, 600) of queries 0-2
    tokens [600, 900) of queries 0, 2
      tokens [900, end of sequence) of query 0
      tokens [900, end of sequence) of query 2
    tokens [600, end of sequence) of query 1
items, in the order in which they begin:
"""


def test_a_printed_plan_shows_its_tree_and_its_items() -> None:
    paths = [[(1, 0, 600), (2, 600, 900)], [(1, 0, 600)], [(1, 0, 600), (2, 600, 900)]]
    planner = Planner(target(num_sms=1, num_q_heads=8, num_kv_heads=2))
    planner.plan(paths, [950, 640, 910])
    made = planner.plan_packs([950, 640, 910], [False] * 5, [1000] * 5)
    assert repr(made) == SMALL.splitlines()[0] and str(made).startswith(SMALL)
    first, *others = str(made).removeprefix(SMALL).splitlines()
    row, tile = first_segments(made)[0]["query"], made.items[0]["row_tile"]
    assert " ".join(first.split()) == (
        f"item 0: light queries 0-2 tokens [0, 600) in the row of query {row} "
        f"tile of {tile} rows, to partials 0, 3, 5"
    )
    assert len(others) == made.num_items - 1
    # At most 25 lines of the tree and of the items.
    many = str(plan([[]] * 100, [50] * 100, target())).splitlines()
    assert len(many) == 2 * 25 + 3 and many[-1].startswith("  ... and 76 more items")
    empty, private = plan([], [], target()), plan([[]], [5], target())
    assert str(empty) == repr(empty)
    assert "to output" in str(private) and repr(private).startswith("<Plan: 1 query, 32 query and")
