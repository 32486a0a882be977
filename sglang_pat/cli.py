# SPDX-License-Identifier: Apache-2.0
"""The command ``sglang-pat``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import sglang_pat

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status: 0 all well, 1 not, 2 wrong usage; 141 if who
    read the output, as ``head``, has left, which is what a shell gives for SIGPIPE."""
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        import_module("sglang_pat._C")
    except ImportError as error:
        print(
            f"sglang-pat: its native module does not load: {error}; pip install the checkout or "
            "its wheel anew, and run it outside of the checkout's folder",
            file=sys.stderr,
        )
        return 1
    parser = make_parser()
    arguments, flags = parser.parse_known_args(argv)
    if arguments.command == "doctor":
        return _run_doctor(parser, arguments, flags)
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if arguments.command == "demo":
        return _run_demo(arguments)
    try:
        arguments.run(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"sglang-pat {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _run_demo(arguments: argparse.Namespace) -> int:
    from sglang_pat.demo.run import run_demo  # imports SGLang
    from sglang_pat.demo.server import ServerError

    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that the servers are stopped too
    try:
        return run_demo(arguments.model, arguments.cache)
    except (ServerError, OSError, ValueError) as error:
        print(f"sglang-pat demo: {error}", file=sys.stderr)
        return 1


def _run_doctor(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, flags: list[str]
) -> int:
    from sglang_pat.doctor import run_doctor

    if arguments.model is None and (flags or arguments.gpu):
        given = " ".join([*flags, *(["--gpu"] if arguments.gpu else [])])
        parser.error(f"{given}: doctor looks at server flags only with --model MODEL")
    question = None
    if arguments.model is not None:
        question = ["--model-path", arguments.model, *flags]
    return run_doctor(question, arguments.gpu)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line; flags of a server after ``doctor`` are not known to it."""
    from sglang_pat import estimate  # these load the native module
    from sglang_pat.explain import command as explain

    parser = argparse.ArgumentParser(
        prog="sglang-pat",
        description="Prefix-aware decode attention for SGLang. Exit status: 0 all well, 1 not, "
        "2 wrong usage.",
    )
    version = f"sglang-pat {sglang_pat.__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, title="commands")
    demo = commands.add_parser(
        "demo",
        help="let eight conversations run on the stock backend and on pat, side by side",
        description="Serve eight conversations of a support desk on two servers on this machine, "
        "one with SGLang's backend and one with pat, and print the answers, times, K/V reads and "
        "whether the tokens agree. It takes about three minutes on a CPU of two cores.",
    )
    demo.add_argument(
        "--model",
        metavar="NAME",
        help="folder or Hugging Face name (default: SmolLM2-135M-Instruct, out of a package)",
    )
    demo.add_argument(
        "--cache",
        type=Path,
        help="folder for the servers' logs (default: one of the user's cache)",
    )
    _add_doctor(commands)
    for name, module, what in (
        (
            "explain",
            explain,
            "print and draw the plan of a batch, and what it reads; without a GPU or SGLang",
        ),
        (
            "estimate",
            estimate,
            "say which K/V reads pat would save on prompts or a trace, and which text keeps "
            "prompts apart; without a GPU or SGLang (docs/estimate.md)",
        ),
    ):
        command = commands.add_parser(name, help=what, description=what)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from sglang_pat.gpus import GPUS

    doctor = commands.add_parser(
        "doctor",
        help="say what was found, and what would keep pat off; with --model, what pat would do "
        "for a model and server flags",
        description="Say what was found, and what would keep pat off. With --model also what pat "
        "would do on a server, without loading its weights: any flags of sglang.launch_server may "
        "follow. Exit status: 0 pat serves at least a part, 1 it does not, 2 wrong usage.",
        usage="sglang-pat doctor [-h] [--model MODEL [--gpu NAME] [server flags ...]]",
        allow_abbrev=False,  # --model is not short for SGLang's --model-loader-extra-config
    )
    doctor.add_argument(
        "--model",
        "--model-path",
        metavar="MODEL",
        help="folder or Hugging Face name of the model; of it only config.json is read",
    )
    doctor.add_argument(
        "--gpu",
        default="",
        metavar="NAME",
        help=f"ask about a GPU that is not here: {', '.join(GPUS)} (default: what is here)",
    )


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)
