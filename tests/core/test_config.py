# SPDX-License-Identifier: Apache-2.0
"""Options are taken as given or refused."""

from __future__ import annotations

import pytest
import torch

from sglang_pat.config import PatConfig


def test_defaults() -> None:
    config = PatConfig.from_env({"SGLANG_PLATFORM": "pat_cpu"})
    assert config == PatConfig(
        check=False, policy="default", partial="fp32", workspace_mb=256, min_batch=2
    )
    assert (config.launch, config.partial_dtype) == ("queue", torch.float32)


def test_every_option() -> None:
    config = PatConfig.from_env(
        {
            "SGLANG_PAT_CHECK": "1",
            "SGLANG_PAT_POLICY": "pat",
            "SGLANG_PAT_PARTIAL": "bf16",
            "SGLANG_PAT_WORKSPACE_MB": "1024",
            "SGLANG_PAT_MIN_BATCH": "1",
            "SGLANG_PAT_DUMP": "/logs/dump",
            "SGLANG_PAT_DUMP_BATCHES": "7",
        }
    )
    assert config == PatConfig(
        check=True,
        policy="pat",
        partial="bf16",
        workspace_mb=1024,
        min_batch=1,
        dump_batches=7,
        dump="/logs/dump",
    )
    assert (config.launch, config.partial_dtype) == ("streams", torch.bfloat16)
    assert str(config) == (
        "check=True policy=pat partial=bf16 workspace_mb=1024 min_batch=1 dump_batches=7 "
        "dump=/logs/dump"
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SGLANG_PAT_CHECK", "yes", "SGLANG_PAT_CHECK=yes .*use one of 0, 1"),
        ("SGLANG_PAT_POLICY", "", "SGLANG_PAT_POLICY= .*use one of default, pat or unset it"),
        ("SGLANG_PAT_POLICY", "PAT", "SGLANG_PAT_POLICY=PAT .*use one of default, pat"),
        ("SGLANG_PAT_PARTIAL", "fp16", "SGLANG_PAT_PARTIAL=fp16 .*use one of fp32, bf16"),
        *(
            ("SGLANG_PAT_WORKSPACE_MB", value, f"MB={value} is not a whole number of MB, 1 or more")
            for value in ("", "0", "-1", "1.5", "1e3", "256MB", "\u0664")
        ),
        ("SGLANG_PAT_DUMP", "", "SGLANG_PAT_DUMP= is not an absolute path: give one"),
        ("SGLANG_PAT_DUMP", "dump", "SGLANG_PAT_DUMP=dump is not an absolute path"),
        ("SGLANG_PAT_MIN_BATCH", "0", "whole number of requests, 1 or more: give one, such as 2"),
        ("SGLANG_PAT_PRESET", "pat", "PRESET=pat is not an option.*_POLICY.*: correct or unset it"),
    ],
)
def test_what_is_not_known_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatConfig.from_env({variable: value})
