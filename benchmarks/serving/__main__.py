# SPDX-License-Identifier: Apache-2.0
"""SGLang with pat beside other attention backends, one server each, all alive at the same time on
the same GPUs, driven by SGLang's own client: ``python -m benchmarks.serving``.

A LOAD is a short form of the client's arguments, or these themselves; see ``loads.py``. With --show
nothing runs: the commands of the servers and of the client are printed, for use by hand.

Backends take turns, in another order every run, each from an empty cache; the table has medians and
the spread. A plan's time and the share of K/V that is read are counters of pat.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.document import Document, conditions, device_name, heading, read, write
from benchmarks.serving.loads import DEFAULT_LOADS, Load, parse, write_trace
from benchmarks.serving.model import SHAPES, open_model
from benchmarks.serving.servers import ClientError, ask, serve
from benchmarks.serving.table import Row, counted_fields, table
from sglang_pat.demo.counters import Counters
from sglang_pat.demo.server import Server, ServerError
from sglang_pat.srt import BACKEND

CHAT = "sglang-oai-chat"  # the client takes an event of several tokens for one token there
BACKENDS = ("pat", "fa3", "flashinfer")
READY_S = 400.0
MEM_FRACTION = "0.95"  # of a GPU, for all servers together


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what to run").add_argument
    how = f"in the notation of loads.py (default: {' '.join(DEFAULT_LOADS)})"
    add("--loads", nargs="+", metavar="LOAD", default=list(DEFAULT_LOADS), help=how)
    how = f"attention backends (default: {' '.join(BACKENDS)})"
    add("--backends", nargs="+", metavar="NAME", default=list(BACKENDS), help=how)
    add("--runs", type=int, default=5, help="rounds over all of it (default: 5)")
    add("--output-tokens", type=int, default=256, help="of a batch's requests (default: 256)")
    add("--budget-s", type=float, default=float("inf"), help="start no run that would not end")
    add("--show", action="store_true", help="run nothing, print the commands")
    add = parser.add_argument_group("servers").add_argument
    add("--model", default="llama3-8b", help=f"{', '.join(SHAPES)} or a folder")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of servers (default: cuda)")
    how = "of K/V, of every server (default: auto, that of the weights)"
    add("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help=how)
    add("--tp", type=int, default=1, help="GPUs of every server")
    add("--pool-tokens", type=int, default=131_072, help="of a server's K/V (default: 131072)")
    add("--max-requests", type=int, default=256, help="that decode together (default: 256)")
    add("--stream-interval", type=int, default=8, help="tokens a streamed event (default: 8)")
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="all that follows")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="every run, rewritten after each")
    add("--from", dest="sources", nargs="+", type=Path, metavar="FILE", help="print such files")
    how = "gets model, traces and logs (default: a new one, whose logs remain)"
    add("--folder", type=Path, metavar="DIR", help=how)
    return parser


def run(options: argparse.Namespace, until: float) -> None:
    """Start the servers, measure and print; ``--json`` has every run as soon as it has ended. No
    run starts that would not end before ``until``, of ``time.monotonic``.

    Raises:
        ValueError: what is asked for is no load or no model.
        ServerError: a server did not start or ended.
        ClientError: a request failed.
    """
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="sglang_pat_bench_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    loads = [parse(text, output=options.output_tokens, folder=folder) for text in options.loads]
    model = open_model(options.model, folder)
    arguments = server_arguments(options, model)
    if traced := [load for load in loads if load.sizes]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        for load in traced:
            write_trace(load, tokenizer)
    if options.show:
        print("\n".join(commands(model, options, arguments, loads)))
        return
    settings = {n: each for n, each in os.environ.items() if n.startswith("SGLANG_")}
    device = device_name(options.device)
    document = conditions("serving", "benchmarks.serving", device, settings)
    document |= {"loads": {load.name: shlex.join(load.arguments) for load in loads}, "rows": []}
    print(f"starting {', '.join(options.backends)}; logs in {folder}", flush=True)
    started = {"device": options.device, "pool_tokens": options.pool_tokens, "logs": folder}
    ready_s = min(READY_S, until - time.monotonic())
    with serve(model, options.backends, arguments, **started, ready_s=ready_s) as servers:
        print("servers are ready", flush=True)
        try:
            measure(servers, loads, options, until, document, folder)
        finally:
            write(document, options.json)  # with the counters of the last runs
            show([document])


def server_arguments(options: argparse.Namespace, model: Path) -> list[str]:
    """Of ``sglang.launch_server``, of every server."""
    requests = str(options.max_requests)
    found = [
        *("--dtype", "bfloat16" if options.device == "cuda" else "float32"),
        *("--kv-cache-dtype", options.kv_cache_dtype, "--tp-size", str(options.tp)),
        *("--max-total-tokens", str(options.pool_tokens), "--max-running-requests", requests),
        *("--stream-interval", str(options.stream_interval)),
        "--incremental-streaming-output",  # the client, one thread, reads all of it
        # The client counts the tokens of events that have a text, which special tokens lack.
        *("--preferred-sampling-params", '{"skip_special_tokens": false}'),
        *(() if any(model.glob("*.safetensors")) else ("--load-format", "dummy")),
    ]
    if options.device == "cuda":
        # Exceptions to SGLang's defaults: several servers share a GPU, and graphs of more requests
        # than ever run would only take memory and time to start. SGLang takes so much of what was
        # free when a server started, less what is not free any more, as room for its pool, and
        # others grow meanwhile: all get the pool they ask for only if all fit together.
        found += ["--mem-fraction-static", MEM_FRACTION, "--cuda-graph-max-bs-decode", requests]
    return [*found, *options.server_args]


def commands(
    model: Path, options: argparse.Namespace, arguments: Sequence[str], loads: Sequence[Load]
) -> list[str]:
    """Lines for a shell: the servers, on ports from 30000 on, and the client for the first one."""
    lines = [
        f"python -m sglang.launch_server --model-path {shlex.quote(str(model))} "
        f"--attention-backend {backend} --port {port} {shlex.join(arguments)}"
        for port, backend in enumerate(options.backends, 30_000)
    ]
    return lines + [
        f"python -m {shlex.join([*load.program, *load.arguments])} --port 30000 --seed 0"
        for load in loads
    ]


def measure(
    servers: Mapping[str, Server],
    loads: Sequence[Load],
    options: argparse.Namespace,
    until: float,
    document: Document,
    folder: Path,
) -> None:
    """All backends on a load, one after the other, then the next load, then all again. Before them
    the first load once on each, of which no row tells: kernels are compiled at their first use.

    Raises:
        ClientError: a request failed.
    """
    counted, longest = Counters(), dict.fromkeys([load.name for load in loads], 0.0)
    for turn in range(-1, options.runs):
        for load in loads if turn >= 0 else loads[:1]:
            rows: list[Row] = []
            by = turn % len(servers)  # another order every run, so that none is always first
            for backend in [*servers, *servers][by : by + len(servers)]:
                began = time.monotonic()
                if began + (longest[load.name] or max(longest.values())) > until:
                    print(f"{load.name} {backend}: the time is up", flush=True)
                    break
                row = run_once(servers[backend], load, options, turn, folder)
                rows.append(row | {"load": load.name, "backend": backend, "run": turn})
                longest[load.name] = max(longest[load.name], time.monotonic() - began)
                if turn >= 0:
                    document["rows"].append(rows[-1])
                    write(document, options.json)
                    tpot = row["median_tpot_ms"]
                    print(f"{load.name} {backend}: TPOT p50 {tpot:.2f} ms", flush=True)
            for row in rows:
                if row["backend"] == BACKEND:  # its counters appear late
                    before, counted = counted, servers[BACKEND].counters()
                    row["counted"] = counted_fields(counted - before)


def run_once(
    server: Server, load: Load, options: argparse.Namespace, turn: int, folder: Path
) -> Row:
    """What the client says of one run of a load, from an empty cache on."""
    server.post("/flush_cache?timeout=10")  # once the last request is gone
    row = ask(load, port=server.port, seed=turn % (options.runs + 1), folder=folder)
    if options.stream_interval > 1 and CHAT in load.arguments:
        row = {name: each for name, each in row.items() if "itl" not in name}
    return row


def show(documents: Sequence[Document]) -> None:
    """Print the conditions of each document, and one table of all."""
    for document in documents:
        print("\n".join([document["command"], *heading(document)]))
    rows = [row for document in documents for row in document["rows"]]
    print("\n".join(table(rows)) if rows else "no runs")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 a server or a request failed, 2 what was asked for cannot be."""
    started = time.monotonic()
    options = make_parser().parse_args(arguments)
    try:
        if options.sources:
            show([read(path, ["serving"]) for path in options.sources])
        else:
            run(options, started + options.budget_s)
    except ValueError as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 2
    except (ServerError, ClientError, OSError) as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Unwinds, so that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    sys.exit(main())
