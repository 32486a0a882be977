# SPDX-License-Identifier: Apache-2.0
"""What a workspace refuses, and how long its list of slots is; seen without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.trees import target

from sglang_pat import _C
from sglang_pat.workspace import Workspace


def test_no_workspace_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_C, "decode_cuda", raising=False)
    with pytest.raises(ValueError, match=r"built without CUDA kernels: install it with PAT_CUDA"):
        Workspace(target(), 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "a workspace is on a CUDA device, not on cpu"),
        ({"partial_dtype": torch.half}, "partial_dtype is torch.float16, must be float32 or bf"),
        ({"launch": "fast"}, "launch is 'fast', must be one of queue, streams"),
        ({"max_context": 0}, "max_context is 0, must be 1 or more"),
        ({"list_tokens": -5}, "list_tokens is -5, must be 1 or more"),
    ],
)
def test_workspaces_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """torch, asked for an empty tensor on a GPU, gives only its device."""
    monkeypatch.setattr(_C, "decode_cuda", None, raising=False)  # so in a build without CUDA
    monkeypatch.setattr(
        torch, "empty", lambda *_, device: SimpleNamespace(device=torch.device(device))
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Workspace(target(), **({"max_context": 100, "device": "cuda:0"} | changes))


def workspace_of(planned: int | None = 2) -> Workspace:
    """What the checks read of a workspace, on the CPU: for 4 queries of 55 tokens, with a plan of
    ``planned`` queries or none."""
    made: Any = Workspace.__new__(Workspace)
    made.device, made.max_context = torch.device("cpu"), 55
    made.target = target(max_queries=4)
    made.plan = None if planned is None else SimpleNamespace(num_queries=planned)
    return made


def batch(num_rows: int, **changes: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    given = {
        "req_to_token": torch.zeros(6, 55, dtype=torch.int32),
        "rows": torch.arange(num_rows),
        "seq_lens": torch.arange(num_rows, dtype=torch.int32),
    }
    return given | {name: change(given[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows", lambda t: t.to("meta"), "rows is on meta, the workspace on cpu"),
        ("req_to_token", lambda t: t[0], "strides (1,), must have 2 dimensions"),
        ("req_to_token", lambda t: t[:, ::2], "(6, 28) and strides (55, 2), must have 2"),
        ("req_to_token", torch.Tensor.long, "is torch.int64, must be int32"),
        ("req_to_token", lambda t: t.repeat(1, 2), "has 110 tokens a row, the workspace holds 55"),
        ("rows", lambda t: t[:, None], "rows has shape (3, 1) and strides (1, 1), must"),
        ("rows", torch.Tensor.short, "rows is torch.int16, must be int32 or int64"),
        ("rows", lambda t: t[:2], "2 rows and 3 seq_lens: need one of each"),
        ("seq_lens", torch.Tensor.float, "is torch.float32, must be int32 or int64"),
    ],
)
def test_wrong_batches_of_a_workspace(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        workspace_of().check_batch(**batch(3, **{name: change}))


def test_batches_of_a_wrong_size() -> None:
    """Smaller than the plan or larger than the buffers; between them there are those that fit, also
    in a table cut to one token, whose stride nothing takes."""
    for planned, fitting, wrong in ((2, (2, 4), (1, 5)), (None, (0, 4), (5,))):
        for rows in fitting:
            given = batch(rows, req_to_token=lambda t: t[:, ::55])
            assert workspace_of(planned).check_batch(**given) == rows
        for rows in wrong:
            said = f"{rows}: the loaded plan has {planned or 0} queries and the workspace room"
            with pytest.raises(ValueError, match=said):
                workspace_of(planned).check_batch(**batch(rows))


def test_a_list_is_as_long_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that fits never needs memory, and one that does not needs no more than it lists."""
    workspace: Any = workspace_of()
    held = torch.empty(100, dtype=torch.int32)
    workspace._region = nullcontext
    workspace._buffers = {"list": held}
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
    assert workspace._fitting_list(100) is held
