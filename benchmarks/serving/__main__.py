# SPDX-License-Identifier: Apache-2.0
"""Latencies of SGLang with pat beside other attention backends, one server each, all alive at the
same time on the same GPUs: ``python -m benchmarks.serving``.

Workloads (the default) are batches of requests sent at once whose declared prefixes are in the
cache; see ``workload.py`` for their notation. Backends take turns, in another order every round;
tables show medians and the spread. Inter-token latency (ITL) counts only while all requests decode.
``step ms`` is the engine's own time per step, which SGLang's scheduler notes
(SGLANG_RECORD_STEP_TIME): where ITL is over 10 % more, the client or SGLang's HTTP process is the
limit. Plan times and K/V bytes saved are pat's counters over the run.

Agents (``--agents``) come and go and wait for their answers; see ``agents.py``. Traces and requests
that arrive over time are SGLang's own client's, ``python -m sglang.bench_serving``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.common.budget import Budget
from benchmarks.common.document import read, write
from benchmarks.serving import document as documents
from benchmarks.serving.client import RequestError
from benchmarks.serving.closed_loop import run_agents
from benchmarks.serving.fleet import FleetConfig, serve
from benchmarks.serving.model import open_model
from benchmarks.serving.options import complete, make_parser
from benchmarks.serving.run import RunOptions, run_workloads
from benchmarks.serving.sizing import device_of, fleet_config
from sglang_pat.demo.server import ServerError

READY_S = 400.0
AGENTS_SETTINGS_SHOWN = ("agent_context", "duration_s")
SETTINGS_SHOWN = ("new_tokens", "output_tokens", "stream_interval", "runs", "seed", "server_args")


def run(options: argparse.Namespace, budget: Budget, scratch: Path) -> None:
    """Start the servers, measure and print; ``--json`` has every run as soon as it has ended. A
    document for each kind of runs.

    Raises:
        ValueError: what is asked for does not fit the model or the memory.
        ServerError: a server did not start or ended.
        RequestError: a request failed.
    """
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    model = open_model(options.model, scratch, dtype, options.kv_cache_dtype)
    settings = RunOptions(
        vocab=model.vocab,
        kv_bytes_per_token=model.kv_bytes_per_token,
        **{
            name: getattr(options, name)
            for name in RunOptions.__slots__
            if name not in ("vocab", "kv_bytes_per_token")
        },
    )
    device, gpu_gib = device_of(options.device, options.tp)
    config = fleet_config(options, model, dtype, gpu_gib)
    kinds = ["workloads"] * bool(options.workloads) + ["agents"] * bool(options.agents)
    found = {kind: documents.new(kind, device, _shown(options, config, kind)) for kind in kinds}
    paths = {kind: _path(options.json, kind if kind != kinds[0] else "") for kind in kinds}
    memory = f", {config.server_gib:.1f} GiB a GPU each" if gpu_gib is not None else ""
    print(
        f"starting {', '.join(options.backends)} with pools of {config.pool_tokens} tokens"
        f"{memory}; logs in {options.logs}",
        flush=True,
    )
    ready_s = min(READY_S, budget.left_s())
    with serve(config, options.backends, logs=options.logs, ready_s=ready_s) as fleet:
        print(f"servers are ready{budget}", flush=True)
        try:
            for kind, document in found.items():
                journal = documents.Journal(document, paths[kind], budget)
                if kind == "agents":
                    context = options.agent_context
                    run_agents(fleet, options.agents, context, settings, budget, journal)
                else:
                    run_workloads(fleet, options.workloads, settings, budget, journal)
        finally:
            for kind, document in found.items():
                write(document, paths[kind])  # with the counters of the last runs
            if budget.spent_out:
                print("the time is up: what follows is of the runs that ended")
            for document in found.values():
                documents.show([document])


def _path(path: Path | None, kind: str) -> Path | None:
    """Of a document; ``kind``: not the first one's."""
    return path.with_stem(f"{path.stem}-{kind}") if path and kind else path


def _shown(options: argparse.Namespace, config: FleetConfig, kind: str) -> dict[str, Any]:
    """The settings that a document of a kind names."""
    shown = {"model": options.model, "tp": config.tp, "dtype": config.dtype}
    shown |= {"pool_tokens": config.pool_tokens, "max_requests": config.max_requests}
    if config.kv_cache_dtype != "auto":
        shown["kv_cache_dtype"] = config.kv_cache_dtype
    shown |= {name: getattr(options, name) for name in SETTINGS_SHOWN}
    if kind == "agents":
        shown |= {name: getattr(options, name) for name in AGENTS_SETTINGS_SHOWN}
    return shown | {
        name: value for name, value in os.environ.items() if name.startswith("SGLANG_PAT_")
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 a server or a request failed, 2 what was asked for cannot be."""
    started = time.monotonic()
    options = complete(make_parser(__doc__).parse_args(arguments))
    try:
        if options.sources:
            documents.show([read(path, documents.ROWS) for path in options.sources])
        else:
            with tempfile.TemporaryDirectory(prefix="sglang_pat_bench_") as scratch:
                run(options, Budget(started + options.budget_s), Path(scratch))
    except ValueError as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 2
    except (ServerError, RequestError, OSError) as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 1
    return 0


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that the servers are stopped too
    sys.exit(main())
