# SPDX-License-Identifier: Apache-2.0
"""Options are taken as given or refused."""

from __future__ import annotations

import pytest

from sglang_pat.config import PatConfig


def test_options_and_their_defaults() -> None:
    config = PatConfig.from_env({"SGLANG_PLATFORM": "pat_cpu"})
    assert config == PatConfig(check=False, policy="default", workspace_mb=256, min_batch=2)
    assert config.launch == "queue"
    options = {"CHECK": "1", "POLICY": "pat", "WORKSPACE_MB": "1024", "MIN_BATCH": "1"}
    options["DUMP"] = "/a"
    config = PatConfig.from_env({f"SGLANG_PAT_{name}": value for name, value in options.items()})
    assert config == PatConfig(True, "pat", 1024, 1, "/a") and config.launch == "streams"
    assert str(config) == "check=True policy=pat workspace_mb=1024 min_batch=1 dump=/a"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CHECK", "yes", "SGLANG_PAT_CHECK=yes .*use one of 0, 1"),
        ("POLICY", "PAT", "SGLANG_PAT_POLICY=PAT .*use one of default, pat, or unset it"),
        *(
            ("WORKSPACE_MB", value, f"MB={value} is not a whole number of MB, 1 or more; give one")
            for value in ("", "0", "1.5", "256MB", "\u0664")
        ),
        ("DUMP", "dump", "SGLANG_PAT_DUMP=dump is not an absolute path; give one"),
        ("MIN_BATCH", "0", "whole number of requests, 1 or more; give one, such as 2"),
        ("PRESET", "pat", "PRESET=pat is not an option.*_POLICY.*: correct or unset it"),
    ],
)
def test_what_is_not_known_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatConfig.from_env({f"SGLANG_PAT_{variable}": value})
