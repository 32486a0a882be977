# SPDX-License-Identifier: Apache-2.0
"""``check_slots`` and ``decode(check=True)``: paths that claim what is not shared are caught."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.common.forests import Tree
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import make_batch
from sglang_pat import Plan, SlotMismatch, Target, check_slots, decode, plan

TREE = Tree((1, 2, 6), (300, 200, 40))
HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
TARGETS = {
    "packs": Target.cpu(threads=2, max_queries=8, **HEADS),
    "branches": Target.h200(max_queries=8, cuts=("branches",), **HEADS),
}
PLANS = {name: plan(TREE.paths, TREE.seq_lens, target) for name, target in TARGETS.items()}
BATCH = make_batch(TREE, Heads(*HEADS.values()), True, dtype=torch.float32)


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("query", "token"), [(1, 0), (4, 299), (2, 300), (5, 499)])
def test_a_wrong_slot_is_named(made: Plan, query: int, token: int) -> None:
    """Padding is not read, and tokens of one query are its own."""
    table, row = BATCH.req_to_token.clone(), int(BATCH.rows[query])
    table[BATCH.rows[3], 510] += 1
    check_slots(made, table, torch.cat([BATCH.rows, torch.tensor([-1, 99])]))
    right = int(table[row, token])
    table[row, token] = right + 1
    with pytest.raises(SlotMismatch, match=rf"at token {token}, .*req_to_token") as raised:
        check_slots(made, table, BATCH.rows)
    assert f"query {query} " in str(raised.value)
    assert re.search(rf"slot {right}\b", str(raised.value))


def test_decode_checks_when_asked() -> None:
    """Without the check the output is wrong without a word; with it nothing is written."""
    table = BATCH.req_to_token.clone()
    table[BATCH.rows[1], :300] = torch.randperm(len(BATCH.k_cache))[:300].to(torch.int32)
    inputs = replace(BATCH, req_to_token=table).inputs
    right = decode(*BATCH.inputs, PLANS["packs"], scale=0.125, check=True)
    assert torch.equal(decode(*inputs, PLANS["packs"], scale=0.125), right)
    out = torch.full_like(right, float("nan"))
    with pytest.raises(ValueError, match=r"query 1 (of its pack|holds)"):
        decode(*inputs, PLANS["packs"], scale=0.125, out=out, check=True)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        ([[0]], torch.arange(6), "req_to_token is of type list, must be a torch.Tensor"),
        (torch.zeros(540), torch.arange(6), "req_to_token has shape (540,), must have 2 dim"),
        (torch.zeros(6, 540), torch.zeros(6), "rows is torch.float32, must be an integer type"),
        (torch.zeros(6, 540), torch.arange(5), "the plan is for 6 queries, rows has 5"),
        (torch.zeros(6, 540), torch.arange(6) + 1, "query 5: row 6 is not one of the table's 6"),
        (torch.zeros(6, 499), torch.arange(6), "req_to_token has 499 a row"),
    ],
)
def test_what_cannot_be_compared_is_named(table: Any, rows: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_slots(PLANS["packs"], table, rows)
