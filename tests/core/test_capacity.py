# SPDX-License-Identifier: Apache-2.0
"""The workspace's size: its budget, its floor, and that it is what is allocated."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat import _C
from sglang_pat.capacity import MB, Capacity, fit_workspace, list_tokens_for
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
