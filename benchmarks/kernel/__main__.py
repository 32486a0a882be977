# SPDX-License-Identifier: Apache-2.0
"""CUDA attention of one decode step and layer, pat beside FA3, FlashInfer, a cascade by levels and
the floor: ``python -m benchmarks.kernel``. Needs a GPU, but not SGLang.

By default the 20 trees and 4 head configurations of the PAT paper (section 8.2). Timed is forward
and merge in a captured graph over a cold L2, the median of many; plan and snapshot stand apart.
With ``--draft-tokens`` it times verify steps of speculative decoding (``drafts``), with
``--ragged`` batches whose requests differ (``ragged``), with ``--batches`` those of a running
server (``batches``). A peer that cannot run is left out, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import torch

from benchmarks.common import document as documents
from benchmarks.common.document import Document, write
from benchmarks.common.forests import GENERATOR
from benchmarks.kernel import batches, drafts, ragged
from benchmarks.kernel.clock import Clock, device_rates, empty_us
from benchmarks.kernel.floor import Heads, Rates
from benchmarks.kernel.kv import TreeBatch
from benchmarks.kernel.options import cases, check, make_parser, settings_of
from benchmarks.kernel.peers import PEERS, usable
from benchmarks.kernel.report import TreeRow, complaints, table
from benchmarks.kernel.rows import measure

# Milliseconds of repeats for one time.
BUDGET_MS, QUICK_BUDGET_MS = 50.0, 15.0
VERSIONS_OF = ("sglang-pat", "torch", "sglang-kernel", "flashinfer-python")
KINDS = ("trees", "drafts", "ragged", "batches")  # of documents


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


def tree_rows(options: argparse.Namespace) -> Document:
    """Measure decode or verify steps of trees; the document that ``--json`` writes as it grows."""
    todo, counts = cases(options), options.draft_tokens or (1,)
    document, timer, rates = begin("drafts" if options.draft_tokens else "trees", options)
    heads = list(dict.fromkeys(each for each, _ in todo))
    left_out = {
        (each, count): why
        for each in heads
        for count in counts
        if (why := drafts.reason_against(each, count))
    }
    document["left_out"] = [f"{h} x {count}: {why}" for (h, count), why in left_out.items()]
    names = peers_of(document, heads, tuple(PEERS), options)
    for count in counts:
        settings = replace(settings_of(options), draft_tokens=count)
        for each, tree in todo:
            if (each, count) in left_out:
                continue
            row = measure(tree, each, options.permuted, names, timer, rates, settings)
            drafted = f" x {count}" if options.draft_tokens else ""
            best = row.best()
            print(f"{row.heads} {row.spec}{drafted} {row.pat:.1f} us, best peer {best}", flush=True)
            document["rows"].append(asdict(row))
            write(document, options.json)
    return document


def forest_rows(options: argparse.Namespace) -> Document:
    """Measure batches whose requests differ, drawn or of a server; the document that ``--json``
    writes as it grows. The budget of time holds what comes before the first row, too."""
    began = time.monotonic()
    if options.batches:
        kind, todo = "batches", batches.replay(options).cases
    else:
        kind = "ragged"
        if options.trace is None:
            print("family window is left out: it needs a Mooncake trace, --trace FILE")
        todo = ragged.cases(options.heads or ragged.HEADS, options.only, options.trace)
    document, timer, rates = begin(kind, options)
    if not options.batches:
        document["generator"] = GENERATOR
    heads = list(dict.fromkeys(case.heads for case in todo))
    names = peers_of(document, heads, ragged.PEERS, options)
    settings = settings_of(options)

    def make_row(case: ragged.RaggedCase, batch: TreeBatch) -> TreeRow:
        forest = case.forest
        return measure(forest, case.heads, options.permuted, names, timer, rates, settings, batch)

    ragged.run(
        todo,
        make_row,
        document,
        permuted=options.permuted,
        budget_s=options.budget_s - (time.monotonic() - began),
        pool_gb=options.pool_gb,
        path=options.json,
    )
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
            document = (forest_rows if options.ragged or options.batches else tree_rows)(options)
    except (OSError, ValueError) as error:
        print(f"benchmarks.kernel: {error}", file=sys.stderr)
        return 2
    return show(document)


if __name__ == "__main__":
    sys.exit(main())
