# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``sglang-pat estimate``: its options, what it plans, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from sglang_pat.explain.command import add_target

if TYPE_CHECKING:
    from sglang_pat import Target
    from sglang_pat.estimate.requests import Request

_NUMBERS = (
    ("concurrency", 64, 16_384, "requests that decode at a time, neighbours in the file"),
    ("output_tokens", 256, 2**24, "of an answer, or the request's max_tokens if that is less"),
    ("steps", 16, 1_000, "batches that are planned, evenly spaced over the file"),
)
_SHOWN = 3  # differences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options of the subcommand."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one request a line: {"prompt": TEXT}, {"messages": [...]} or {"input_ids": [...]}; '
        "of a .txt file each line is a prompt",
    )
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests in Mooncake's format: input_length, output_length and hash_ids",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="of the model, for prompts as text: a folder or a name on Hugging Face (default: no)",
    )
    for name, default, _, what in _NUMBERS:
        option, words = "--" + name.replace("_", "-"), f"{what} (default: {default})"
        parser.add_argument(option, type=int, metavar="N", default=default, help=words)
    add_target(parser)


def run_estimate(arguments: argparse.Namespace) -> int:
    """Estimates for the options; exit status 0, or 1 with a line that says what is wrong."""
    try:
        print("\n".join(_estimated(arguments)))
    except (ValueError, OSError) as error:
        print(f"sglang-pat estimate: {' '.join(f'{error}'.split())}", file=sys.stderr)
        return 1
    return 0


def _estimated(arguments: argparse.Namespace) -> list[str]:
    from sglang_pat.estimate import requests as reading
    from sglang_pat.estimate.differences import find
    from sglang_pat.explain.command import make_target

    for name, _, most, _ in _NUMBERS:
        if not 0 < (value := getattr(arguments, name)) <= most:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {value}, must be from 1 to {most:,}")
    target, machine = make_target(arguments, arguments.concurrency)
    differences = []
    if arguments.trace is not None:
        unit, requests = reading.TRACE_BLOCK, reading.read_trace(arguments.trace)
    else:
        unit, name = 1, arguments.tokenizer
        tokenizer = None if name is None else reading.open_tokenizer(name)
        requests = reading.read_prompts(arguments.prompts, tokenizer, arguments.output_tokens)
        differences = find(requests, None if tokenizer is None else tokenizer.decode)
    reads = reads_of(requests, unit, arguments.concurrency, arguments.steps, target)
    lines = [
        f"{len(requests):,} prompts of {fmean(one.length for one in requests):,.0f} tokens, "
        f"{min(arguments.concurrency, len(requests))} at a time, planned for {machine}",
        f"shared with another of the batch: {reads.shared:,.0f} tokens of a prompt",
        f"K/V tokens read a step: {reads.read:,.0f} with pat instead of {reads.alone:,.0f}, "
        f"{reads.saved:.0%} saved",
    ]
    for found in differences[:_SHOWN]:
        lines += [
            f"{len(found.prompts) + 1} prompts, from number {found.first + 1} on, differ at token "
            f"{found.start:,}: {found.kind}, and {found.common:,} equal tokens behind it",
            f"  {' and '.join(map(_quoted, found.texts))}",
        ]
    if len(differences) > _SHOWN:
        lines.append(f"and {len(differences) - _SHOWN} more such differences")
    return lines


class Reads(NamedTuple):
    """Mean K/V tokens of a batch, of one layer and KV head: ``alone`` with every request by itself,
    ``read`` by pat's plan. ``shared``: mean tokens of a prompt that another one begins with."""

    alone: float
    read: float
    shared: float

    @property
    def saved(self) -> float:
        """Share of the reads that packing saves."""
        return 1 - self.read / self.alone


def reads_of(
    requests: Sequence[Request], unit: int, concurrency: int, steps: int, target: Target
) -> Reads:
    """Plans ``steps`` batches of neighbours. Prompts are taken to be in the cache as a whole, and
    the requests of a batch to be evenly spread over their answers. ``unit``: tokens of a symbol."""
    from sglang_pat.estimate.requests import shared_paths
    from sglang_pat.planner import Planner

    planner = Planner(target)
    size = min(concurrency, len(requests))
    last = len(requests) - size
    found = []
    for first in sorted({last * step // max(1, steps - 1) for step in range(steps)}):
        batch = requests[first : first + size]
        paths = shared_paths(batch, unit)
        # The token that is being decoded is in the K/V cache, too.
        seq_lens = [
            one.length + (2 * n + 1) * one.output // (2 * size) + 1 for n, one in enumerate(batch)
        ]
        alone = sum(seq_lens)
        shared = fmean(path[-1][2] if path else 0 for path in paths)
        found.append((alone, planner.plan(paths, seq_lens).kv_tokens_read(alone), shared))
    return Reads(*map(fmean, zip(*found, strict=True)))


def _quoted(text: str) -> str:
    words = " ".join(text.split())
    return json.dumps(words if len(words) <= 60 else f"{words[:57]}...", ensure_ascii=False)
