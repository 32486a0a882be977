# SPDX-License-Identifier: Apache-2.0
"""First work units that the snapshot writes down: the same that the schedulers would push."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit.cases import Case, case
from kit.device import (
    BF16,
    attend,
    case_of_tree,
    check,
    execute,
    of_head_dims,
    on_device,
    same,
    target_of,
)
from kit.pieces import DYNAMIC, Piece, shared
from kit.plans import HEADER

from benchmarks.common.forests import Tree
from sglang_pat import _C
from sglang_pat.planner import Plan
from sglang_pat.planner import plan as make_plan
from sglang_pat.target import CUTS
from sglang_pat.workspace import Workspace

NO_QUERY = 0xFFFFFFFF
# Of csrc/cuda/forward/pipeline.cuh: the slots of the first tiles, and the queries of wgmma's rows.
UNIT = np.dtype(
    {
        "names": ["slots", "rows"],
        "formats": [("<u4", 192), ([("query", "<u4"), ("head", "<u2"), ("draft", "<u2")], 64)],
        "offsets": [0, 816],
        "itemsize": 1408,
    }
)
TREES = {
    "one": Tree((1,), (3000,)),
    "few": Tree((2,), (2000,)),
    "shared": Tree((1, 4), (2000, 64)),
    "wide": Tree((1, 64), (4096, 100)),
    "branches": Tree((1, 4, 64), (256, 128, 16)),
    "pairs": Tree((1, 1024), (2048, 32)),
    "many": Tree((200,), (130,)),
}


def workspace_of(inputs: Case, plan: object, **options: str) -> Workspace:
    made = Workspace(target_of(inputs), 1 << 16, **options)
    made._buffers["first_units"].fill_(255)  # halves that a GPU lacks: -1 tokens, no rows
    made.load(plan)
    made.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    return made


def flag(workspace: Workspace) -> torch.Tensor:
    """The header's ``first_units`` on the GPU, as a view."""
    _, begin = HEADER.fields["first_units"][:2]
    return workspace._buffers["plan"][begin : begin + 4].view(torch.int32)


def bed_of(
    name: str, heads: tuple[int, int] = (32, 8), draft_tokens: int = 1
) -> tuple[Case, Plan, Workspace]:
    """With the first units of that tree's plan written down."""
    tree = TREES[name]
    inputs = case_of_tree(tree, heads, draft_tokens=draft_tokens)
    plan = make_plan(tree.paths, tree.seq_lens, target_of(inputs))
    return inputs, plan, workspace_of(inputs, plan)


@pytest.mark.parametrize(
    ("heads", "draft_tokens"), [((32, 8), 1), ((8, 1), 1), ((4, 4), 1), ((32, 8), 4)]
)
@pytest.mark.parametrize("name", TREES)
def test_results_are_those_of_schedulers_alone(
    name: str, heads: tuple[int, int], draft_tokens: int
) -> None:
    """A workspace whose header says that nothing is written down lets the schedulers begin."""
    inputs, plan, workspace = bed_of(name, heads, draft_tokens)
    assert flag(workspace) == 1
    results = attend(inputs, plan, workspace=workspace)
    assert flag(workspace) == 1
    flag(workspace).zero_()
    assert same(results, attend(inputs, plan, workspace=workspace))
    assert flag(workspace) == 0


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *(("slots", name) for name in ("few", "shared", "wide")),
        *(("rows", name) for name in ("wide", "branches", "pairs")),
    ],
)
def test_the_forward_begins_with_them(field: str, name: str) -> None:
    """With other slots of K and V, or other rows of Q, written down the output is another; without
    them it is the right one."""
    if field == "rows" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only wgmma's units have rows")
    inputs, plan, workspace = bed_of(name)
    right, _ = attend(inputs, plan, workspace=workspace)
    raw = workspace._buffers["first_units"]
    assert raw.nbytes == _C.CUDA_FIRST_UNIT_BYTES and raw.nbytes % (2 * UNIT.itemsize) == 0
    changed = raw.cpu()
    units = changed.numpy().view(UNIT)
    if field == "slots":
        units["slots"] = workspace._buffers["list"][0].item()
    else:
        queries = units["rows"]["query"]
        queries[queries != NO_QUERY] = 0
    raw.copy_(changed)
    wrong, _ = attend(inputs, plan, workspace=workspace)
    assert not torch.equal(wrong, right) and not wrong.isnan().any()
    flag(workspace).zero_()
    assert torch.equal(attend(inputs, plan, workspace=workspace)[0], right)


def test_a_plan_without_a_snapshot_begins_with_no_other_s_units() -> None:
    """Its items have no tokens yet, those of the plan before it had."""
    inputs = case_of_tree(TREES["shared"], (32, 8))
    plans = [
        make_plan(TREES["shared"].paths, TREES["shared"].seq_lens, target_of(inputs, cuts=cuts))
        for cuts in (CUTS, ())
    ]
    assert plans[0].num_items != plans[1].num_items
    workspace = workspace_of(inputs, plans[0])
    workspace.load(plans[1])
    assert flag(workspace) == 0
    out, lse = attend(inputs, plans[1], workspace=workspace)
    assert lse.isneginf().all() and not out.any()
    workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    assert flag(workspace) == 1
    results = attend(inputs, plans[1], workspace=workspace)
    assert same(results, execute(inputs, plans[1]))
    workspace.reset()
    assert flag(workspace) == 0


def test_a_snapshot_of_too_few_rows_takes_them_back() -> None:
    """Such a plan is not run, and what an earlier snapshot wrote down is not begun with."""
    inputs, plan, workspace = bed_of("few")
    right, _ = attend(inputs, plan, workspace=workspace)
    _C.snapshot_cuda(
        workspace.bound,
        req_to_token=(inputs.table.data_ptr(), inputs.table.stride(0), inputs.table.shape[1]),
        rows=(inputs.rows.data_ptr(), inputs.rows.element_size()),
        seq_lens=(inputs.seq_lens.data_ptr(), inputs.seq_lens.element_size()),
        num_rows=len(inputs.rows) - 1,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    assert flag(workspace) == 0
    assert torch.equal(attend(inputs, plan, workspace=workspace)[0], right)


@of_head_dims
def test_a_half_may_be_done_before_its_scheduler_looks(head_dim: int) -> None:
    """First units of a token or none: a scheduler that waited for the ring would wait forever."""
    pieces = [Piece((query,), 0, DYNAMIC) for query in range(150)]
    inputs = on_device(case(pieces, (2, 2), head_dim, tails=(0, 1, 2)), BF16)
    plan = inputs.plan()
    out = check(inputs, plan)
    workspace = workspace_of(inputs, plan)
    for _ in range(50):
        assert torch.equal(execute(inputs, plan, workspace=workspace)[0], out)


def test_other_launches_have_none() -> None:
    inputs = on_device(case(shared(2, 300), (8, 2)), BF16)
    plan = inputs.plan()
    workspace = workspace_of(inputs, plan, launch="streams")
    assert flag(workspace) == 0
    check(inputs, plan, workspace=workspace)
