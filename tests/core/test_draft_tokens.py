# SPDX-License-Identifier: Apache-2.0
"""Queries of several draft tokens: plans for them, and the CPU executor against attention by its
definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drafts
from kit.cases import Case, by_hand, execute
from kit.cpu import check_any
from kit.pieces import DYNAMIC, Piece, forest, shared
from kit.plans import HandPlan, set_to
from kit.trees import Batch, batches, target

from sglang_pat.ops import decode
from sglang_pat.planner import plan
from sglang_pat.target import CUTS

pytestmark = pytest.mark.usefixtures("one_torch_thread")

HEADS = [(8, 2), (4, 4), (5, 1), (14, 2), (6, 3)]


drafted = partial(drafts.drafted, before=drafts.AROUND_BLOCKS)


@pytest.mark.parametrize("draft_tokens", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("heads", HEADS)
def test_random_forests(draft_tokens: int, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(draft_tokens)
    inputs = drafted(forest(rng, 9), heads, draft_tokens, seed=draft_tokens)
    check_any(inputs, inputs.plan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("partial", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit_cap", [0.0, 20.0])
def test_dtypes(dtype: torch.dtype, partial: torch.dtype, logit_cap: float) -> None:
    inputs = drafted(shared(6, 90, splits=3), (8, 2), 4, logit_cap=logit_cap).to(dtype)
    truth, _ = inputs.truth()
    out, _ = execute(inputs, partial=partial)
    exact = torch.float32 in (dtype, partial) and dtype == partial
    assert (out.double() - truth).norm() / truth.norm() < (2e-6 if exact else 8e-3)


@pytest.mark.parametrize("draft_tokens", [2, 4, 5])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_branches(draft_tokens: int, most: int) -> None:
    rng = np.random.default_rng(most)
    pieces = forest(rng, 8)
    tails = (draft_tokens, draft_tokens + 1, draft_tokens + 70)
    inputs = by_hand(pieces, (8, 2), most=most, tails=tails, draft_tokens=draft_tokens)
    check_any(inputs, inputs.plan())


def test_every_draft_token_has_tokens_of_its_own() -> None:
    """Each attends to one token more than the one before it: with all values equal to the token's
    position and all keys zero, the output is the mean position."""
    inputs = drafted([Piece((0,), 0, DYNAMIC)], (2, 1), 4)
    slots = inputs.table[inputs.rows[0], : int(inputs.seq_lens[0])].long()
    k, v = torch.zeros_like(inputs.k), torch.full_like(inputs.v, float("nan"))
    v[slots] = torch.arange(len(slots), dtype=torch.float32)[:, None, None]
    out, lse = execute(replace(inputs, k=k, v=v))
    for draft_token in range(4):
        count = len(slots) - 3 + draft_token
        torch.testing.assert_close(out[draft_token].mean(), torch.tensor((count - 1) / 2))
        torch.testing.assert_close(lse[draft_token], torch.full((2,), float(np.log2(count))))


@pytest.mark.parametrize("length", [193, 194, 195, 196, 65, 129])
@pytest.mark.parametrize("rules", [{"cuts": ("quarter_parts",)}, {"policy": "pat"}])
def test_the_last_piece_holds_all_draft_tokens(length: int, rules: dict[str, Any]) -> None:
    """Pieces of 64 tokens would leave 1 to 4 for the last."""
    for num_sms in (24, 132):
        made = plan([[], []], [length, 4000], target(draft_tokens=4, num_sms=num_sms, **rules))
        assert (made.min_seq_lens <= [length - 4, 3996]).all()
        assert made.queries["num_splits"].max() > 1


def paths_case(batch: Batch, draft_tokens: int, heads: tuple[int, int], seed: int) -> Case:
    """Inputs for the queries of a batch: its nodes have slots of their own, so do the tails."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    slots: dict[tuple[int, int], int] = {}
    width = max(batch.seq_lens) + 1
    table = np.zeros((len(batch.seq_lens), width), np.int32)
    for query, (path, length) in enumerate(zip(batch.paths, batch.seq_lens, strict=True)):
        owner = [(-1 - query, at) for at in range(length)]
        for node, start, end in path:
            owner[start:end] = [(node, at) for at in range(start, end)]
        table[query, :length] = [slots.setdefault(key, len(slots)) for key in owner]
    order = rng.permutation(len(slots)).astype(np.int32)
    q_heads, kv_heads = heads
    return Case(
        q=torch.randn(len(batch.seq_lens) * draft_tokens, q_heads, 32),
        k=torch.randn(len(slots), kv_heads, 32),
        v=torch.randn(len(slots), kv_heads, 32),
        table=torch.from_numpy(order[table]),
        rows=torch.arange(len(batch.seq_lens)),
        seq_lens=torch.tensor(batch.seq_lens),
        pieces=[],
        scale=0.2,
        draft_tokens=draft_tokens,
    )


@settings(max_examples=60, deadline=None)
@given(batches(8, 10), st.integers(2, 6), st.sampled_from(CUTS), st.sampled_from([1, 2, 132]))
def test_decode(batch: Batch, draft_tokens: int, cut: str, num_sms: int) -> None:
    batch = batch.drafted(draft_tokens)
    if not batch.seq_lens:
        return
    heads: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    made_for = target(draft_tokens=draft_tokens, cuts=(cut,), num_sms=num_sms, **heads)
    inputs = paths_case(batch, draft_tokens, (8, 2), seed=len(batch.paths))
    made = plan(batch.paths, batch.seq_lens, made_for)
    lse = torch.empty(inputs.q.shape[:2])
    arguments = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    out = decode(*arguments, made, scale=inputs.scale, lse=lse)
    truth, truth_lse = inputs.truth()
    assert (out.double() - truth).norm() / truth.norm() < 2e-6
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)


def test_damaged_plans() -> None:
    inputs = drafted(shared(3, 70), (4, 2), 3)
    hand = inputs.plan()
    execute(inputs, hand)

    def refused(why: str, hand: HandPlan, inputs: Case = inputs, **changes: Any) -> None:
        with pytest.raises(ValueError, match=why):
            execute(inputs, hand.encode(), **changes)

    refused("for 3 draft tokens a query, the arguments have 2", hand, draft_tokens=2)
    refused("draft_tokens is 0, must be 1 or more", hand, draft_tokens=0)
    for value in (0, -1, 2**20):
        broken = inputs.plan()
        set_to("header", 0, "draft_tokens", value)(broken)
        refused(f"damaged plan: {value} draft tokens a query", broken)
    # The prefix reaches into the draft tokens; then a tail begins among them.
    shorter = replace(inputs, seq_lens=torch.full_like(inputs.seq_lens, 71))
    refused("the plan was made for other lengths", inputs.plan(), shorter)


def test_rows_of_q() -> None:
    inputs = drafted(shared(3, 70), (8, 2), 4)
    made_for = target(num_q_heads=8, num_kv_heads=2, draft_tokens=4)
    made = plan([[]] * 3, inputs.seq_lens.tolist(), made_for)
    cache = (inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    with pytest.raises(ValueError, match=r"q has 11 rows, must be a multiple of the plan's 4"):
        decode(inputs.q[:11], *cache, made, scale=1.0)
