# SPDX-License-Identifier: Apache-2.0
"""CUDA attention of one decode step and layer, pat beside FA3, FlashInfer, a cascade by levels and
the floor: ``python -m benchmarks.kernel``. Needs a GPU, but not SGLang.

By default the 20 trees and 4 head configurations of the PAT paper (section 8.2). Timed is forward
and merge in a captured graph over a cold L2, the median of many. With ``--draft-tokens`` it times
verify steps of speculative decoding: the last T tokens of each request, each of which attends to
all up to itself (docs/speculation.md). With ``--ragged`` it takes batches whose requests differ,
with ``--batches`` those of a running server. A peer or a batch that cannot run is left out, with
the reason.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.document import Document, conditions, heading, read, write
from benchmarks.common.forests import Tree
from benchmarks.kernel.cases import Case, Work, asked
from benchmarks.kernel.clock import Captured, Clock, capture, device_rates
from benchmarks.kernel.floor import Rates, floor_us
from benchmarks.kernel.kv import quantised, relative
from benchmarks.kernel.layer import E4M3, KV_DTYPES, Layer, PatOptions, device_batch, error_of
from benchmarks.kernel.peers import PEERS, missing
from benchmarks.kernel.report import TWO, TreeRow, complaints, table

# Milliseconds of repeats for one time.
BUDGET_MS = 50.0
KINDS = ("trees", "drafts", "ragged", "batches")  # of documents


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernel", description=__doc__)
    add = parser.add_argument
    add("--heads", nargs="+", default=[], metavar="Q/KV", help="as 32/8 (default: all four)")
    group = parser.add_mutually_exclusive_group()
    one_of = group.add_argument
    one_of("--trees", nargs="+", default=[], metavar="TREE", help="as 1,8,512_32,512,256")
    one_of("--ragged", action="store_true", help="batches whose requests differ, nine heads")
    how = "replay the batches of a server, out of its SGLANG_PAT_DUMP"
    one_of("--batches", type=Path, metavar="FILE", help=how)
    add("--permuted", action="store_true", help="slots at random places of the pool")
    how = "of K and V; beside fp8_e4m3, pat is timed with bfloat16 too (default: bfloat16, or as "
    add("--kv-dtype", choices=KV_DTYPES, help=f"{how}the server of --batches had it)")
    how = "time verify steps, of so many draft tokens a request, as 4,8 (default: decode steps)"
    add("--draft-tokens", metavar="T[,T...]", help=how)
    how = "a sink for each query head, as GPT-OSS has; only FA3 takes them; pat without, too"
    add("--sinks", action="store_true", help=how)
    how = "N of the batches, from the first to the last (default: all)"
    add("--sample", type=int, metavar="N", help=how)
    add("--only", nargs="+", default=[], metavar="PATTERN", help="rows by name, as 'skew*' or 8/1")
    how = "start no row later (default: no limit)"
    add("--budget-s", type=float, default=math.inf, metavar="S", help=how)
    add("--json", type=Path, metavar="FILE", help="write rows and conditions")
    add("--from", dest="source", type=Path, metavar="FILE", help="a --json file, instead of a GPU")
    return parser


def begin(options: argparse.Namespace, work: Work) -> tuple[Document, Clock]:
    """A document without rows, with what the device reaches and which peers can run; a clock."""
    timer = Clock(BUDGET_MS)
    rates = device_rates(timer)
    drafts = {case.draft_tokens for case in work.cases}
    settings: dict[str, Any] = {"kv_dtype": work.kv_dtype, "draft_tokens": sorted(drafts)}
    settings |= {"sinks": True} if options.sinks else {}
    device = torch.cuda.get_device_name()
    found = conditions(work.kind, "benchmarks.kernel", device, settings) | {
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "rows": [],
        "left_out": [],
    }
    found |= {"server": work.server} if work.server else {}
    heads = dict.fromkeys(case.heads for case in work.cases)
    found["absent"] = missing(heads, work.kv_dtype == E4M3, max(drafts))
    if options.sinks:
        found["absent"] |= dict.fromkeys(("flashinfer", "levels"), "called without sinks")
    found["peers"] = [name for name in PEERS if name not in found["absent"]]
    return found, timer


def run(options: argparse.Namespace, work: Work) -> Document:
    """Measure; the document that ``--json`` writes as it grows."""
    until = time.monotonic() + options.budget_s
    document, timer = begin(options, work)
    print("\n".join(about(document)), flush=True)
    settings = PatOptions(kv_dtype=work.kv_dtype)
    for number, case in enumerate(work.cases, 1):
        if time.monotonic() > until:
            document["left_out"].append(f"{case.name}: the time is up")
            continue
        torch.cuda.empty_cache()
        try:
            row = measure(case, settings, options.permuted, document, timer)
        except (torch.OutOfMemoryError, ValueError) as error:
            document["left_out"].append(f"{case.name}: {str(error).partition('. ')[0]}")
            continue
        document["rows"].append(asdict(row))
        best = row.best(TWO)
        against = f"{row.pat / best:.3f} of the better peer" if best else "no peer ran"
        print(f"{number}/{len(work.cases)} {case.name} {row.pat:.1f} us, {against}", flush=True)
        write(document, options.json)
    write(document, options.json)
    return document


def measure(
    case: Case, settings: PatOptions, permuted: bool, document: Document, timer: Clock
) -> TreeRow:
    """Capture, check and time pat and the ``peers`` of a document, whose rates are the floor's.
    A cascade by levels is left out where there are none."""
    tree, heads, scale = case.requests, case.heads, case.heads.dim**-0.5
    settings = replace(settings, draft_tokens=case.draft_tokens)
    batch = device_batch(tree, heads, permuted, case.draft_tokens)
    graphs: dict[str, Captured] = {}
    if settings.e4m3:
        bf16 = Layer(batch, tree, heads, replace(settings, kv_dtype="bfloat16"), scale)
        graphs["bf16"] = capture(bf16.attend)
        batch = quantised(batch)
    if "sinks" in document["settings"]:
        graphs["plain"] = capture(Layer(batch, tree, heads, settings, scale).attend)
        batch = replace(batch, sinks=batch.q.new_empty(heads.q).normal_())
    layer = Layer(batch, tree, heads, settings, scale)
    graphs["pat"] = capture(layer.attend)
    for name in document["peers"]:
        if name == "levels" and not isinstance(tree, Tree):
            continue
        try:
            graphs[name] = capture(PEERS[name](batch, tree, scale))
        except Exception as error:  # the run goes on without it
            print(f"{case.name}: {name} did not run: {type(error).__name__}: {error}")
    outs = {name: graph.out for name, graph in graphs.items() if graph.out is not None}
    for name, out in outs.items():
        out.fill_(float("nan"))
        graphs[name].replay()
    times, noise = timer.compare({name: graph.replay for name, graph in graphs.items()})
    ours = outs.pop("pat")
    outs = {name: out for name, out in outs.items() if name not in ("bf16", "plain")}
    made = layer.plan
    rates = Rates(document["bytes_per_s"], document["flops_per_s"])
    floor = floor_us(tree, heads, rates, settings.kv_bytes, settings.draft_tokens)
    errors = {name: error_of(out, batch, scale) for name, out in outs.items() if settings.e4m3}
    return TreeRow(
        heads=str(heads),
        spec=str(tree),
        permuted=permuted,
        floor_us=floor,
        pat=times["pat"],
        fa3=times.get("fa3"),
        flashinfer=times.get("flashinfer"),
        levels=times.get("levels"),
        noise=noise,
        kv_read_over_unique=made.kv_tokens_read(sum(tree.seq_lens)) / tree.unique_tokens,
        degraded=made.degraded,
        error=error_of(ours, batch, scale),
        differences={name: relative(out, ours) for name, out in outs.items()},
        kv_dtype=settings.kv_dtype,
        errors=errors,
        bf16=times.get("bf16"),
        plain=times.get("plain"),
        draft_tokens=settings.draft_tokens,
    )


def about(document: Document) -> list[str]:
    """Where and how a document was measured, as lines."""
    lines = heading(document)
    if server := document.get("server"):
        had = server["versions"] | {"kv_dtype": server.get("kv_dtype")}
        said = ", ".join(f"{name} {found}" for name, found in had.items())
        lines.append(f"batches of {server['date']}, {server['device']}, there {said}")
    lines.append(
        f"ceilings: {document['bytes_per_s'] / 1e12:.2f} TB/s read, "
        f"{document['flops_per_s'] / 1e12:.0f} TFLOP/s bf16"
    )
    return lines + [f"without {name}: {why}" for name, why in document.get("absent", {}).items()]


def show(document: Document) -> int:
    """Print the rows of a document; exit status 1 if there is something to complain about."""
    names = {each.name for each in fields(TreeRow)}  # older documents have more
    rows = [TreeRow(**{n: row[n] for n in names & row.keys()}) for row in document["rows"]]
    left_out = [f"left out: {each}" for each in document.get("left_out", [])]
    found = complaints(rows)
    print("\n".join([*table(rows), *left_out, *found]))
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        if options.source:
            document = read(options.source, KINDS)
            print("\n".join(about(document)))
            return show(document)
        work = asked(options)
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device that torch can use: print others with --from FILE")
        return show(run(options, work))
    except (OSError, ValueError) as error:
        print(f"benchmarks.kernel: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
