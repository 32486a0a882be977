# SPDX-License-Identifier: Apache-2.0
"""The command line of the serving benchmark."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sglang_pat.bench.common.document import value, whole_number
from sglang_pat.bench.serving.agents import DEFAULT_AGENTS, DEFAULT_CONTEXT, Team
from sglang_pat.bench.serving.fleet import OVERHEAD_GIB, split_preset
from sglang_pat.bench.serving.model import SHAPES
from sglang_pat.bench.serving.trace import MOONCAKE_BLOCK, TRACES
from sglang_pat.bench.serving.workload import DEFAULT_WORKLOADS, ROUTER_WORKLOAD, Workload
from sglang_pat.config import PRESETS

BACKENDS, ROUTER_BACKENDS = ("pat", "fa3", "flashinfer"), ("pat", "flashinfer")
FIRST_WORKLOADS = ("8192x128", "4096x64")
RATES, DURATION_S = (2.0, 4.0, 8.0), 30.0
# Of --capacity:
FIRST_RATE, PROBE_S, LIMITS_MS, RESOLUTION = (8.0,), 15.0, (25.0, 50.0), 0.12


def _above_zero(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _backend(text: str) -> str:
    """Raises ValueError for a preset that pat does not have."""
    name, preset = split_preset(text)
    if ":" in text and (name != BACKENDS[0] or preset not in PRESETS):
        raise ValueError(f"{text!r} is no backend: a preset is pat:{{{','.join(PRESETS)}}}")
    return text


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang_pat.bench.serving",
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
    what("--trace", nargs="+", choices=TRACES, help="replay traces instead")
    what(
        "--agents",
        nargs="*",
        type=value(Team.parse),
        metavar="SPEC",
        help="teams of agents in a closed loop instead, or behind the --workloads if these are "
        f"named, too; in the notation of agents.py (default: {DEFAULT_AGENTS})",
    )
    what(
        "--router",
        nargs="*",
        type=value(Workload.parse),
        metavar="SPEC",
        help="workloads through SGLang's router before two servers of each backend, a GPU each "
        f"(default: {ROUTER_WORKLOAD})",
    )
    what(
        "--capacity",
        action="store_true",
        help="the most agents at once, or requests/s of a trace, with p99 TPOT under --limits-ms",
    )
    what(
        "--backends",
        nargs="+",
        metavar="NAME",
        type=value(_backend),
        help=f"attention backends to compare (default: {' '.join(BACKENDS)}; --router: "
        f"{' '.join(ROUTER_BACKENDS)}); pat:PRESET is pat by the rules of another paper",
    )
    how = "rounds over all of it (default: 5); a probe of --capacity is one run"
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
    how = "of workloads' last run: profile its CUDA graphs in a run more, with SGLang's profiler"
    what("--profile", type=Path, metavar="FOLDER", help=how)
    what("--budget-s", type=float, default=float("inf"), help="start no run that would not end")
    first = parser.add_argument_group("first runs").add_argument
    first(
        "--first-runs",
        type=value(whole_number),
        metavar="N",
        help="N runs after the start, shown singly",
    )
    first("--spy", action="store_true", help="record the first and the last with py-spy in --logs")
    traces = parser.add_argument_group("traces").add_argument
    traces(
        "--rates",
        nargs="+",
        type=_above_zero,
        help="requests/s (default: 2 4 8; --capacity: 8)",
    )
    traces(
        "--duration-s",
        type=_above_zero,
        help="of arrivals at each rate, or of agents (default: 30; --capacity: 15)",
    )
    traces("--trace-file", type=Path, help="JSON lines of a Mooncake trace")
    traces(
        "--context",
        type=value(whole_number),
        default=8192,
        help="longest prompt and output, in tokens",
    )
    traces(
        "--block-tokens", type=value(whole_number), default=MOONCAKE_BLOCK, help="tokens of a block"
    )
    traces(
        "--max-requests",
        type=value(whole_number),
        default=256,
        help="that decode at the same time, and the most agents of --capacity (default: 256)",
    )
    agents = parser.add_argument_group("agents").add_argument
    agents(
        "--agent-context",
        type=value(whole_number),
        default=DEFAULT_CONTEXT,
        help=f"tokens with which an agent ends (default: {DEFAULT_CONTEXT})",
    )
    capacity = parser.add_argument_group("capacity").add_argument
    capacity(
        "--limits-ms",
        nargs="+",
        type=_above_zero,
        metavar="MS",
        help="of the 99th percentile of TPOT over requests (default: 25 50)",
    )
    capacity(
        "--resolution",
        type=_above_zero,
        help="how far a load that holds and one that does not may stay apart, as a fraction "
        f"(default: {RESOLUTION:g})",
    )
    _add_servers(parser.add_argument_group("servers"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_output(group: argparse._ArgumentGroup) -> None:
    output = group.add_argument
    how = "rewritten after every run; of --agents behind --workloads: FILE-agents"
    output("--json", type=Path, metavar="FILE", help=how)
    output("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
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


def complete(found: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Options that ``found`` has read, with what is meant where nothing is named. Ends the program
    if some contradict each other."""
    if options.agents == []:
        options.agents = [Team.parse(DEFAULT_AGENTS)]
    if options.router == []:
        options.router = [Workload.parse(ROUTER_WORKLOAD)]
    _refuse_contradictions(found, options)
    options.backends = options.backends or list(ROUTER_BACKENDS if options.router else BACKENDS)
    options.limits_ms = sorted(options.limits_ms or LIMITS_MS)
    options.resolution = options.resolution or RESOLUTION
    options.rates = options.rates or list(FIRST_RATE if options.capacity else RATES)
    if options.duration_s is None:
        options.duration_s = PROBE_S if options.capacity else DURATION_S
    if options.router:
        options.workloads = options.router
    elif options.workloads is None:
        specs = FIRST_WORKLOADS if options.first_runs else DEFAULT_WORKLOADS
        alone = options.trace or options.agents
        options.workloads = [] if alone else list(map(Workload.parse, specs))
    return options


def _refuse_contradictions(found: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    others = (options.trace, options.agents, options.first_runs, options.workloads)
    for wrong, message in (
        (
            options.router and (any(others) or options.capacity),
            "--router runs alone: leave --workloads, --trace, --agents, --first-runs and "
            "--capacity out",
        ),
        (
            options.trace and options.first_runs,
            "--first-runs is of workloads: leave --trace out",
        ),
        (
            options.agents and (options.trace or options.first_runs),
            "--agents runs alone or behind --workloads: leave --trace and --first-runs out",
        ),
        (
            options.agents and options.workloads and options.plot,
            "--plot draws runs of one kind: draw each --json FILE with --from FILE",
        ),
        (
            options.capacity and options.workloads,
            "--capacity is of agents or of traces: leave --workloads out",
        ),
        (
            options.capacity and not (options.trace or options.agents),
            "--capacity needs what is served: add --agents [SPEC] or --trace NAME",
        ),
        (
            options.capacity and len(options.rates or ()) > 1,
            "--capacity finds the rates itself: give --rates the one to begin with",
        ),
        (
            (options.limits_ms or options.resolution) and not options.capacity,
            "--limits-ms and --resolution are those of --capacity: add it",
        ),
        (
            options.profile and (not options.workloads or options.first_runs),
            "--profile is of workloads: give --workloads, and leave --first-runs out",
        ),
        (
            options.profile and options.device == "cpu",
            "--profile is of CUDA graphs, and a CPU has none: leave it out",
        ),
        (
            options.spy and not options.first_runs,
            "--spy compares the first run with the last: add --first-runs N",
        ),
    ):
        if wrong:
            found.error(message)
