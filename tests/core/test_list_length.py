# SPDX-License-Identifier: Apache-2.0
"""A workspace's list of slots grows at once and gives memory back after long. No GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sglang_pat import workspace as of_workspace
from sglang_pat.workspace import ListLength, Workspace


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_workspace, "PATIENCE", 5)


def test_a_list_is_shortened_to_what_plans_have_long_needed() -> None:
    length = ListLength(100)
    assert length.after(100, 90) == 100
    assert length.after(100, 1000) == 1250
    for needed in (40, 400, 40, 40):
        assert length.after(1250, needed) == 1250
    assert length.after(1250, 40) == 500  # for the 400 and a quarter


def test_one_plan_that_needs_it_keeps_a_list_long() -> None:
    length = ListLength(100)
    for needed in 3 * [40, 40, 40, 40, 600]:
        assert length.after(1250, needed) == 1250


def test_a_list_is_never_shorter_than_at_first() -> None:
    length = ListLength(100)
    assert [length.after(1250, 1) for _ in range(5)] == [1250] * 4 + [100]
    assert [length.after(100, 1) for _ in range(20)] == [100] * 20


def test_a_list_is_as_long_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that fits never needs memory, and one that does not needs no more than it lists."""
    workspace: Any = Workspace.__new__(Workspace)
    held = torch.empty(100, dtype=torch.int32)
    workspace.device, workspace._region = held.device, nullcontext
    workspace._buffers, workspace._list_length = {"list": held}, ListLength(100)
    assert len(workspace._fitting_list(200)) == 250
    room, empty = 200, torch.empty

    def short(tokens: int, **options: Any) -> torch.Tensor:
        if tokens > room:
            raise torch.cuda.OutOfMemoryError("no memory")
        return empty(tokens, **options)

    monkeypatch.setattr(torch, "empty", short)
    assert len(workspace._fitting_list(200)) == 200
    with pytest.raises(torch.cuda.OutOfMemoryError):
        workspace._fitting_list(201)
    room = 0
    workspace._buffers["list"] = held = empty(1000, dtype=torch.int32)
    assert all(workspace._fitting_list(1) is held for _ in range(10))
