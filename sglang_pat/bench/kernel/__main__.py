# SPDX-License-Identifier: Apache-2.0
"""CUDA attention of one decode step and layer, pat beside FA3, FlashInfer, a cascade by levels and
the floor: ``python -m sglang_pat.bench.kernel``. Needs a GPU, but not SGLang.

By default the 20 trees and 4 head configurations of the PAT paper (section 8.2). Timed is forward
and merge in a captured graph over a cold L2, the median of many; plan and snapshot stand apart.
With ``--draft-tokens`` it times verify steps of speculative decoding (``drafts``), with
``--batches`` the batches of a running server (``batches``), with ``--study`` other papers' rules on
our kernels (``studies``). A peer that cannot run is left out, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from sglang_pat.bench.common import document as documents
from sglang_pat.bench.common.document import Document, write
from sglang_pat.bench.common.figures import require
from sglang_pat.bench.common.forests import GENERATOR
from sglang_pat.bench.kernel import ablation, batches, drafts, ragged, tiles, timeline, traffic
from sglang_pat.bench.kernel.cases import cases
from sglang_pat.bench.kernel.clock import Clock, device_rates, empty_us
from sglang_pat.bench.kernel.floor import Heads, Rates
from sglang_pat.bench.kernel.kv import TreeBatch
from sglang_pat.bench.kernel.options import check, make_parser, remarks_of, settings_of
from sglang_pat.bench.kernel.peers import usable
from sglang_pat.bench.kernel.report import TreeRow
from sglang_pat.bench.kernel.rows import measure
from sglang_pat.bench.kernel.show import KINDS, about, show
from sglang_pat.bench.kernel.studies import engine
from sglang_pat.bench.kernel.studies.catalogue import STUDIES, cases_of

# Milliseconds of repeats for one time.
BUDGET_MS, QUICK_BUDGET_MS = 50.0, 15.0
VERSIONS_OF = ("sglang-pat", "torch", "sglang-kernel", "flashinfer-python")


def conditions(kind: str, options: argparse.Namespace) -> Document:
    """A document of ``kind``, without rows: what measured it."""
    device = torch.cuda.get_device_name()
    settings = asdict(settings_of(options))
    if options.draft_tokens:
        settings["draft_tokens"] = list(options.draft_tokens)
    if options.cold_code:
        settings["cold_code"] = True
    server = {"server": batches.replay(options).server} if options.batches else {}
    made_by = "sglang_pat.bench.kernel"
    return documents.conditions(kind, made_by, device, VERSIONS_OF, settings) | server


def timelines(options: argparse.Namespace) -> Document:
    """Record everything asked for; the document that ``--json`` writes."""
    timer = Clock(QUICK_BUDGET_MS)
    settings = settings_of(options)
    lines = [
        timeline.record(tree, heads, permuted, settings, timer)
        for heads, permuted, tree in cases(options)
    ]
    document = conditions("timelines", options) | {"rows": [line.to_json() for line in lines]}
    write(document, options.json, indent=None)  # many numbers
    print("\n".join(about(document)))
    return document


def traffics(options: argparse.Namespace) -> Document:
    """Have ncu count everything asked for; the document that ``--json`` writes."""
    found = traffic.measure(cases(options), settings_of(options))
    document = conditions("traffic", options) | {"rows": [asdict(row) for row in found]}
    write(document, options.json)
    print("\n".join(about(document)))
    return document


def ceilings(kind: str, options: argparse.Namespace) -> tuple[Document, Clock, Rates]:
    """A document of ``kind`` without rows, with what the device reaches; a clock; and the rates."""
    timer = Clock(QUICK_BUDGET_MS if options.quick else BUDGET_MS)
    rates = device_rates(timer)
    if options.cold_code:
        timer = Clock(timer.budget_ms, cold_code=True)
    document: Document = {
        **conditions(kind, options),
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "empty_us": empty_us(timer),
        "rows": [],
    }
    return document, timer, rates


def bandwidths(options: argparse.Namespace) -> Document:
    """Measure every row tile and length; the document that ``--json`` writes as it grows."""
    properties: Any = torch.cuda.get_device_properties()
    lengths = tiles.QUICK_LENGTHS if options.quick else tiles.LENGTHS
    heads = options.heads or [Heads(32, 8)]
    settings = settings_of(options)
    document, timer, rates = ceilings("tiles", options)
    print("\n".join(about(document)), flush=True)
    for case in tiles.cases(heads, lengths, properties.multi_processor_count):
        row = tiles.measure(case, timer, rates, settings)
        print(f"{row.heads} {row.row_tile} rows {case.tree} {row.gb_per_s:.0f} GB/s", flush=True)
        document["rows"].append(asdict(row))
        write(document, options.json)
    return document


def verify_rows(options: argparse.Namespace) -> Document:
    """Measure the verify steps asked for; the document that ``--json`` writes as it grows."""
    todo, counts = cases(options), options.draft_tokens
    document, timer, rates = ceilings("drafts", options)
    settings = settings_of(options)
    heads = list(dict.fromkeys(each for each, _, _ in todo))
    left_out = {
        (each, count): why
        for each in heads
        for count in counts
        if (why := drafts.reason_against(each, count))
    }
    most = max(counts)
    absent = usable(heads, e4m3=settings.e4m3, draft_tokens=most)
    document["absent"] = {name: reason for name, reason in absent.items() if reason}
    document["left_out"] = [f"{h} x {count}: {why}" for (h, count), why in left_out.items()]
    print("\n".join(about(document)), flush=True)
    names = [name for name, reason in absent.items() if not reason]
    write(document, options.json)
    for count in counts:
        chosen = replace(settings, draft_tokens=count)
        for each, permuted, tree in todo:
            if (each, count) in left_out:
                continue
            row = measure(tree, each, permuted, names, timer, rates, chosen)
            said = f"{row.heads} {row.spec} x {count} {row.pat:.1f} us, best peer {row.best()}"
            print(said, flush=True)
            document["rows"].append(asdict(row))
            write(document, options.json)
    return document


def run(options: argparse.Namespace) -> Document:
    """Measure everything asked for; the document that ``--json`` writes, written as it grows."""
    todo = cases(options)
    document, timer, rates = ceilings("sweep" if options.sweep else "trees", options)
    absent = usable([heads for heads, _, _ in todo], e4m3=settings_of(options).e4m3)
    document["absent"] = {name: reason for name, reason in absent.items() if reason}
    print("\n".join(about(document)), flush=True)
    names = [name for name, reason in absent.items() if not reason]
    settings = settings_of(options)
    write(document, options.json)
    for heads, permuted, tree in todo:
        row = measure(tree, heads, permuted, names, timer, rates, settings)
        print(f"{row.heads} {row.spec} {row.pat:.1f} us, best peer {row.best()}", flush=True)
        document["rows"].append(asdict(row))
        write(document, options.json)
    return document


def ragged_rows(options: argparse.Namespace) -> Document:
    """Measure batches whose requests differ; the document that ``--json`` writes as it grows. The
    budget of time holds what comes before the first row, too."""
    began = time.monotonic()
    if options.trace is None:
        print("family window is left out: it needs a Mooncake trace, --trace FILE")
    heads = options.heads or ragged.HEADS
    try:
        todo = ragged.cases(heads, options.only, options.trace)
    except ValueError as error:
        raise SystemExit(f"sglang_pat.bench.kernel: {error}") from None
    document, timer, rates = ceilings("ragged", options)
    document["generator"] = GENERATOR
    _forests(todo, document, timer, rates, options, began)
    return document


def replays(options: argparse.Namespace) -> Document:
    """Measure batches of a running server; the document that ``--json`` writes as it grows."""
    began = time.monotonic()
    todo = batches.replay(options).cases
    document, timer, rates = ceilings("batches", options)
    _forests(todo, document, timer, rates, options, began)
    return document


def _forests(
    todo: Sequence[ragged.RaggedCase],
    document: Document,
    timer: Clock,
    rates: Rates,
    options: argparse.Namespace,
    began: float,
) -> None:
    """Add the rows of ``todo`` to the document. ``began``: when the run did."""
    settings = settings_of(options)
    heads = list(dict.fromkeys(case.heads for case in todo))
    drafted = settings.draft_tokens
    absent = usable(heads, ragged.PEERS, e4m3=settings.e4m3, draft_tokens=drafted)
    document["absent"] = {name: reason for name, reason in absent.items() if reason}
    print("\n".join(about(document)), flush=True)
    names = [name for name, reason in absent.items() if not reason]

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


def ablations(options: argparse.Namespace) -> Document:
    """Time every variant on every tree; the document that ``--json`` writes as it grows."""
    document, timer, rates = ceilings("ablation", options)
    print("\n".join(about(document)), flush=True)
    heads, trees = options.heads or ablation.HEADS, options.trees or ablation.TREES
    ablation.run(heads, trees, options.permuted, document, timer, rates, options.json)
    return document


def studied(options: argparse.Namespace) -> Document:
    """Measure a study; the document that ``--json`` writes as it grows. The budget of time holds
    what comes before the first row, too."""
    began = time.monotonic()
    study, todo = STUDIES[options.study], cases_of(options)
    document, timer, rates = ceilings("study", options)
    absent = usable([case.heads for case in todo], study.peers)
    document["study"] = options.study
    document["absent"] = {name: reason for name, reason in absent.items() if reason}
    print("\n".join(about(document)), flush=True)
    budget_s = options.budget_s - (time.monotonic() - began)
    engine.run(study, todo, document, timer, rates, budget_s=budget_s, path=options.json)
    return document


def maker(options: argparse.Namespace) -> Callable[[argparse.Namespace], Document]:
    """What measures what is asked for."""
    if options.traffic:
        return traffics
    if options.ragged:
        return ragged_rows
    if options.ablation:
        return ablations
    if options.study:
        return studied
    if options.batches:
        return replays
    if options.draft_tokens:
        return verify_rows
    return bandwidths if options.tiles else timelines if options.timeline else run


def parser() -> argparse.ArgumentParser:
    return make_parser(__doc__)


def main(arguments: list[str] | None = None) -> int:
    found = parser()
    options = found.parse_args(arguments)
    check(found, options)
    if options.plot:
        require()
    if options.source:
        try:
            document = documents.read(options.source, KINDS)
        except (OSError, ValueError) as error:
            print(f"sglang_pat.bench.kernel: {error}", file=sys.stderr)
            return 2
        print("\n".join(about(document)))
    elif not torch.cuda.is_available():
        print(
            f"no CUDA device that torch {torch.__version__} can use: run this on a machine with a "
            "GPU, or print the results of one with --from FILE",
            file=sys.stderr,
        )
        return 2
    else:
        for remark in remarks_of(options):
            print(f"note: {remark}", file=sys.stderr)
        document = maker(options)(options)
    return show(document, options.plot)


if __name__ == "__main__":
    sys.exit(main())
