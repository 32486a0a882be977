# SPDX-License-Identifier: Apache-2.0
"""Options are taken as given or refused."""

from __future__ import annotations

import pytest
import torch

from sglang_pat.config import PRESETS, PatConfig


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
            "SGLANG_PAT_SPLIT_TOKENS": "256",
            "SGLANG_PAT_DUMP": "/logs/dump",
            "SGLANG_PAT_DUMP_BATCHES": "7",
        }
    )
    assert config == PatConfig(
        check=True,
        policy="paper",
        split="mean",
        split_tokens=256,
        branching="never",
        partial="bf16",
        launch="streams",
        workspace_mb=1024,
        min_batch=1,
        dump="/logs/dump",
        dump_batches=7,
    )
    assert config.partial_dtype is torch.bfloat16
    assert str(config) == (
        "check=True policy=paper split=mean split_tokens=256 branching=never partial=bf16 "
        "launch=streams workspace_mb=1024 min_batch=1 dump_batches=7 preset=default "
        "dump=/logs/dump"
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SGLANG_PAT_CHECK", "yes", "SGLANG_PAT_CHECK=yes .*use one of 0, 1"),
        ("SGLANG_PAT_PRESET", "paper", "SGLANG_PAT_PRESET=paper .*use one of default, pat, naive"),
        ("SGLANG_PAT_POLICY", "", "SGLANG_PAT_POLICY= .*use one of bytes, paper, naive"),
        ("SGLANG_PAT_SPLIT", "COST", "SGLANG_PAT_SPLIT=COST .*use one of cost, mean"),
        ("SGLANG_PAT_BRANCHING", "1", "SGLANG_PAT_BRANCHING=1 .*use one of cost, always, never"),
        ("SGLANG_PAT_PARTIAL", "fp16", "SGLANG_PAT_PARTIAL=fp16 .*use one of fp32, bf16"),
        ("SGLANG_PAT_LAUNCH", "fast", "SGLANG_PAT_LAUNCH=fast .*use one of queue, streams, serial"),
        *(
            ("SGLANG_PAT_WORKSPACE_MB", value, f"MB={value} is not a whole number of MB, 1 or more")
            for value in ("", "0", "-1", "1.5", "1e3", "256MB", "\u0664")
        ),
        ("SGLANG_PAT_DUMP", "", "SGLANG_PAT_DUMP= is not an absolute path: give one"),
        ("SGLANG_PAT_DUMP", "dump", "SGLANG_PAT_DUMP=dump is not an absolute path"),
        ("SGLANG_PAT_MIN_BATCH", "0", "whole number of requests, 1 or more: give one, such as 2"),
        (
            "SGLANG_PAT_POLCY",
            "paper",
            "SGLANG_PAT_POLCY=paper is not an option.*_PRESET.*_POLICY.*_WORKSPACE_MB.*_MIN_BATCH",
        ),
    ],
)
def test_what_is_not_known_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatConfig.from_env({variable: value})


def read(**options: str) -> PatConfig:
    return PatConfig.from_env({f"SGLANG_PAT_{name}": value for name, value in options.items()})


def test_the_papers_preset() -> None:
    config = read(PRESET="pat")
    assert (config.policy, config.split, config.branching) == ("paper", "mean", "never")
    assert (config.partial, config.launch) == ("fp32", "streams")
    assert config.preset == "pat" and not config.remarks
    naive = read(PRESET="naive")
    assert (naive.policy, naive.split, naive.branching) == ("naive", "mean", "never")
    assert read(PRESET="default") == read() == PatConfig()
    assert set(PRESETS) == {"default", "pat", "naive", "chunk", "paged", "paged-v1", "relay"} | {
        "fasttree",
        "packinfer",
    }


@pytest.mark.parametrize(
    ("preset", "rules"),
    [
        ("chunk", ("naive", "chunks", 64)),
        ("paged", ("queries", "fixed", 512)),
        ("paged-v1", ("queries", "none", 512)),
        ("relay", ("root", "cost", 512)),
        ("fasttree", ("padding", "phases", 1024)),
    ],
)
def test_the_presets_of_other_papers(preset: str, rules: tuple[str, str, int]) -> None:
    config = read(PRESET=preset)
    assert (config.policy, config.split, config.split_tokens) == rules
    assert config.branching == "never" and config.launch == "queue" and not config.remarks
    if preset == "chunk":
        config = read(PRESET=preset, SPLIT_TOKENS="128")
        assert config.split_tokens == 128
        said = "split_tokens=128 was asked for and wins over the 64 of preset chunk"
        assert config.remarks == (said,)


def test_an_option_beside_a_preset_wins_and_that_is_said() -> None:
    config = read(PRESET="pat", SPLIT="cost", LAUNCH="streams", PARTIAL="bf16")
    assert (config.policy, config.split, config.partial) == ("paper", "cost", "bf16")
    assert config.branching == "never" and config.launch == "streams"
    assert config.remarks == (
        "split=cost was asked for and wins over the mean of preset pat",
        "partial=bf16 was asked for and wins over the fp32 of preset pat",
    )
    assert "preset=pat; split=cost was asked for" in str(config)
    assert read(PRESET="pat", BRANCHING="always").branching == "always"


@pytest.mark.parametrize("option", [{"POLICY": "naive"}, {"POLICY": "paper"}, {"SPLIT": "mean"}])
def test_other_rules_have_no_branches_unless_asked_for(option: dict[str, str]) -> None:
    """Branches would hide what such a rule does: on a Hopper the plan would be the default's."""
    config = read(**option)
    assert config.branching == "never"
    assert len(config.remarks) == 1 and "no branches, as" in config.remarks[0]
    assert config.remarks[0] in str(config)
    for value in ("cost", "always"):
        asked = read(**option, BRANCHING=value)
        assert asked.branching == value and not asked.remarks
    assert read(POLICY="bytes", SPLIT="cost").branching == "cost"
