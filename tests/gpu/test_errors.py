# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused before any launch, with what was given and what fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.cases import Case, by_hand, case
from kit.device import DevicePlan, case_of_tree, execute, on_device, target_of
from kit.pieces import Piece, prefix

from sglang_pat.explain.tree import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import plan as make_plan
from sglang_pat.workspace import Workspace

TREE = Tree((1, 6), (100, 20))
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": lambda t: t.float()}, r"must both be torch\.float32 as q is"),
    ({"q": lambda t: t[0]}, r"q has shape \(8, 128\), must have 3 dimensions"),
    (
        {"q": lambda t: t[:, :7]},
        r"7 query heads on 2 KV heads: the ratio must be a whole number from 1 to 16",
    ),
    ({"q": lambda t: t[..., ::2]}, r"q has strides .*the last must be 1"),
    ({"q": lambda t: t[..., 1:]}, r"k_cache has head dim 128, q has 127"),
    ({"q": lambda t: t[:4]}, r"the plan is for 6 queries, q has 4"),
    ({"k": lambda t: t.half()}, r"k_cache is torch\.float16"),
    ({"k": lambda t: t.cpu()}, r"k_cache is on cpu, q on cuda:0"),
    ({"v": lambda t: t[:-1]}, r"v_cache has .* slots"),
    ({"v": lambda t: t[..., :64]}, r"v_cache has head dim 64, q 128"),
    ({"table": lambda t: t.long()}, r"req_to_token is torch\.int64, must be int32"),
    ({"table": lambda t: t.cpu()}, r"req_to_token is on cpu"),
    ({"rows": lambda t: t.float()}, r"rows is torch\.float32, must be int"),
    ({"rows": lambda t: t[:3]}, r"3 rows and 6 seq_lens"),
    ({"seq_lens": lambda t: t.cpu()}, r"seq_lens is on cpu, the workspace on cuda:0"),
    ({"seq_lens": lambda t: t + 5000}, r"made for other lengths"),
    ({"scale": lambda s: float("nan")}, r"scale is nan"),
    ({"logit_cap": lambda c: -1.0}, r"logit_cap -1"),
]


@pytest.fixture(scope="module")
def inputs() -> Case:
    return case_of_tree(TREE, (8, 2))


@pytest.mark.parametrize("change", range(len(WRONG)))
def test_wrong_arguments(inputs: Case, change: int) -> None:
    changes, message = WRONG[change]
    plan = make_plan(TREE.paths, TREE.seq_lens, target_of(inputs))
    wrong = replace(inputs, **{name: f(getattr(inputs, name)) for name, f in changes.items()})
    with pytest.raises(ValueError, match=message):
        decode(
            wrong.q,
            wrong.k,
            wrong.v,
            wrong.table,
            wrong.rows,
            wrong.seq_lens,
            plan,
            scale=wrong.scale,
            logit_cap=wrong.logit_cap,
        )


def test_misaligned_rows(inputs: Case) -> None:
    plan = make_plan(TREE.paths, TREE.seq_lens, target_of(inputs))
    storage = torch.zeros(inputs.q.numel() + 8, dtype=inputs.q.dtype, device="cuda")
    shifted = storage[1 : 1 + inputs.q.numel()].view_as(inputs.q)
    with pytest.raises(ValueError, match=r"multiples of 16 bytes"):
        execute(replace(inputs, q=shifted), plan, workspace=None)


def test_wrong_outputs(inputs: Case) -> None:
    plan = make_plan(TREE.paths, TREE.seq_lens, target_of(inputs))
    arguments = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens, plan)
    with pytest.raises(ValueError, match=r"out is .*float32"):
        decode(*arguments, scale=1.0, out=inputs.q.float())
    with pytest.raises(ValueError, match=r"lse is .*must be contiguous"):
        decode(*arguments, scale=1.0, lse=torch.zeros(8, 6, device="cuda"))
    with pytest.raises(ValueError, match=r"lse is .* on cpu"):
        decode(*arguments, scale=1.0, lse=torch.zeros(6, 8))


def test_heads_that_the_kernels_do_not_have() -> None:
    for heads, head_dim, message in (
        ((17, 1), 128, "ratio"),
        ((4, 2), 96, "head_dim is 96, the CUDA kernels have 64, 128 and 256"),
    ):
        given = on_device(case([Piece((0,), 0, 9)], heads, head_dim), torch.bfloat16)
        with pytest.raises(ValueError, match=message):
            execute(given)


def test_plans_that_do_not_fit(inputs: Case) -> None:
    plan = make_plan(TREE.paths, TREE.seq_lens, target_of(inputs))
    width = inputs.table.shape[1]
    small = Workspace(target_of(inputs, max_queries=4), width)
    with pytest.raises(ValueError, match=r"6 queries, .*does not fit .* 4 queries"):
        small.load(plan)
    few = Workspace(target_of(inputs, max_partials=2), width)
    with pytest.raises(ValueError, match=r"12 partials .*does not fit .* 2 partials"):
        few.load(DevicePlan(hand_plan()))
    narrow = Workspace(target_of(inputs, max_branch_tokens=1599), width)
    with pytest.raises(ValueError, match=r"1664 of them of branches, does not fit .* 1599 of them"):
        narrow.load(DevicePlan(branch_plan()))
    short = Workspace(target_of(inputs), 90)
    with pytest.raises(ValueError, match=r"reads up to token 100, the workspace is for .* of 90"):
        short.load(DevicePlan(branch_plan()))
    with pytest.raises(ValueError, match=r"reads up to token 100, the workspace is for .* of 90"):
        short.load(DevicePlan(hand_plan()))
    with pytest.raises(ValueError, match=r"tokens a row, the workspace holds 90"):
        short.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    other = Workspace(replace(target_of(inputs), num_q_heads=4), width)
    with pytest.raises(ValueError, match=r"the plan is for 8 query and 2 KV heads"):
        other.load(plan)


