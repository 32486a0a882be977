# SPDX-License-Identifier: Apache-2.0
"""Parsers of command lines, to compare pages and help texts with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands, of theirs too."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from with_commands(command)


def of_sglang() -> argparse.ArgumentParser:
    """The parser of ``sglang.launch_server``'s flags; skips the test where there is no SGLang."""
    server_args = pytest.importorskip("sglang.srt.server_args", reason="needs SGLang 0.5.23")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    return parser
