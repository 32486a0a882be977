# SPDX-License-Identifier: Apache-2.0
"""The workspace: its size, its budget and its floor, what it refuses, and how long its list is;
seen without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import latents
from kit.trees import target

from sglang_pat import _C
from sglang_pat.capacity import MB, ROOM, Capacity, buffer_shapes, fit_workspace, list_tokens_for
from sglang_pat.config import DEFAULT_MB
from sglang_pat.planner import plan
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

# Llama 3.1 8B on an H200: what SGLang makes of the defaults.
DEFAULTS: dict[str, Any] = {
    "num_q_heads": 32,
    "head_dim": 128,
    "pool_requests": 4096,
    "pool_tokens": 900_000,
    "largest_graph": 256,
    "budget": DEFAULT_MB * MB,
}


def fit(**changes: Any) -> Capacity:
    return fit_workspace(**(DEFAULTS | changes))


def target_of(found: Capacity, **changes: Any) -> Target:
    options: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128} | changes
    return Target.h200(max_queries=found.max_queries, max_partials=found.max_partials, **options)


@pytest.mark.parametrize(
    "changes", [{}, {"num_q_heads": 5, "head_dim": 64, "pool_tokens": 100_000_000}]
)
def test_the_bytes_are_those_that_are_allocated(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    found, given = fit(**changes), DEFAULTS | changes
    made: list[torch.Tensor] = []
    real = torch.empty

    def empty(shape: Any, *, device: Any, **options: Any) -> Any:
        if shape == 0:  # which device is meant
            return SimpleNamespace(device=torch.device(device))
        made.append(real(shape, device="meta", **options))
        return made[-1]

    monkeypatch.setattr(_C, "decode_cuda", None, raising=False)  # so in a build without CUDA
    monkeypatch.setattr(_C, "PlanStaging", lambda *_: None, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "empty", empty)
    heads = {"num_q_heads": given["num_q_heads"], "num_kv_heads": 1, "head_dim": given["head_dim"]}
    held = Workspace(target_of(found, **heads), 8192, "cuda:0", list_tokens=found.list_tokens)
    assert sum(tensor.nbytes for tensor in made) == found.total == held.nbytes
    assert sorted(tensor.nbytes for tensor in made) == sorted(found.parts.values())


def test_every_batch_of_the_pool_is_served() -> None:
    found = fit()
    assert found.max_queries == 4096 and not found.over_budget
    assert found.budget - found.total < 32 * 128 * 4 + 1024  # one more partial does not fit
    assert fit(pool_requests=300).max_queries == 300
    assert fit(pool_requests=300, largest_graph=304).max_queries == 304  # padded for its ranks
    assert fit(pool_requests=1, largest_graph=0).max_queries == 1


def test_the_list_is_as_long_as_the_pool_with_room_to_grow() -> None:
    """Not as requests times context; here 128 prompts of 40,000 tokens with 32 requests each."""
    pool = 6_000_000  # tokens
    assert fit(pool_tokens=pool).parts["list"] == 4 * (pool * 5 // 4 + 128 * 4096) <= 32 * MB
    assert fit(pool_tokens=10**9).parts["list"] == 32 * MB
    paths = [[(i % 128, 0, 40_000)] for i in range(4096)]
    made = plan(paths, [40_200] * 4096, target_of(fit()))
    held = 128 * 40_000 + 4096 * 200  # tokens in the pool
    assert held < made.list_tokens <= list_tokens_for(held, 4096) < 8 * MB


def test_partials_take_what_the_budget_leaves() -> None:
    found = fit(pool_requests=300)
    assert found.max_partials == 8 * 300 + 2048 and found.total < found.budget
    cut = fit(num_q_heads=64, pool_requests=1024)
    assert 4 * 1024 <= cut.max_partials < 8 * 1024 + 2048 and not cut.over_budget
    for budget in (1, MB, 30 * MB):
        least = fit(budget=budget)
        assert least.over_budget and (least.max_queries, least.max_partials) == (4096, 2048)


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


def test_what_a_target_says_of_a_token() -> None:
    """Of latents K alone is kept, and partials have the dim of V; other head dims that differ have
    K and V."""
    made_for = latents.target(16)
    assert made_for.token_values == latents.K_DIM and made_for.kv_tiles == (64,)
    room = {name: getattr(made_for, name) for name in ROOM}
    shape, _ = buffer_shapes(16, made_for.v_head_dim, 1, torch.float32, room)["partials"]
    assert shape == (1 << 18, 16, latents.V_DIM)
    assert target(head_dim=192, v_head_dim=128).token_values == 320