def hand_plan() -> Any:
    everyone = tuple(range(6))
    pieces = [Piece(everyone, 0, 100), *(Piece((i,), 100, 20) for i in everyone)]
    return case(pieces, (8, 2), 128).plan()


def branch_plan() -> Any:
    """Of one branch, a prefix of 100 tokens and six tails, with places for 1636 tokens."""
    return by_hand(prefix(6, 100), (8, 2), head_dim=128).plan()


DAMAGE: list[tuple[str, str, int, int]] = [
    ("header", "magic", 0, 7),
    ("header", "num_items", 0, 10**6),
    ("header", "queries_offset", 0, 10**6),
    ("header", "num_partials", 0, -1),
    ("items", "member_offset", 0, 10**6),
    ("items", "num_queries", 0, 0),
    ("items", "list_start", 1, -1),
    ("items", "list_start", 1, 10**6),
    ("items", "kind", 1, 3),
    ("item_segments", "first_segment", 1, 10**6),
    ("item_segments", "num_segments", 1, 2),
    ("segments", "query", 1, 6),
    ("segments", "kv_start", 1, -1),
    ("segments", "kv_len", 1, 0),
    ("segments", "kv_len", 1, 10**9),
    ("header", "list_tokens", 0, 3),
    ("members", "query", 3, -1),
    ("members", "partial", 3, 10**6),
    ("queries", "partial_offset", 2, 10**6),
    ("queries", "num_splits", 2, -1),
]


@pytest.mark.parametrize(("part", "field", "index", "value"), DAMAGE)
def test_damaged_plans(inputs: Case, part: str, field: str, index: int, value: int) -> None:
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    hand = hand_plan()
    workspace.load(DevicePlan(hand))
    getattr(hand, part)[field][index] = np.int64(value)
    with pytest.raises(ValueError, match=r"damaged plan|not a plan|the workspace is for"):
        workspace.load(DevicePlan(hand.encode()))


BRANCH_DAMAGE: list[tuple[str, str, int, int]] = [
    ("header", "num_segments", 0, 10**6),
    ("header", "segments_offset", 0, 8),
    ("header", "branch_tokens", 0, 1600),
    ("item_segments", "first_segment", 0, 1),
    ("item_segments", "num_segments", 0, 300),
    ("items", "list_start", 0, 8),
    ("items", "list_start", 0, 64),
    ("segments", "query", 2, 6),
    ("segments", "query", 2, 0),
    ("segments", "kv_start", 0, -1),
    ("segments", "kv_len", 0, -1),
    ("segments", "kv_len", 0, 10**9),
    ("segments", "room", 0, 101),
    ("segments", "room", 1, 0),
    ("segments", "first_member", 0, 1),
    ("segments", "first_member", 1, -1),
    ("segments", "num_queries", 0, 7),
    ("segments", "num_queries", 1, 0),
]


@pytest.mark.parametrize(("part", "field", "index", "value"), BRANCH_DAMAGE)
def test_damaged_branches(inputs: Case, part: str, field: str, index: int, value: int) -> None:
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    hand = branch_plan()
    workspace.load(DevicePlan(hand))
    getattr(hand, part)[field][index] = np.int64(value)
    with pytest.raises(ValueError, match=r"damaged plan"):
        workspace.load(DevicePlan(hand.encode()))


def test_workspace_holds_another_plan(inputs: Case) -> None:
    target = target_of(inputs)
    first, second = (make_plan(TREE.paths, TREE.seq_lens, target) for _ in range(2))
    workspace = Workspace(target, inputs.table.shape[1])
    workspace.load(first)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    with pytest.raises(ValueError, match=r"holds another plan"):
        decode(*arguments, second, scale=1.0, workspace=workspace)
    with pytest.raises(ValueError, match=r"a batch of 4: the loaded plan has 6 queries"):
        workspace.snapshot(inputs.table, inputs.rows[:4], inputs.seq_lens[:4])


def test_no_load_in_a_capture(inputs: Case) -> None:
    target = target_of(inputs)
    workspace = Workspace(target, inputs.table.shape[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="while a CUDA graph is captured"):
        workspace.load(make_plan(TREE.paths, TREE.seq_lens, target))


def test_a_workspace_that_goes_in_a_capture(inputs: Case) -> None:
    """As garbage of earlier work may. What it freed would invalidate the capture."""
    target = target_of(inputs)
    workspace = Workspace(target, inputs.table.shape[1])
    workspace.load(make_plan(TREE.paths, TREE.seq_lens, target))
    total = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(1)
        del workspace
    Workspace(target, inputs.table.shape[1])  # frees what that one left
    graph.replay()
    assert total.item() == 1
