# SPDX-License-Identifier: Apache-2.0
"""docs/deploy.md names flags that SGLang and its router have, and metrics that we export."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.parsers import of_sglang

from sglang_pat.stats import COUNTERS, LABELLED, NAMESPACE

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def _commands(program: str) -> Iterator[list[str]]:
    """The words of each shown command that runs ``program``."""
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if program in words:
                yield words[words.index(program) + 1 :]


def _flags(commands: list[list[str]]) -> set[str]:
    return {word for command in commands for word in command if word.startswith("--")}


def _known(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The default of each flag."""
    return {name: action.default for action in parser._actions for name in action.option_strings}


def test_sglang_has_the_flags_of_the_server_commands() -> None:
    commands = list(_commands("sglang.launch_server"))
    assert len(commands) >= 4
    assert _flags(commands) <= set(_known(of_sglang()))
    for command in commands:
        if "prefill" in command:  # such a server never decodes
            assert "--attention-backend" not in command
        else:
            assert command[command.index("--attention-backend") + 1] == "pat"


def test_the_router_has_the_flags_of_its_commands() -> None:
    router_args = pytest.importorskip(
        "sglang_router.router_args",
        reason="needs SGLang's router: make install, or pip install sglang-router==0.3.2",
    )
    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser)
    commands = list(_commands("sglang_router.launch_router"))
    assert len(commands) >= 3
    known = _known(parser)
    assert _flags(commands) <= set(known)
    tabled = re.findall(r"^\| `(--[a-z-]+)` \| ([\d.]+) \|", PAGE, re.M)
    assert len(tabled) >= 5
    for flag, default in tabled:
        assert known[flag] == float(default), flag
    for command in commands:
        parser.parse_args(command)
        policy = "manual" if "--pd-disaggregation" in command else "cache_aware"
        assert command[command.index("--policy") + 1] == policy


def test_the_tests_and_the_page_are_of_one_router() -> None:
    pins = r"sglang-router==([\d.]+)"
    (version,) = re.findall(pins, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.findall(pins, PAGE) == [version]


def test_the_metrics_are_ours() -> None:
    ours = {f"{NAMESPACE}_{name}_total" for name in (*COUNTERS, *LABELLED)}
    named = set(re.findall(rf"\b{NAMESPACE}_[a-z_]+", PAGE))
    assert len(named) >= 4
    assert named <= ours | {f"{NAMESPACE}_serving"}
