# SPDX-License-Identifier: Apache-2.0
"""First work units that the snapshot writes down: the same that the schedulers would push."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit.cases import Case, case
from kit.device import DevicePlan, attend, case_of_tree, check, execute, on_device, target_of
from kit.pieces import DYNAMIC, Piece
from kit.plans import BRANCH, HEADER

from sglang_pat import _C
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import plan as make_plan
from sglang_pat.target import CUTS
from sglang_pat.workspace import Workspace

BF16 = torch.bfloat16
GIVEN_TILES = 3
NO_QUERY = 0xFFFFFFFF
UNIT = np.dtype(
    [
        ("slots", "<u4", (GIVEN_TILES, 64)),
        *((name, "<i4") for name in ("member_offset", "first_packed_row", "num_rows")),
        *((name, "<i4") for name in ("list_start", "num_tokens", "halved_tokens")),
        ("item", "<i4"),
        *((name, "<i2") for name in ("kv_head", "unmasked_tiles")),
        *((name, "<i4") for name in ("query", "partial")),
        ("pair", "<i2"),
        *((name, "i1") for name in ("kind", "order", "narrow", "pairing", "joint")),
        ("unused", "i1"),
        ("rows", [("query", "<u4"), ("head", "<u2"), ("draft", "<u2")], 64),
        ("padding", "V80"),
    ]
)
OWN_FIRST = 2  # of ``pairing``
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


def written(workspace: Workspace) -> np.ndarray:
    """What each half of each CTA of the forward begins with: [SMs, 2]."""
    raw = workspace._buffers["first_units"].cpu().numpy().view(UNIT)
    sms = torch.cuda.get_device_properties(workspace.device).multi_processor_count
    return raw.reshape(-1, 2)[:sms]


def flag(workspace: Workspace) -> torch.Tensor:
    """The header's ``first_units`` on the GPU, as a view."""
    _, begin = HEADER.fields["first_units"][:2]
    return workspace._buffers["plan"][begin : begin + 4].view(torch.int32)


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (4, 4)])
@pytest.mark.parametrize("name", TREES)
def test_results_are_those_of_schedulers_alone(name: str, heads: tuple[int, int]) -> None:
    """A workspace whose header says that nothing is written down lets the schedulers begin."""
    tree = TREES[name]
    inputs = case_of_tree(tree, heads)
    plan = make_plan(tree.paths, tree.seq_lens, target_of(inputs))
    with_units = workspace_of(inputs, plan)
    assert flag(with_units) == 1
    out, lse = execute(inputs, plan, workspace=with_units)
    without = workspace_of(inputs, plan)
    flag(without).zero_()
    again, lse_again = attend(inputs, plan, workspace=without)
    assert flag(without) == 0
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def loaded_tiles(unit: np.void, half: int) -> list[int]:
    """First tokens of the tiles that the half loads of the unit, in order."""
    halved = list(range(64 * half, unit["halved_tokens"], 128))
    others = list(range(unit["halved_tokens"], unit["num_tokens"], 64))
    return others + halved if unit["pairing"] == OWN_FIRST else halved + others


@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("name", TREES)
def test_what_is_written_down(name: str, draft_tokens: int) -> None:
    """No unit twice, but those that both halves work on; the slots are the list's."""
    tree = TREES[name]
    inputs = case_of_tree(tree, (32, 8), draft_tokens=draft_tokens)
    plan = make_plan(tree.paths, tree.seq_lens, target_of(inputs))
    workspace = workspace_of(inputs, plan)
    units = written(workspace)
    sound = units["num_tokens"] > 0
    assert sound.any()
    wide = (units["pairing"] > 0) & (units["kind"] != BRANCH)
    single = units[sound & ~wide & (units["joint"] == 0)]
    names = list(zip(single["item"].tolist(), single["kv_head"].tolist(), strict=True))
    assert len(set(names)) == len(names)
    listed = workspace._buffers["list"].cpu().numpy()
    for (_, half), unit in zip(np.argwhere(sound), units[sound], strict=True):
        tiles = loaded_tiles(unit, half)
        assert tiles or (half == 1 and unit["pairing"])
        for slots, first in zip(unit["slots"], tiles, strict=False):
            count = min(64, unit["num_tokens"] - first)
            begin = unit["list_start"] + first
            assert (slots[:count] == listed[begin : begin + count]).all()


