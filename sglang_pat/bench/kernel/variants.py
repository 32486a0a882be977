# SPDX-License-Identifier: Apache-2.0
"""Several rules, and maybe peers, on one batch: each captured, checked and timed beside the
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.clock import Captured, Clock, capture
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import Expected, Layer, PatOptions, device_batch, expected_of
from sglang_pat.bench.kernel.peers import Maker
from sglang_pat.planner import Plan


@dataclass(frozen=True)
class Variant:
    """``batch``: the tree, or the same requests with a radix node for each pack. ``permuted``:
    slots at random places, else those of a node consecutive. ``age``: decode steps since the plan
    was made, so tokens that every sequence has grown since."""

    name: str
    batch: Requests
    settings: PatOptions
    permuted: bool = False
    age: int = 0


@dataclass(frozen=True)
class Peer:
    """Another kernel on the same batch; ``permuted`` as of ``Variant``."""

    name: str
    make: Maker
    permuted: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """What was found about one batch, by the name of a variant or peer."""

    times: dict[str, float]  # medians in microseconds
    noise: float  # at worst, between the medians of two turns, as a fraction
    errors: dict[str, float]  # against fp32 attention, relative norm over a few queries
    plans: dict[str, Plan]  # of variants
    failed: dict[str, str]  # those without a time, and why


def measure(
    tree: Requests,
    heads: Heads,
    variants: Sequence[Variant],
    timer: Clock,
    peers: Sequence[Peer] = (),
) -> Timed:
    """Capture, check and time every variant and peer on one tree or forest.

    A variant whose plan does not fit the GPU or the kernels' limits, and a peer that raises, is
    named in ``failed``; the others go on. What else goes wrong with a variant is raised.
    """
    torch.cuda.empty_cache()
    scale = heads.dim**-0.5
    everyone: list[Variant | Peer] = [*variants, *peers]
    layouts = dict.fromkeys(each.permuted for each in everyone)
    batches = {permuted: device_batch(tree, heads, permuted) for permuted in layouts}
    graphs: dict[str, Captured] = {}
    plans: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    for variant in variants:
        try:
            batch = batches[variant.permuted]
            layer = Layer(batch, variant.batch, heads, variant.settings, scale, variant.age)
            graphs[variant.name] = capture(layer.attend)
            plans[variant.name] = layer.plan
        except (ValueError, torch.cuda.OutOfMemoryError) as error:
            failed[variant.name] = _first_line(error)
    for peer in peers:
        try:
            graphs[peer.name] = capture(peer.make(batches[peer.permuted], tree, scale))
        except Exception as error:  # whatever it is, the run goes on without this peer
            failed[peer.name] = _first_line(error)
    expected = {layout: expected_of(batch, scale) for layout, batch in batches.items()}
    errors = _errors(graphs, {each.name: each.permuted for each in everyone}, expected)
    runs: dict[str, Callable[[], Any]] = {name: graph.replay for name, graph in graphs.items()}
    times, noise = timer.compare(runs) if runs else ({}, 0.0)
    return Timed(times, noise, errors, plans, failed)


def _errors(
    graphs: Mapping[str, Captured],
    permuted: Mapping[str, bool],
    expected: Mapping[bool, Expected],
) -> dict[str, float]:
    """Of each graph's output, written anew by a replay."""
    errors = {}
    for name, graph in graphs.items():
        assert graph.out is not None
        graph.out.fill_(float("nan"))
        graph.replay()
        errors[name] = expected[permuted[name]].error(graph.out)
    return errors


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
