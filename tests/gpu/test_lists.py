# SPDX-License-Identifier: Apache-2.0
"""The list of slots is replaced under a captured graph: longer, shorter, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from kit.device import attend, case_of_tree, execute, target_of

from sglang_pat import workspace as of_workspace
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Plan, Planner
from sglang_pat.workspace import LAUNCHES, Workspace

TREE = Tree((1, 64), (2000, 30))
SHORT = 16384  # tokens: a list for the plans that share


class GraphBed:
    """A graph that was captured with a list of ``SHORT`` tokens, and plans for its batch.
    ``memory``: whether the GPU has any left for another list."""

    def __init__(self, launch: str) -> None:
        self.inputs = case_of_tree(TREE, (8, 2))
        target, width = target_of(self.inputs), self.inputs.table.shape[1]
        self.memory = True
        self.workspace = Workspace(
            target, width, launch=launch, list_tokens=SHORT, region=self.region
        )
        self.planner = Planner(target)
        self.private = self.planner.plan([[]] * TREE.num_queries, TREE.seq_lens)
        assert self.private.list_tokens > 2 * SHORT
        other = Workspace(target, width, launch=launch, list_tokens=1 << 20)
        self.want = {
            plan.num_shared_items > 0: execute(self.inputs, plan, workspace=other)
            for plan in (self.private, self.shared())
        }
        self.workspace.load(self.shared())
        self.run()  # as before any capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out, self.lse = self.run()

    @contextmanager
    def region(self) -> Iterator[None]:
        if not self.memory:
            raise torch.cuda.OutOfMemoryError("no memory")
        yield

    def shared(self) -> Plan:
        """A plan that shares, anew: the one that is loaded is not loaded again."""
        return self.planner.plan(TREE.paths, TREE.seq_lens)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        of = self.inputs
        self.workspace.snapshot(of.table, of.rows, of.seq_lens)
        return attend(of, self.workspace.plan, workspace=self.workspace)

    def replay(self) -> torch.Tensor:
        """Whether the graph's results are those of the loaded plan; does not wait for them."""
        self.graph.replay()
        assert self.workspace.plan is not None
        out, lse = self.want[self.workspace.plan.num_shared_items > 0]
        return (self.out == out).all() & (self.lse == lse).all()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_list_in_the_hosts_memory(launch: str) -> None:
    bed = GraphBed(launch)
    bed.memory = False
    before = bed.workspace.plan
    with pytest.raises(torch.cuda.OutOfMemoryError):
        bed.workspace.load(bed.private)
    assert bed.workspace.plan is before and bed.replay()
    for _ in range(2):
        bed.workspace.load(bed.private, list_on_host=True)
        assert bed.replay() and bed.replay()
        bed.workspace.load(bed.shared())
        assert bed.replay()
    assert bed.workspace.list_tokens == SHORT


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_list_is_replaced_while_kernels_read_it(
    launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves free goes to tensors of another stream, which write to it at once."""
    monkeypatch.setattr(of_workspace, "PATIENCE", 3)
    bed = GraphBed(launch)
    torch.cuda.synchronize()
    right = []
    steps = torch.cuda.Stream()
    for _ in range(4):
        with torch.cuda.stream(steps):
            torch.cuda._sleep(20_000_000)
            right.append(bed.replay())
            bed.workspace.load(bed.private)
            right.append(bed.replay())
        assert bed.workspace.list_tokens >= bed.private.list_tokens
        poison = [torch.full((SHORT,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
        with torch.cuda.stream(steps):
            for _ in range(3):
                bed.workspace.load(bed.shared())
                right.append(bed.replay())
        assert bed.workspace.list_tokens == SHORT
        del poison
    torch.cuda.synchronize()
    assert all(right)
