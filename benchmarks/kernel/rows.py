# SPDX-License-Identifier: Apache-2.0
"""One row of the kernel benchmark: pat and the peers captured, checked and timed on one batch."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common.document import Document
from benchmarks.common.forests import Tree
from benchmarks.kernel.cases import Case
from benchmarks.kernel.clock import Captured, Clock, capture
from benchmarks.kernel.floor import Rates, floor_us
from benchmarks.kernel.kv import quantised, relative
from benchmarks.kernel.layer import Layer, PatOptions, device_batch, error_of
from benchmarks.kernel.peers import PEERS
from benchmarks.kernel.report import TreeRow


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
    outs.pop("bf16", None)  # of other K and V
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
        plan_us=layer.plan_us(),
        kv_read_over_unique=made.kv_tokens_read(sum(tree.seq_lens)) / tree.unique_tokens,
        degraded=made.degraded,
        error=error_of(ours, batch, scale),
        differences={name: relative(out, ours) for name, out in outs.items()},
        kv_dtype=settings.kv_dtype,
        errors=errors,
        bf16=times.get("bf16"),
        draft_tokens=settings.draft_tokens,
    )