@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("name", TREES)
def test_rows_of_q(name: str, draft_tokens: int) -> None:
    """The queries and heads of the plan's packed rows, where wgmma runs the unit; else none."""
    tree = TREES[name]
    inputs = case_of_tree(tree, (32, 8), draft_tokens=draft_tokens)
    target = target_of(inputs)
    plan = make_plan(tree.paths, tree.seq_lens, target)
    units = written(workspace_of(inputs, plan)).reshape(-1)
    group = 4 * draft_tokens
    hopper = torch.cuda.get_device_capability()[0] == 9
    seen = 0
    for unit in units:
        heavy = unit["pairing"] or unit["kind"] == BRANCH or unit["num_rows"] > 16
        count = unit["num_rows"] if hopper and heavy and unit["num_tokens"] > 0 else 0
        seen += count
        rows = unit["rows"]
        assert (rows["query"][count:] == NO_QUERY).all()
        packed = unit["first_packed_row"] + np.arange(count)
        queries = plan.members["query"][unit["member_offset"] + packed // group]
        assert (rows["query"][:count] == queries).all()
        assert (rows["head"][:count] == unit["kv_head"] * 4 + packed % group).all()
        assert (rows["draft"][:count] == packed % group // 4).all()
    assert seen > 0 or not hopper or name in ("one", "few", "many", "shared")


@pytest.mark.parametrize("name", ["few", "shared", "wide"])
def test_the_forward_begins_with_them(name: str) -> None:
    """With other slots written down the output is another, without them the right one."""
    tree = TREES[name]
    inputs = case_of_tree(tree, (32, 8))
    plan = make_plan(tree.paths, tree.seq_lens, target_of(inputs))
    workspace = workspace_of(inputs, plan)
    right, _ = attend(inputs, plan, workspace=workspace)
    slots = workspace._buffers["first_units"].view(torch.int32).view(-1, UNIT.itemsize // 4)
    slots[:, : 64 * GIVEN_TILES] = workspace._buffers["list"][0].item()
    wrong, _ = attend(inputs, plan, workspace=workspace)
    assert not torch.equal(wrong, right) and not wrong.isnan().any()
    flag(workspace).zero_()
    assert torch.equal(attend(inputs, plan, workspace=workspace)[0], right)


@pytest.mark.parametrize("name", ["wide", "branches", "pairs"])
def test_the_consumers_copy_the_rows_of_q(name: str) -> None:
    """With another query written down for each row the output is another."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only wgmma's units have rows")
    tree = TREES[name]
    inputs = case_of_tree(tree, (32, 8))
    plan = make_plan(tree.paths, tree.seq_lens, target_of(inputs))
    workspace = workspace_of(inputs, plan)
    right, _ = attend(inputs, plan, workspace=workspace)
    raw = workspace._buffers["first_units"]
    units = raw.cpu().numpy().view(UNIT)
    rows = units["rows"]["query"]
    rows[rows != NO_QUERY] = 0
    raw.copy_(torch.from_numpy(units.view(np.uint8)))
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
    out, lse = attend(inputs, plans[1], workspace=workspace)
    for mine, other in zip((out, lse), execute(inputs, plans[1]), strict=True):
        assert torch.equal(mine, other)
    workspace.reset()
    assert flag(workspace) == 0


def test_a_snapshot_of_too_few_rows_takes_them_back() -> None:
    """Such a plan is not run, and what an earlier snapshot wrote down is not begun with."""
    inputs = case_of_tree(TREES["few"], (32, 8))
    plan = make_plan(TREES["few"].paths, TREES["few"].seq_lens, target_of(inputs))
    workspace = workspace_of(inputs, plan)
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_half_may_be_done_before_its_scheduler_looks(head_dim: int) -> None:
    """First units of a token or none: a scheduler that waited for the ring would wait forever."""
    pieces = [Piece((query,), 0, DYNAMIC) for query in range(150)]
    inputs = on_device(case(pieces, (2, 2), head_dim, tails=(0, 1, 2)), BF16)
    plan = DevicePlan(inputs.plan())
    out = check(inputs, plan)
    workspace = workspace_of(inputs, plan)
    for _ in range(50):
        assert torch.equal(execute(inputs, plan, workspace=workspace)[0], out)


@pytest.mark.parametrize("launch", ["streams", "serial"])
def test_other_launches_have_none(launch: str) -> None:
    pieces = [Piece((0, 1), 0, 300), Piece((0,), 300, DYNAMIC), Piece((1,), 300, DYNAMIC)]
    inputs = on_device(case(pieces, (8, 2)), BF16)
    plan = DevicePlan(inputs.plan())
    workspace = workspace_of(inputs, plan, launch=launch)
    assert flag(workspace) == 0
    check(inputs, plan, workspace=workspace)


def test_the_buffer_is_as_large_as_the_kernels_say() -> None:
    assert _C.cuda_first_unit_bytes() % (2 * UNIT.itemsize) == 0 and UNIT.itemsize == 1408
