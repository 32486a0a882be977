# SPDX-License-Identifier: Apache-2.0
"""The options of ``sglang-pat estimate --break-even``, and what they start."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

DEFAULT_PRIVATE = 256
_GPUS = ("h100", "h200")  # on which pat was run, and which are drawn beside each other


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options that only ``--break-even`` has."""
    parser.add_argument(
        "--private",
        type=int,
        metavar="N",
        help="with --break-even: tokens that a request has to itself, the rest of its prompt and "
        f"what it has written (default: {DEFAULT_PRIVATE})",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="with --break-even: draw it, a panel a GPU; needs matplotlib (default: no)",
    )


def run_break_even(arguments: argparse.Namespace) -> str:
    """The tables; writes what ``--json`` and ``--plot`` name.

    Raises InputError, or ValueError of ``Target``, for options that make no sense, OSError for a
    file that cannot be written, SystemExit without matplotlib where it is needed.
    """
    from benchmarks.common.document import write
    from sglang_pat.estimate.break_even import contours, report
    from sglang_pat.estimate.requests import MAX_TOKENS, InputError

    private = DEFAULT_PRIVATE if arguments.private is None else arguments.private
    if not 1 <= private <= MAX_TOKENS:
        raise InputError(f"--private is {private}, must be from 1 to {MAX_TOKENS:,}")
    if arguments.base_ms is not None and arguments.gpu is None:
        raise InputError(
            f"--base-ms is {arguments.base_ms:g}, the time of one GPU: name that one with --gpu"
        )
    if arguments.plot is not None:
        contours.check()
    gpus = _GPUS if arguments.gpu is None else (arguments.gpu,)
    panels = [_panel(arguments, gpu, private) for gpu in gpus]
    document = {**_conditions(private, arguments.kv_dtype, panels), "gpus": report.data(panels)}
    write(document, arguments.json)
    if arguments.plot is not None:
        contours.draw(panels, _footer(document), arguments.plot)
    return report.text(panels)


def _panel(arguments: argparse.Namespace, gpu: str, private: int) -> Any:
    from sglang_pat.estimate.break_even.compared import was_compared
    from sglang_pat.estimate.break_even.report import Panel
    from sglang_pat.estimate.break_even.surface import REQUESTS, Surface
    from sglang_pat.estimate.options import make_model
    from sglang_pat.gpus import machine_of
    from sglang_pat.srt.machines import known_gpu

    model, words = make_model(argparse.Namespace(**{**vars(arguments), "gpu": gpu}), REQUESTS[-1])
    known = known_gpu(gpu)
    return Panel(
        known.name.lower(),
        words,
        arguments.kv_dtype,
        Surface(model, private),
        was_compared(machine_of(gpu), model, arguments.kv_dtype),
        known.memory_mib * 2**20,
    )


def _conditions(private: int, kv_dtype: str, panels: list[Any]) -> dict[str, Any]:
    """How and when the numbers were made: no GPU is in it, so what counts is our version."""
    from benchmarks.common.document import versions
    from sglang_pat.estimate.break_even.surface import RESOLUTION

    model = panels[0].surface.model
    return {
        "kind": "break-even, modelled",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["sglang-pat", *sys.argv[1:]]),
        "versions": versions(["sglang-pat"]),
        "private": private,
        "kv_dtype": kv_dtype,
        "tp": model.tp,
        "model": asdict(model.model),
        "resolution": RESOLUTION,
    }


def _footer(document: dict[str, Any]) -> str:
    return (
        f"modelled, {document['kv_dtype']}, {document['private']:,} private tokens a request; "
        f"sglang-pat {document['versions']['sglang-pat']}, {document['date'][:10]}: "
        "sglang-pat estimate --break-even (docs/estimate.md)"
    )
