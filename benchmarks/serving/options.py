# SPDX-License-Identifier: Apache-2.0
"""The command line of the serving benchmark."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.common.document import value, whole_number
from benchmarks.serving.agents import DEFAULT_AGENTS, DEFAULT_CONTEXT, Team
from benchmarks.serving.fleet import OVERHEAD_GIB
from benchmarks.serving.model import SHAPES
from benchmarks.serving.workload import DEFAULT_WORKLOADS, Workload

BACKENDS = ("pat", "fa3", "flashinfer")


def _above_zero(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run").add_argument
    what(
        "--workloads",
        nargs="+",
        type=value(Workload.parse),
        metavar="SPEC",
        default=None,
        help="batches of requests, in the notation of workload.py (default: the standard set)",
    )
    what(
        "--agents",
        nargs="*",
        type=value(Team.parse),
        metavar="SPEC",
        help="teams of agents in a closed loop instead, or behind the --workloads if these are "
        f"named, too; in the notation of agents.py (default: {DEFAULT_AGENTS})",
    )
    what(
        "--backends",
        nargs="+",
        metavar="NAME",
        default=list(BACKENDS),
        help=f"attention backends to compare (default: {' '.join(BACKENDS)})",
    )
    how = "rounds over all of it (default: 5)"
    what("--runs", type=value(whole_number), default=5, help=how)
    what(
        "--new-tokens",
        type=value(whole_number),
        default=128,
        help="of a prompt, beyond the cached ones",
    )
    what("--output-tokens", type=value(whole_number), default=256, help="of every request")
    what("--stream-interval", type=value(whole_number), default=1, help="tokens per streamed event")
    what("--seed", type=int, default=0, help="of the prompts' tokens (default: 0)")
    what("--budget-s", type=float, default=float("inf"), help="start no run that would not end")
    agents = parser.add_argument_group("agents").add_argument
    agents(
        "--agent-context",
        type=value(whole_number),
        default=DEFAULT_CONTEXT,
        help=f"tokens with which an agent ends (default: {DEFAULT_CONTEXT})",
    )
    agents("--duration-s", type=_above_zero, default=30.0, help="of agents (default: 30)")
    _add_servers(parser.add_argument_group("servers"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_output(group: argparse._ArgumentGroup) -> None:
    output = group.add_argument
    how = "rewritten after every run; of --agents behind --workloads: FILE-agents"
    output("--json", type=Path, metavar="FILE", help=how)
    output("--from", dest="sources", nargs="+", type=Path, metavar="FILE", help="run nothing")


def _add_servers(group: argparse._ArgumentGroup) -> None:
    server = group.add_argument
    server("--model", default="llama3-8b", help=f"{', '.join(SHAPES)} or a folder")
    server(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="what servers run on (default: cuda)",
    )
    server("--dtype", choices=("bfloat16", "float16", "float32"), help="of weights and K/V")
    how = "of K/V alone, of every server (default: auto, that of --dtype)"
    server("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help=how)
    server("--tp", type=value(whole_number), default=1, help="GPUs of every server")
    server("--mem-fraction-static", type=float, default=0.95, help="of a GPU, for all servers")
    server("--overhead-gib", type=float, default=OVERHEAD_GIB, help="of a server and GPU")
    server(
        "--logs",
        type=Path,
        default=Path(tempfile.gettempdir()) / "sglang_pat_serving",
        help="folder for the servers' logs",
    )
    server("--server-args", nargs=argparse.REMAINDER, default=[], help="all that follows")


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Options with what is meant where nothing is named."""
    if options.agents == []:
        options.agents = [Team.parse(DEFAULT_AGENTS)]
    if options.workloads is None:
        options.workloads = [] if options.agents else list(map(Workload.parse, DEFAULT_WORKLOADS))
    return options
