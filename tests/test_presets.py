# SPDX-License-Identifier: Apache-2.0
"""A server's plans follow its preset, and its log says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.runner import server_args

from sglang_pat import Target
from sglang_pat.config import PatConfig
from sglang_pat.srt import factory
from sglang_pat.srt.layers import Heads

HEADS = Heads(num_q_heads=8, num_kv_heads=2, head_dim=64)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model runner on a CPU, as far as sizes are asked of it."""
    monkeypatch.setattr(factory, "heads_of", lambda runner: HEADS)
    monkeypatch.setattr(factory, "_largest_graph", lambda requests: 0)
    monkeypatch.setattr(factory.hook, "reset_on_wake", lambda executor: None)
    pool = SimpleNamespace(req_to_token=torch.zeros(5, 64, dtype=torch.int32), size=4)
    return SimpleNamespace(req_to_token_pool=pool, kv_cache_dtype=torch.float32)


def planned(runner: Any, **options: str) -> Target:
    config = PatConfig.from_env({f"SGLANG_PAT_{name}": each for name, each in options.items()})
    return factory.make_executor(runner, config).target


def test_a_server_has_the_rules_of_its_preset(
    runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    target = planned(runner)
    assert (target.policy, target.split) == ("bytes", "cost") and not caplog.messages
    target = planned(runner, PRESET="pat")
    assert (target.policy, target.split, target.branching) == ("paper", "mean", "never")
    assert "preset=pat" in caplog.messages[-1]
    target = planned(runner, PRESET="pat", SPLIT="cost")
    assert (target.policy, target.split, target.branching) == ("paper", "cost", "never")
    assert caplog.messages[-1].endswith(
        "split=cost was asked for and wins over the mean of preset pat"
    )
    target = planned(runner, POLICY="naive")
    assert (target.policy, target.branching) == ("naive", "never")
    assert "no branches, as policy=naive is not the default" in caplog.messages[-1]
    assert planned(runner, POLICY="naive", BRANCHING="always").branching == "always"
    assert len(caplog.messages) == 3


@pytest.mark.parametrize(
    ("draft_tokens", "algorithm", "top_k", "masks"),
    [
        (1, "NGRAM", 1, False),  # a server that leaves verification to SGLang
        (4, "EAGLE", 1, False),
        (4, "EAGLE", 2, True),
        (4, "NGRAM", 1, True),
    ],
)
def test_masks_are_for_drafts_that_may_be_trees(
    draft_tokens: int,
    algorithm: str,
    top_k: int,
    masks: bool,
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a GPU plans for these have no branches."""
    heads = HEADS._replace(draft_tokens=draft_tokens)
    monkeypatch.setattr(factory, "heads_of", lambda runner: heads)
    runner.server_args = server_args(speculative_algorithm=algorithm, speculative_eagle_topk=top_k)
    assert factory.make_executor(runner, PatConfig()).has_draft_masks == masks
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    capacity = SimpleNamespace(max_queries=4, max_partials=64)
    for config in (PatConfig(), PatConfig(branching="always")):
        branching = factory._gpu_target(runner, config, capacity).branching
        assert branching == ("never" if masks else config.branching)
    assert ("branching is never, not always" in caplog.text) == masks
