# SPDX-License-Identifier: Apache-2.0
"""The trace of the forward: everything in the plan is entered, once, at times that can be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kit.bars import Bar, bars_of, trace_rows
from kit.cases import Case, case
from kit.device import DevicePlan, execute, on_device, target_of
from kit.pieces import Piece
from kit.trees import first_segments

from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import Layer, PatOptions, device_batch
from sglang_pat.config import PatConfig
from sglang_pat.explain.tree import Tree
from sglang_pat.target import POLICIES
from sglang_pat.workspace import Workspace

WIDE = Tree((1, 1024), (2048, 32))
TREES = (Tree((3,), (20,)), Tree((1, 10), (4096, 416)), Tree((1, 4, 8, 256), (32, 256, 256, 32)))


def check(
    bars: list[Bar], items: npt.NDArray[Any], group: int, num_kv_heads: int, joint: bool = False
) -> None:
    """Every packed row of every item and KV head in one bar, of a joint plan in one a half."""
    halves = 2 if joint and torch.cuda.get_device_capability() == (9, 0) else 1
    rows: Counter[tuple[int, int]] = Counter()
    for bar in bars:
        assert 0 <= bar.begin_ns <= bar.end_ns
        rows[bar.item, bar.head] += bar.rows
    queries = items["num_queries"].tolist()
    heads = range(num_kv_heads)
    assert dict(rows) == {
        (item, head): group * n * halves for item, n in enumerate(queries) for head in heads
    }


def trace(layer: Layer) -> list[Bar]:
    made = layer.plan
    rows = trace_rows(made.items, made.num_q_heads // made.num_kv_heads, made.num_kv_heads)
    words = torch.zeros((rows, 4), dtype=torch.int64, device="cuda")
    layer.workspace.trace = words
    layer.attend()
    return bars_of(words.cpu().numpy())


@pytest.mark.parametrize(
    ("tree", "heads", "policy"),
    [
        *((tree, Heads(32, 8), policy) for tree in (*TREES, WIDE) for policy in POLICIES),
        *((TREES[-1], heads, "default") for heads in (Heads(32, 32), Heads(64, 8, 64))),
        (TREES[-1], Heads(8, 2, 256), "default"),
    ],
    ids=str,
)
def test_every_item_is_entered(tree: Tree, heads: Heads, policy: str) -> None:
    batch = device_batch(tree, heads, True)
    layer = Layer(batch, tree, heads, PatOptions(policy), heads.dim**-0.5)
    joint = bool(layer.plan.joint) and PatConfig(policy=policy).launch != "streams"
    bars = trace(layer)
    check(bars, layer.plan.items, heads.q // heads.kv, heads.kv, joint)
    assert {bar.half for bar in bars} <= {0, 1}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert len({bar.sm for bar in bars}) <= sms


def hand_case() -> Case:
    """Items of 1 to 300 packed rows."""
    pieces, first = [], 0
    for count in (300, 129, 128, 65, 64, 33, 16, 8, 1):
        members = tuple(range(first, first + count))
        pieces += [Piece(members, 0, 200)] + [Piece((query,), 200, 33) for query in members]
        first += count
    return on_device(case(pieces, (2, 2), 128), torch.bfloat16)


@pytest.mark.parametrize("wide", [False, True])
def test_items_in_parts(wide: bool) -> None:
    """Also: to trace changes nothing in the output, and nothing is written when it is off."""
    inputs = hand_case()
    made = DevicePlan(inputs.plan(wide=wide))
    items = made.hand.items
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    plain = execute(inputs, made, workspace=workspace)
    words = torch.zeros((trace_rows(items, 1, 2), 4), dtype=torch.int64, device="cuda")
    workspace.trace = words
    traced = execute(inputs, made, workspace=workspace)
    entries = words.clone()
    workspace.trace = None
    untraced = execute(inputs, made, workspace=workspace)
    assert torch.equal(words, entries)
    for before, on, off in zip(plain, traced, untraced, strict=True):
        assert torch.equal(on, before) and torch.equal(off, before)

    bars = bars_of(entries.cpu().numpy())
    check(bars, items, 1, 2)
    # What one warp did are private tails, of one tile; all of those.
    tails = {
        item for item, length in enumerate(first_segments(made)["kv_len"].tolist()) if length <= 64
    }
    assert {bar.item for bar in bars if bar.warp is not None} == tails
    shared_by_halves = wide and torch.cuda.get_device_capability() == (9, 0)
    for item in np.flatnonzero(items["num_queries"] > 64).tolist():
        places = {(bar.sm, bar.half) for bar in bars if (bar.item, bar.head) == (item, 0)}
        assert len({sm for sm, _ in places}) == 1
        assert {half for _, half in places} == {0, 1} if shared_by_halves else len(places) == 1
