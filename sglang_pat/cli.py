# SPDX-License-Identifier: Apache-2.0
"""The command ``sglang-pat``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status: 0 all well, 1 not, 2 wrong usage."""
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that a spawned server is stopped too
    arguments = _parser().parse_args(argv)
    if arguments.command == "doctor":
        from sglang_pat.doctor import run_doctor

        return run_doctor(as_json=arguments.json)
    from sglang_pat.demo.run import Options, run_demo
    from sglang_pat.demo.server import ServerError

    try:
        return run_demo(Options(arguments.device, arguments.dtype, arguments.cache, arguments.json))
    except ServerError as error:
        print(f"sglang-pat demo: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-pat", description="Prefix-aware decode attention for SGLang."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="run an agent workload on the stock backend and on pat, side by side"
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    demo.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: float32 on a CPU, where tokens are compared; bfloat16 on a GPU, where "
        "log-probabilities of forced tokens are",
    )
    demo.add_argument("--cache", type=Path, help="folder for the model and the servers' logs")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    doctor = commands.add_parser("doctor", help="say what was found, and what would keep pat off")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)
