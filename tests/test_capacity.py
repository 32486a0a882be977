# SPDX-License-Identifier: Apache-2.0
"""The workspace's size: its budget, its floor, and that it is what is allocated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat import _C, workspace
from sglang_pat.capacity import MB, Capacity, fit_workspace
from sglang_pat.config import DEFAULT_MB
from sglang_pat.planner import plan
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

# Llama 3.1 8B with contexts of 32,768 on an H200: what SGLang makes of the defaults.
DEFAULTS: dict[str, Any] = {
    "num_q_heads": 32,
    "head_dim": 128,
    "max_context": 32768 + 4,
    "pool_requests": 4096,
    "largest_graph": 256,
    "partial_dtype": torch.float32,
    "budget": DEFAULT_MB * MB,
}


def fit(**changes: Any) -> Capacity:
    return fit_workspace(**(DEFAULTS | changes))


def target_of(found: Capacity, **changes: Any) -> Target:
    options: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128} | changes
    return Target.h200(max_queries=found.max_queries, max_partials=found.max_partials, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": 64 * MB},
        {"partial_dtype": torch.bfloat16},
        {"num_q_heads": 5, "head_dim": 64},
        {"max_context": 1_048_580},
        {"num_q_heads": 64, "largest_graph": 512},
    ],
    ids=["defaults", "small", "bf16", "heads", "long", "fewer partials"],
)
def test_the_bytes_are_those_that_are_allocated(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    found = fit(**changes)
    monkeypatch.setattr(_C, "decode_cuda", None, raising=False)  # so in a build without CUDA
    monkeypatch.setattr(_C, "PlanStaging", lambda *_: None, raising=False)
    made: list[torch.Tensor] = []

    def empty(*shape: Any, device: Any, **options: Any) -> Any:
        if shape == (0,):  # which device is meant
            return SimpleNamespace(device=torch.device(device))
        made.append(torch.empty(*shape, device="meta", **options))
        return made[-1]

    fake = SimpleNamespace(**{name: getattr(torch, name) for name in ("float32", "bfloat16")})
    fake.empty = empty
    fake.cuda = SimpleNamespace(device=lambda _: nullcontext())
    monkeypatch.setattr(workspace, "torch", fake)
    target = target_of(
        found,
        num_q_heads=changes.get("num_q_heads", 32),
        num_kv_heads=1,
        head_dim=changes.get("head_dim", 128),
    )
    held = Workspace(
        target,
        found.max_context,
        "cuda:0",
        partial_dtype=changes.get("partial_dtype", torch.float32),
    )
    assert sum(tensor.nbytes for tensor in made) == found.total == held.nbytes
    assert sorted(tensor.nbytes for tensor in made) == sorted(found.parts.values())


def test_as_many_requests_as_the_budget_holds() -> None:
    found = fit()
    assert not found.over_budget
    assert found.budget - found.total < found.total / found.max_queries  # one more does not fit
    assert 256 < found.max_queries < 4096
    assert fit(budget=2 * found.budget).max_queries > 2 * found.max_queries
    longer = fit(max_context=131_072 + 4)
    assert 256 < longer.max_queries < found.max_queries


def test_never_more_than_the_pool_has() -> None:
    found = fit(pool_requests=300)
    assert found.max_queries == 300
    assert found.total < found.budget
    assert fit(pool_requests=300, largest_graph=304).max_queries == 304  # padded for its ranks


def test_the_largest_graph_always_fits() -> None:
    for budget in (1, MB, 64 * MB):
        assert fit(budget=budget).max_queries == 256
    long = fit(max_context=1_048_580)
    assert long.max_queries == 256
    assert long.over_budget and long.total > 256 * 4 * 1_048_580
    assert fit(budget=1, largest_graph=0).max_queries == 1


def test_fewer_partials_before_the_budget_is_exceeded() -> None:
    """512 queries of 64 heads: with eight partials each 288 MB, which is beyond 256."""
    heads = {"num_q_heads": 64, "num_kv_heads": 8}
    found = fit(num_q_heads=64, largest_graph=512)
    assert found.budget - 64 * 1024 < found.total <= found.budget  # no fewer than need be
    assert 4 * 512 + 2048 <= found.max_partials < 8 * 512 + 2048
    # Where that would not be enough, the plans need not suffer.
    assert fit(num_q_heads=64, largest_graph=512, budget=128 * MB).max_partials == 8 * 512 + 2048
    # Three nodes of 1024 tokens and a tail, four partials a query, are packed with the fewest.
    paths = [
        [(0, 0, 1024), (1 + i // 64, 1024, 2048), (100 + i // 8, 2048, 3072)] for i in range(512)
    ]
    target = replace(target_of(found, **heads), max_partials=4 * 512 + 2048)
    made = plan(paths, [3200] * 512, target)
    assert made.num_shared_items > 0 and made.degraded == ""


def test_what_is_said_at_start() -> None:
    found = fit()
    assert str(found) == (
        f"workspace: 256 MB on the GPU, for batches of up to {found.max_queries} requests of up "
        "to 32,772 tokens; larger ones, of up to 4,096, run on SGLang's attention unless "
        "SGLANG_PAT_WORKSPACE_MB is raised"
    )
    assert str(fit(pool_requests=300)).endswith("of up to 300 requests of up to 32,772 tokens")
    warning = fit(max_context=1_048_580).warning()
    assert "takes 1,091 MB" in warning and "SGLANG_PAT_WORKSPACE_MB=256" in warning
    assert "256 requests of up to 1,048,580 tokens" in warning
    for way_out in ("--cuda-graph-max-bs-decode", "--context-length", "raise SGLANG_PAT_WORKSPACE"):
        assert way_out in warning


@pytest.mark.parametrize(
    "name", ["num_q_heads", "head_dim", "max_context", "pool_requests", "budget"]
)
def test_numbers_that_make_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, must be 1 or more"):
        fit(**{name: 0})
