# SPDX-License-Identifier: Apache-2.0
"""Plans that no executor runs: each damage is refused before anything is read or written."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.cases import Case, by_hand, case, check, error, execute, grown
from kit.drafts import drafted
from kit.pieces import DYNAMIC, Branch, Piece, shared
from kit.plans import PARTS, HandPlan, joint, paired

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX = 2**31 - 1


def two_branches() -> Case:
    """Queries 0 to 3 and 4 to 7 with 200 common tokens and 60 of each four's own."""
    parts = []
    for first in (0, 4):
        mine = tuple(range(first, first + 4))
        tails = [Piece((query,), 260, DYNAMIC) for query in mine]
        parts.append(Branch((Piece(mine, 0, 200), Piece(mine, 200, 60), *tails)))
    own = [piece for part in parts for piece in part.pieces[1:]]
    inputs = case([Piece(tuple(range(8)), 0, 200), *own], (8, 2), tails=(0, 5, 70))
    return replace(inputs, pieces=parts)


INPUTS: dict[str, Case] = {
    # Items 0 and 1 of all three queries, then three tails; 9 partials.
    "packs": case(shared(3, 40, splits=2), tails=(30,)),
    # Item 0 with segments 0 (shared) and 1 to 4 (tails).
    "branch": by_hand(shared(4, 100), (4, 2), tails=(30,)),
    "pair": two_branches(),
    "drafts": drafted(shared(3, 70), (4, 2), 3, before=(0, 1, 7)),
    "joint": by_hand(shared(4, 100), (4, 2), tails=(30,)),
    "rows": by_hand(shared(9, 40), (8, 1), most=8, tails=(5,)),
    "many": case([Piece(tuple(range(100)), 0, 70)], (1, 1)),  # 100 packed rows
}
# The check of a call counts the tokens of each query and leaves to the planner's tests which these
# are: so much may be wrong of a plan that runs.
ONLY_COUNTED = {("item_segments", "first_segment"), ("segments", "kv_start"), ("segments", "query")}


def plan_of(name: str) -> HandPlan:
    plan = INPUTS[name].plan()
    return paired(plan, 3) if name == "pair" else joint(plan) if name == "joint" else plan


def words_of(plan: HandPlan) -> list[tuple[str, str]]:
    """Part and first field of each word of a plan."""
    found = []
    for part in ("header", *PARTS):
        fields = getattr(plan, part).dtype.fields
        for _ in getattr(plan, part):
            at = {offset // 4: name for name, (_, offset, *_) in reversed(fields.items())}
            last = getattr(plan, part).dtype.itemsize // 4
            found += [(part, at.get(word, "")) for word in range(last)]
    return found


@pytest.mark.parametrize("name", ["packs", "branch", "pair", "drafts", "joint"])
def test_a_damaged_word_is_refused_or_changes_nothing(name: str) -> None:
    inputs, plan = INPUTS[name], plan_of(name)
    check(inputs, plan)
    truth, _ = inputs.truth()
    refused = 0
    for at, word in enumerate(words_of(plan)):
        right = int(plan.words[at])
        others = {right + by for by in (1, -1, 64)} | {right ^ (1 << bit) for bit in (16, 24)}
        for value in sorted((others | {-1, 0, MAX, -MAX - 1}) - {right}):
            plan.words[at] = np.int64(value).astype(np.int32)
            try:
                out, _ = execute(inputs, plan)
            except ValueError:
                refused += 1
                continue
            assert word in ONLY_COUNTED or error(out, truth) < 2e-6, (at, word, right, value)
        plan.words[at] = right
    assert refused > 400


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("packs", {"header.version": 11}, "plan version 11"),
        ("packs", {"items.num_queries": MAX}, r"item 0 has members 0 \+ 2147483647"),
        ("packs", {"segments.kv_len": 19, "segments.room": 19}, "covers 69 tokens of query 0"),
        ("packs", {"members.partial": 1}, "item 1 writes partial 1"),
        ("branch", {"segments.num_queries": 3}, "1 KV tiles of 64 tokens for all"),
        ("rows", {"items.num_queries": 9}, "branch 0 has 72 packed rows, at most 64"),
        ("drafts", {"header.draft_tokens": 2}, "for 2 draft tokens a query, the arguments have 3"),
        ("many", {"header.joint": 1}, "item 0 of a joint plan has 100 packed rows"),
        ("pair", {"header.num_paired_items": 1}, "1 paired items of 2 heavy ones, .* must be even"),
        ("pair", {"items.common_tiles": 0}, "items 0 and 1 are paired with 0 and 3 common tiles"),
    ],
)
def test_what_is_wrong_is_named(name: str, changes: dict[str, int], named: str) -> None:
    """Changes are of the first element of a part."""
    plan = plan_of(name)
    check(INPUTS[name], plan)
    for field, value in changes.items():
        part, _, field = field.partition(".")
        getattr(plan, part)[field][0] = value
    with pytest.raises(ValueError, match=named):
        execute(INPUTS[name], plan.encode())


def test_halves_of_a_pair_that_begin_with_other_tokens_are_refused() -> None:
    """They would wait for each other forever: 150 of the 200 common tokens, then the others."""
    plan = plan_of("pair")
    first = int(plan.item_segments["first_segment"][1])
    for place, start, tokens in ((first, 0, 150), (first + 1, 150, 110)):
        plan.segments["kv_start"][place] = start
        plan.segments["kv_len"][place] = plan.segments["room"][place] = tokens
    with pytest.raises(ValueError, match=r"begin with tokens 0 \+ 200 and 0 \+ 150, must be the"):
        execute(INPUTS["pair"], plan.encode())


def test_a_cut_plan_is_refused() -> None:
    plan = plan_of("packs")
    for size in (0, 63, 64, plan.nbytes - 8):
        cut: Any = SimpleNamespace(data_ptr=plan.data_ptr, nbytes=size, draft_tokens=1)
        with pytest.raises(ValueError, match="bytes"):
            execute(INPUTS["packs"], cut)
    cut.data_ptr = 0
    with pytest.raises(ValueError, match="null"):
        execute(INPUTS["packs"], cut)


def test_lengths_that_are_not_the_plan_s_are_refused() -> None:
    tails = shared(3, 40)
    inputs = replace(case(tails, (4, 2), tails=(31,)), pieces=[Branch(tuple(tails), room=31)])
    check(inputs)
    with pytest.raises(ValueError, match="room for 31 tokens of query 1, which has 32 from 40 on"):
        execute(grown(inputs, [71, 72, 71]))
    # A prefix that reaches into the draft tokens; then a tail that begins among them.
    for name, length in (("packs", 39), ("drafts", 71)):
        shorter = torch.full_like(INPUTS[name].seq_lens, length)
        with pytest.raises(ValueError, match="the plan was made for other lengths"):
            execute(replace(INPUTS[name], seq_lens=shorter), plan_of(name))
