# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused before any launch, with what was given and what fits. What is found
without a GPU is in tests/core: test_ops.py, test_workspace.py and the refusals of damaged plans.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.cases import Case, by_hand, case
from kit.device import BF16, case_of_tree, execute, on_device, target_of
from kit.pieces import Piece, shared
from kit.plans import HandPlan

from benchmarks.common.forests import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Plan
from sglang_pat.planner import plan as make_plan
from sglang_pat.workspace import Workspace

TREE = Tree((1, 6), (100, 20))


@pytest.fixture(scope="module")
def inputs() -> Case:
    return case_of_tree(TREE, (8, 2))


def planned(inputs: Case) -> Plan:
    return make_plan(TREE.paths, TREE.seq_lens, target_of(inputs))


def arguments_of(inputs: Case) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "req_to_token", "rows", "seq_lens")
    given = dict(zip(names, inputs.inputs, strict=True))
    return given | {"plan": planned(inputs), "scale": inputs.scale}


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same two bytes further on."""
    storage = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device="cuda")
    return storage[1 : 1 + tensor.numel()].view_as(tensor)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", torch.Tensor.float, r"must both be torch\.float32 as q is"),
        ("q", lambda t: t[:, :7], r"7 query heads on 2 KV heads: the ratio must be"),
        ("q", lambda t: t[:4], r"the plan is for 6 queries, q has 4"),
        ("q", shifted, r"multiples of 16 bytes"),
        ("k_cache", torch.Tensor.half, r"k_cache is torch\.float16"),
        ("k_cache", torch.Tensor.cpu, r"k_cache is on cpu, q on cuda:0"),
        ("v_cache", lambda t: t[..., :64], r"V has head dim 64, K 128: must be alike"),
        ("req_to_token", torch.Tensor.cpu, r"req_to_token is on cpu"),
        ("rows", lambda t: t[:3], r"3 rows and 6 seq_lens"),
        ("seq_lens", torch.Tensor.cpu, r"seq_lens is on cpu, the workspace on cuda:0"),
        ("seq_lens", lambda t: t + 5000, r"made for other lengths"),
        ("scale", lambda _: float("nan"), r"scale is nan"),
        ("out", lambda _: torch.zeros(6, 8, 128).cuda(), r"out is .*float32"),
        ("lse", lambda _: torch.zeros(6, 8), r"lse is .* on cpu"),
    ],
)
def test_wrong_arguments(inputs: Case, name: str, change: Any, message: str) -> None:
    arguments = arguments_of(inputs)
    with pytest.raises(ValueError, match=message):
        decode(**(arguments | {name: change(arguments.get(name))}))


@pytest.mark.parametrize(
    ("heads", "head_dim", "message"),
    [
        ((17, 1), 128, "ratio"),
        ((4, 2), 96, "head_dim is 96, the CUDA kernels have 64, 128 and 256"),
    ],
)
def test_heads_that_the_kernels_do_not_have(
    heads: tuple[int, int], head_dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        execute(on_device(case([Piece((0,), 0, 9)], heads, head_dim), BF16))


def hand_plan() -> HandPlan:
    everyone = tuple(range(6))
    pieces = [Piece(everyone, 0, 100), *(Piece((i,), 100, 20) for i in everyone)]
    return case(pieces, (8, 2), 128).plan()


def branch_plan() -> HandPlan:
    """Of one branch, a prefix of 100 tokens and six tails, with places for 1636 tokens."""
    return by_hand(shared(6, 100), (8, 2), head_dim=128).plan()


WIDTH = 125  # of the table
UP_TO = r"reads up to token {}, the workspace is for .* of 90"


@pytest.mark.parametrize(
    ("overrides", "width", "make", "message"),
    [
        ({"max_queries": 4}, WIDTH, hand_plan, r"6 queries, .*does not fit .* 4 queries"),
        ({"max_partials": 2}, WIDTH, hand_plan, r"12 partials .*does not fit .* 2 partials"),
        ({"max_branch_tokens": 1599}, WIDTH, branch_plan, r"1664 of them of .* 1599 of them"),
        ({"num_q_heads": 4}, WIDTH, hand_plan, r"the plan is for 8 query and 2 KV heads"),
        ({}, 90, hand_plan, UP_TO.format(120)),
        ({}, 90, branch_plan, UP_TO.format(100)),
    ],
)
def test_plans_that_do_not_fit(
    inputs: Case, overrides: dict[str, int], width: int, make: Any, message: str
) -> None:
    workspace = Workspace(replace(target_of(inputs), **overrides), width)
    with pytest.raises(ValueError, match=message):
        workspace.load(make())


# One for each of the checks; tests/core has a table of all damage, on the CPU.
@pytest.mark.parametrize(
    ("make", "part", "name", "index", "value"),
    [
        (hand_plan, "header", "magic", 0, 7),
        (hand_plan, "header", "num_items", 0, 10**6),
        (hand_plan, "items", "member_offset", 0, 10**6),
        (hand_plan, "items", "list_start", 1, -1),
        (hand_plan, "items", "row_tile", 1, -1),
        (hand_plan, "item_segments", "first_segment", 1, 10**6),
        (hand_plan, "segments", "query", 1, 6),
        (hand_plan, "segments", "kv_len", 1, 10**9),
        (hand_plan, "members", "query", 3, -1),
        (hand_plan, "members", "partial", 3, 10**6),
        (hand_plan, "queries", "partial_offset", 2, 10**6),
        (branch_plan, "header", "branch_tokens", 0, 1600),
        (branch_plan, "item_segments", "num_segments", 0, 300),
        (branch_plan, "items", "list_start", 0, 64),
        (branch_plan, "segments", "room", 1, 0),
        (branch_plan, "segments", "first_member", 1, -1),
        (branch_plan, "segments", "num_queries", 0, 7),
    ],
)
def test_damaged_plans(
    inputs: Case, make: Any, part: str, name: str, index: int, value: int
) -> None:
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    hand = make()
    workspace.load(hand)
    getattr(hand, part)[name][index] = value
    with pytest.raises(ValueError, match=r"damaged plan|not a plan|the workspace is for"):
        workspace.load(replace(hand))  # the loaded plan itself is not read again


def test_workspace_holds_another_plan(inputs: Case) -> None:
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    workspace.load(planned(inputs))
    with pytest.raises(ValueError, match=r"holds another plan"):
        decode(**arguments_of(inputs), workspace=workspace)
    with pytest.raises(ValueError, match=r"a batch of 4: the loaded plan has 6 queries"):
        workspace.snapshot(inputs.table, inputs.rows[:4], inputs.seq_lens[:4])


def test_no_load_in_a_capture(inputs: Case) -> None:
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="while a CUDA graph is captured"):
        workspace.load(planned(inputs))


def test_a_workspace_that_goes_in_a_capture(inputs: Case) -> None:
    """As garbage of earlier work may. What it freed would invalidate the capture."""
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    workspace.load(planned(inputs))
    total = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(1)
        del workspace
    Workspace(target_of(inputs), inputs.table.shape[1])  # frees what that one left
    graph.replay()
    assert total.item() == 1
