# SPDX-License-Identifier: Apache-2.0
"""docs/operating.md names flags that exist, our counters, and each reason of a fallback."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_pat.bench.kernel.options import make_parser as make_bench_parser
from sglang_pat.cli import make_parser
from sglang_pat.stats import _UNINTENDED_MODES, COUNTERS, LABELLED

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def test_every_flag_is_known() -> None:
    server_args = pytest.importorskip("sglang.srt.server_args", reason="needs SGLang 0.5.23")
    servers = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(servers)
    known = {
        option
        for top in (servers, make_parser(), make_bench_parser(None))
        for parser in _parsers(top)
        for action in parser._actions
        for option in action.option_strings
    }
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert len(named) >= 30
    assert named <= known


def test_every_reason_of_a_fallback_is_explained() -> None:
    sources = [*(ROOT / "sglang_pat" / "srt").glob("*.py"), ROOT / "sglang_pat" / "stats.py"]
    given = {
        reason
        for source in sources
        for reason in re.findall(r'fall_back\(\s*"([^"]+)"', source.read_text(encoding="utf-8"))
    }
    assert len(given) >= 12
    table = PAGE.split("What the reasons of `fallbacks` mean")[1].split("\n\n")[1]
    explained = {
        reason
        for row in table.splitlines()[2:]
        for reason in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    assert explained - {"mixed"} == given
    assert "mixed" in _UNINTENDED_MODES


def test_every_counter_is_explained() -> None:
    table = PAGE.split("| counter | read it as |")[1].split("\n\n")[0]
    rows = {
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([a-z_]+)(?:\{[a-z]+\})?`", row.split("|")[1])
    }
    assert rows == {*COUNTERS, *LABELLED, "sglang_pat_serving"}
