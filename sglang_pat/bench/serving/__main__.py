# SPDX-License-Identifier: Apache-2.0
"""Latencies of SGLang with pat beside other attention backends, one server each, all alive at the
same time on the same GPUs: ``python -m sglang_pat.bench.serving``.

Workloads (the default) are batches of requests sent at once whose declared prefixes are in the
cache; see ``workload.py`` for their notation. Backends take turns, in another order every round;
tables show medians and the spread. Inter-token latency (ITL) counts only while all requests decode.
``step ms`` is the engine's own time per step, which SGLang's scheduler notes
(SGLANG_RECORD_STEP_TIME): where ITL is over 10 % more, the client or SGLang's HTTP process is the
limit. Plan times and K/V bytes saved are pat's counters over the run.

Traces (``--trace``) replay requests that arrive over time; see ``trace.py``. Agents (``--agents``)
come and go and wait for their answers; see ``agents.py``. ``--first-runs`` shows the first runs
after the start one by one; see ``first.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.common.document import Document, write
from sglang_pat.bench.common.figures import require
from sglang_pat.bench.common.server import ServerError
from sglang_pat.bench.serving import document as documents
from sglang_pat.bench.serving.client import RequestError
from sglang_pat.bench.serving.closed_loop import run_agents
from sglang_pat.bench.serving.first import run_first
from sglang_pat.bench.serving.fleet import FleetConfig, serve
from sglang_pat.bench.serving.model import GIB, Model, open_model
from sglang_pat.bench.serving.options import complete, make_parser
from sglang_pat.bench.serving.run import (
    Replay,
    RunOptions,
    replays,
    run_traces,
    run_workloads,
)

# Slots beyond the tokens of all requests: overlapping steps hold a few more.
POOL_MARGIN, POOL_MARGIN_PER_REQUEST = 1024, 16
PAGE = 256  # a multiple of every page size
READY_S = 400.0
AGENTS_SETTINGS_SHOWN = ("agent_context", "duration_s")
TRACE_SETTINGS_SHOWN = ("context", "block_tokens", "duration_s")
SETTINGS_SHOWN = ("new_tokens", "output_tokens", "stream_interval", "runs", "seed", "server_args")


def run(options: argparse.Namespace, budget: Budget, scratch: Path) -> Document:
    """Start the servers, measure and print; ``--json`` has every run as soon as it has ended.

    Raises:
        ValueError: what is asked for does not fit the model, the memory or a trace.
        ServerError: a server did not start or ended.
        RequestError: a request failed.
    """
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    model = open_model(options.model, scratch, dtype, options.kv_cache_dtype)
    if options.first_runs:
        options.runs = options.first_runs
    settings = RunOptions(
        vocab=model.vocab,
        kv_bytes_per_token=model.kv_bytes_per_token,
        **{
            name: getattr(options, name)
            for name in RunOptions.__slots__
            if name not in ("vocab", "kv_bytes_per_token")
        },
    )
    todo = replays(options.trace, options.rates, settings) if options.trace else []
    device, gpu_gib = _device(options.device, options.tp)
    config = _fleet_config(options, model, dtype, todo, gpu_gib)
    kind = _kind(options)
    document = documents.new(kind, device, _shown(options, config))

    journal = documents.Journal(document, options.json, budget)
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
            if todo:
                run_traces(fleet, todo, settings, budget, journal)
            elif options.agents:
                context = options.agent_context
                run_agents(fleet, options.agents, context, settings, budget, journal)
            elif options.first_runs:
                spies = options.logs if options.spy else None
                run_first(fleet, options.workloads, settings, budget, journal, spies=spies)
            else:
                run_workloads(fleet, options.workloads, settings, budget, journal)
        finally:
            write(document, options.json)  # with the counters of the last runs
            if budget.spent_out:
                print("the time is up: what follows is of the runs that ended")
            documents.show([document])
    return document


def _kind(options: argparse.Namespace) -> str:
    """Of the document."""
    if options.agents:
        return "agents"
    return "traces" if options.trace else "first" if options.first_runs else "workloads"


def _shown(options: argparse.Namespace, config: FleetConfig) -> dict[str, Any]:
    """The settings that a document names."""
    shown = {"model": options.model, "tp": config.tp, "dtype": config.dtype}
    shown |= {"pool_tokens": config.pool_tokens, "max_requests": config.max_requests}
    if config.kv_cache_dtype != "auto":
        shown["kv_cache_dtype"] = config.kv_cache_dtype
    shown |= {name: getattr(options, name) for name in SETTINGS_SHOWN}
    if options.trace:
        shown |= {name: getattr(options, name) for name in TRACE_SETTINGS_SHOWN}
    if options.agents:
        shown |= {name: getattr(options, name) for name in AGENTS_SETTINGS_SHOWN}
    return shown | {
        name: value for name, value in os.environ.items() if name.startswith("SGLANG_PAT_")
    }


def _fleet_config(
    options: argparse.Namespace,
    model: Model,
    dtype: str,
    todo: list[Replay],
    gpu_gib: float | None,
) -> FleetConfig:
    """Servers that hold the largest workload; of traces, as much as memory allows."""
    config = FleetConfig(
        model=model,
        device=options.device,
        dtype=dtype,
        tp=options.tp,
        pool_tokens=0,
        max_requests=max((work.requests for work in options.workloads), default=0),
        mem_fraction_static=options.mem_fraction_static,
        overhead_gib=options.overhead_gib,
        args=tuple(options.server_args),
        kv_cache_dtype=options.kv_cache_dtype,
    )
    if todo:
        longest = options.context
        config = replace(config, max_requests=options.max_requests)
        pool = max(one.kv_tokens + len(one.prompts) * options.output_tokens for one in todo)
        if gpu_gib is not None:
            pool = min(pool, config.largest_pool(len(options.backends), gpu_gib) - PAGE)
            pool = max(pool, options.context)  # at least one request, or the check below fails
    elif options.agents:
        longest = options.agent_context
        options.agents.check(longest)
        config = replace(config, max_requests=options.agents.agents)
        pool = options.agents.kv_tokens(longest)
        pool += POOL_MARGIN + POOL_MARGIN_PER_REQUEST * config.max_requests
    else:
        added = options.new_tokens + options.output_tokens
        longest = max(work.cached for work in options.workloads) + added
        pool = max(
            work.kv_tokens(new=options.new_tokens, output=options.output_tokens)
            for work in options.workloads
        )
        pool += POOL_MARGIN + POOL_MARGIN_PER_REQUEST * config.max_requests
    pool += -pool % PAGE  # else SGLang rounds it down
    if longest > model.positions:
        raise ValueError(
            f"a request of {longest} tokens is longer than the {model.positions} positions of "
            f"{options.model}"
        )
    config = replace(config, pool_tokens=pool)
    if gpu_gib is not None:
        config.check_memory(options.backends, gpu_gib)
    return config


def _device(device: str, gpus: int) -> tuple[str, float | None]:
    """Name and memory of a GPU, in GiB; the memory of a CPU is not looked at."""
    import torch

    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads", None
    if torch.cuda.device_count() < gpus:
        raise ValueError(
            f"torch {torch.__version__} can use {torch.cuda.device_count()} GPUs here, but "
            f"{gpus} are needed: use another machine, or --device cpu with a small --model"
        )
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory / GIB


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 a server or a request failed, 2 what was asked for cannot be."""
    started = time.monotonic()
    parser = make_parser(__doc__)
    options = complete(parser, parser.parse_args(arguments))
    if options.plot:
        require()
    try:
        if options.sources:
            found = [json.loads(path.read_text()) for path in options.sources]
            documents.show(found)
        else:
            with tempfile.TemporaryDirectory(prefix="sglang_pat_bench_") as scratch:
                found = [run(options, Budget(started + options.budget_s), Path(scratch))]
        if options.plot:
            documents.draw(found, options.plot)
    except ValueError as error:
        print(f"sglang_pat.bench.serving: {error}", file=sys.stderr)
        return 2
    except (ServerError, RequestError, OSError) as error:
        print(f"sglang_pat.bench.serving: {error}", file=sys.stderr)
        return 1
    return 0


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that the servers are stopped too
    sys.exit(main())
