# SPDX-License-Identifier: Apache-2.0
"""Options are taken as given or refused."""

from __future__ import annotations

import pytest
import torch

from sglang_pat.config import PatConfig


def test_defaults() -> None:
    assert PatConfig.from_env({"SGLANG_PLATFORM": "pat_cpu"}) == PatConfig(
        check=False,
        policy="bytes",
        split="cost",
        branching="cost",
        partial="fp32",
        launch="queue",
        workspace_mb=256,
        min_batch=2,
    )


def test_every_option() -> None:
    config = PatConfig.from_env(
        {
            "SGLANG_PAT_CHECK": "1",
            "SGLANG_PAT_POLICY": "paper",
            "SGLANG_PAT_SPLIT": "mean",
            "SGLANG_PAT_BRANCHING": "never",
            "SGLANG_PAT_PARTIAL": "bf16",
            "SGLANG_PAT_LAUNCH": "streams",
            "SGLANG_PAT_WORKSPACE_MB": "1024",
            "SGLANG_PAT_MIN_BATCH": "1",
        }
    )
    assert config == PatConfig(
        check=True,
        policy="paper",
        split="mean",
        branching="never",
        partial="bf16",
        launch="streams",
        workspace_mb=1024,
        min_batch=1,
    )
    assert config.partial_dtype is torch.bfloat16
    assert str(config) == (
        "check=True policy=paper split=mean branching=never partial=bf16 launch=streams "
        "workspace_mb=1024 min_batch=1"
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SGLANG_PAT_CHECK", "yes", "SGLANG_PAT_CHECK=yes .*use one of 0, 1"),
        ("SGLANG_PAT_POLICY", "", "SGLANG_PAT_POLICY= .*use one of bytes, paper, naive"),
        ("SGLANG_PAT_SPLIT", "COST", "SGLANG_PAT_SPLIT=COST .*use one of cost, mean"),
        ("SGLANG_PAT_BRANCHING", "1", "SGLANG_PAT_BRANCHING=1 .*use one of cost, always, never"),
        ("SGLANG_PAT_PARTIAL", "fp16", "SGLANG_PAT_PARTIAL=fp16 .*use one of fp32, bf16"),
        ("SGLANG_PAT_LAUNCH", "fast", "SGLANG_PAT_LAUNCH=fast .*use one of queue, streams, serial"),
        *(
            ("SGLANG_PAT_WORKSPACE_MB", value, f"MB={value} is not a whole number of MB, 1 or more")
            for value in ("", "0", "-1", "1.5", "1e3", "256MB", "\u0664")
        ),
        ("SGLANG_PAT_MIN_BATCH", "0", "whole number of requests, 1 or more: give one, such as 2"),
        (
            "SGLANG_PAT_POLCY",
            "paper",
            "SGLANG_PAT_POLCY=paper is not an option.*_POLICY.*_WORKSPACE_MB.*_MIN_BATCH",
        ),
    ],
)
def test_what_is_not_known_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatConfig.from_env({variable: value})
