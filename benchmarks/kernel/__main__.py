# SPDX-License-Identifier: Apache-2.0
"""CUDA attention of one decode step and layer, pat beside FA3, FlashInfer, a cascade by levels and
the floor: ``python -m benchmarks.kernel``. Needs a GPU, but not SGLang.

By default the 20 trees and 4 head configurations of the PAT paper (section 8.2). Timed is forward
and merge in a captured graph over a cold L2, the median of many; plan and snapshot stand apart.
With ``--draft-tokens`` it times verify steps of speculative decoding: the last T tokens of each
request, each of which attends to all up to itself (docs/speculation.md). With ``--ragged`` it takes
batches whose requests differ, with ``--batches`` those of a running server. A peer that cannot run
is left out, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import torch

from benchmarks.common import document as documents
from benchmarks.common.budget import Budget
from benchmarks.common.document import Document, write
from benchmarks.common.forests import GENERATOR
from benchmarks.kernel import batches
from benchmarks.kernel.cases import inputs, reason_against
from benchmarks.kernel.clock import Clock, device_rates, empty_us
from benchmarks.kernel.floor import Heads, Rates
from benchmarks.kernel.options import cases, check, make_parser, settings_of
from benchmarks.kernel.peers import PEERS, usable
from benchmarks.kernel.report import TreeRow, complaints, decode_ratio, table
from benchmarks.kernel.rows import measure

# Milliseconds of repeats for one time.
BUDGET_MS, QUICK_BUDGET_MS = 50.0, 15.0
VERSIONS_OF = ("sglang-pat", "torch", "sglang-kernel", "flashinfer-python")
TREES = ("trees", "drafts")
KINDS = (*TREES, "ragged", "batches")  # of documents
FOREST_PEERS = ("fa3", "flashinfer")  # a cascade by levels needs a tree


def begin(kind: str, options: argparse.Namespace) -> tuple[Document, Clock, Rates]:
    """A document of ``kind`` without rows, with what the device reaches; a clock; and the rates."""
    settings = asdict(settings_of(options))
    if options.draft_tokens:
        settings["draft_tokens"] = list(options.draft_tokens)
    if options.cold_code:
        settings["cold_code"] = True
    timer = Clock(QUICK_BUDGET_MS if options.quick else BUDGET_MS)
    rates = device_rates(timer)
    if options.cold_code:
        timer = Clock(timer.budget_ms, cold_code=True)
    device = torch.cuda.get_device_name()
    document = documents.conditions(kind, "benchmarks.kernel", device, VERSIONS_OF, settings) | {
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "empty_us": empty_us(timer),
        "rows": [],
        "left_out": [],
    }
    if options.batches:
        document["server"] = batches.replay(options).server
    return document, timer, rates


def peers_of(
    document: Document, heads: Iterable[Heads], names: Sequence[str], options: argparse.Namespace
) -> list[str]:
    """Those of ``names`` that can run; the document says why the others cannot."""
    settings = settings_of(options)
    drafted = max(options.draft_tokens or (settings.draft_tokens,))
    absent = usable(heads, names, e4m3=settings.e4m3, draft_tokens=drafted)
    document["absent"] = {name: reason for name, reason in absent.items() if reason}
    print("\n".join(about(document)), flush=True)
    write(document, options.json)
    return [name for name, reason in absent.items() if not reason]


def run(options: argparse.Namespace) -> Document:
    """Measure what is asked for; the document that ``--json`` writes as it grows. The budget of
    time holds what comes before the first row, too."""
    budget = Budget(time.monotonic() + options.budget_s)
    kind, todo = cases(options)
    document, timer, rates = begin(kind, options)
    left_out: list[str] = document["left_out"]
    if kind == "ragged":
        document["generator"] = GENERATOR
        if options.trace is None:
            print("family window is left out: it needs a Mooncake trace, --trace FILE")
    heads = list(dict.fromkeys(case.heads for case in todo))
    refused = {
        (each, count): why
        for each in heads
        for count in options.draft_tokens or ()
        if (why := reason_against(each, count))
    }
    left_out += [f"{each} x {count}: {why}" for (each, count), why in refused.items()]
    todo = [case for case in todo if (case.heads, case.draft_tokens) not in refused]
    most = options.pool_gb
    large = [case for case in todo if case.gigabytes > most]
    left_out += [
        f"{each.name}: K and V of {each.gigabytes:.1f} GB, over {most:g}" for each in large
    ]
    todo = [case for case in todo if case.gigabytes <= most]
    names = peers_of(document, heads, tuple(PEERS) if kind in TREES else FOREST_PEERS, options)
    for number, (case, make) in enumerate(inputs(todo, options.permuted), 1):
        if not budget.allows("row"):
            left_out.append(f"{case.name}: the time is up")
            continue
        began = time.monotonic()
        settings = replace(settings_of(options), draft_tokens=case.draft_tokens)
        torch.cuda.empty_cache()
        given = (case.requests, case.heads, options.permuted, names, timer, rates, settings)
        row = measure(*given, make())
        document["rows"].append(asdict(row))
        budget.took("row", time.monotonic() - began)
        ratio = decode_ratio(row)
        against = f"{ratio:.3f} of the better peer" if ratio else "no peer ran"
        print(f"{number}/{len(todo)} {case.name} {row.pat:.1f} us, {against}{budget}", flush=True)
        write(document, options.json)
    write(document, options.json)
    return document


def about(document: Document) -> list[str]:
    """Where and how a document was measured, as lines."""
    lines = documents.heading(document)
    if server := document.get("server"):
        versions = ", ".join(f"{name} {found}" for name, found in server["versions"].items())
        lines.append(f"batches of {server['date']}, {server['device']}, {versions}")
    lines.append(
        f"ceilings: {document['bytes_per_s'] / 1e12:.2f} TB/s read, "
        f"{document['flops_per_s'] / 1e12:.0f} TFLOP/s bf16; an empty captured kernel: "
        f"{document['empty_us']:.1f} us"
    )
    return lines + [f"without {name}: {why}" for name, why in document.get("absent", {}).items()]


def show(document: Document) -> int:
    """Print the rows of a document; exit status 1 if an output is wrong."""
    rows = [TreeRow(**row) for row in document["rows"]]
    left_out = [f"left out: {each}" for each in document.get("left_out", [])]
    print("\n".join([*table(rows), *left_out, *complaints(rows)]))
    return 0 if all(row.is_sound for row in rows) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    options = parser.parse_args(arguments)
    check(parser, options)
    try:
        if options.source:
            document = documents.read(options.source, KINDS)
            print("\n".join(about(document)))
        elif not torch.cuda.is_available():
            raise ValueError(
                f"no CUDA device that torch {torch.__version__} can use: run this on a machine "
                "with a GPU, or print the results of one with --from FILE"
            )
        else:
            if options.batches:
                for remark in batches.replay(options).remarks:
                    print(f"note: {remark}", file=sys.stderr)
            document = run(options)
    except (OSError, ValueError) as error:
        print(f"benchmarks.kernel: {error}", file=sys.stderr)
        return 2
    return show(document)


if __name__ == "__main__":
    sys.exit(main())
