# SPDX-License-Identifier: Apache-2.0
"""What each idea is worth (figure 11 of the paper): ``python -m sglang_pat.bench.kernel
--ablation``, by default on the paper's 18 shared trees at 32/8 heads.

Variants, each timed on the same batch: forward and merge in a graph over a cold L2.

- ``default``: what a server does; ``no branches``: the same with packs alone.
- ``paper+cost``: the paper's packs, our splits. ``naive+cost``: every node a pack, our splits.
- ``paper+mean``: the paper's packs and splits, our one launch.
- ``pat``: the preset, with streams as well; ``pat-naive``: with every node a pack.
- ``pat-serial``: ``pat`` with its kernels one after the other.
- ``pat-fixed``: ``pat`` with one row tile, 64, in the plan. The kernel is ours: an item of up to 8
  packed rows still runs on one warp, where the paper's baseline computes 64 rows for it.
- ``pat-compute``: ``pat`` with the packs of FastTree's cost model (policy ``padding``).
- ``oracle+cost``: the packs that move the fewest bytes (``packings.least_bytes``), our splits.

The second table has the bytes that each rule's packs move for one KV head, as multiples of the
least there is. It counts K/V once for each row tile of 64 rows and each partial result as written
and read, and nothing else: see ``packings.least_bytes``. ``greedy`` is the default rule told that
an item has no overhead, so that bytes are all it weighs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_pat import Target
from sglang_pat.bench.common.document import Document, write
from sglang_pat.bench.common.figures import COLOURS, head, require
from sglang_pat.bench.common.trees import PAPER_TREES, Requests, Tree
from sglang_pat.bench.kernel.clock import Clock
from sglang_pat.bench.kernel.floor import Heads, Rates, floor_us
from sglang_pat.bench.kernel.layer import PatOptions, options_of
from sglang_pat.bench.kernel.packings import Packing, least_bytes, plan_bytes
from sglang_pat.bench.kernel.report import geomean, groups, too_far, wrong_outputs
from sglang_pat.bench.kernel.variants import Variant
from sglang_pat.bench.kernel.variants import measure as measure_all

TREES = tuple(tree for tree in PAPER_TREES if tree.shares)
HEADS = (Heads(32, 8),)
FIXED_TILE = 64
COUNTED_TILES = (16, 64)  # by which the packer goes, whatever wide items there are
NO_OVERHEAD_S = 1e-12  # a target's must be positive


class Fixed(PatOptions):
    """Options with a single row tile."""

    def target(self, tree: Requests, heads: Heads) -> Target:
        return replace(PatOptions.target(self, tree, heads), row_tiles=(FIXED_TILE,))


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One tree. Times are medians in microseconds, bytes those of one KV head."""

    heads: str
    spec: str
    permuted: bool
    floor_us: float
    noise: float  # at worst, between the medians of two turns of a variant, as a fraction
    times: dict[str, float]  # by variant
    items: dict[str, int]
    partials: dict[str, int]
    errors: dict[str, float]  # against fp32, relative norm over a few queries
    degraded: dict[str, str]  # variants that ran out of room, and why
    least_bytes: float
    bytes: dict[str, float]  # by rule

    @property
    def wrong(self) -> dict[str, float]:
        """Outputs that are too far off, by variant."""
        return too_far(self.errors)


def variants(tree: Tree, heads: Heads, permuted: bool = False) -> list[Variant]:
    """All of them, in the order of the docstring above."""

    def of(name: str, preset: str, batch: Requests = tree, **given: str) -> Variant:
        return Variant(name, batch, options_of(preset, given)[0], permuted)

    pat = options_of("pat", {})[0]
    fields = {name: getattr(pat, name) for name in PatOptions.__slots__}
    oracle = _oracle(tree, heads)[0].forest(f"oracle {tree}", tree.seq_lens)
    return [
        of("default", "default"),
        of("no branches", "default", branching="never"),
        of("paper+cost", "default", policy="paper"),
        of("naive+cost", "default", policy="naive"),
        of("paper+mean", "default", policy="paper", split="mean"),
        Variant("pat", tree, pat, permuted),
        of("pat-naive", "naive"),
        of("pat-serial", "pat", launch="serial"),
        Variant("pat-fixed", tree, Fixed(**fields), permuted),
        of("pat-compute", "pat", policy="padding"),
        of("oracle+cost", "default", oracle, policy="naive"),
    ]


def _counted(tree: Requests, heads: Heads, **rules: Any) -> Target:
    target = PatOptions().target(tree, heads)
    return replace(target, row_tiles=COUNTED_TILES, branching="never", **rules)


def _oracle(tree: Tree, heads: Heads) -> tuple[Packing, float]:
    return least_bytes(tree, _counted(tree, heads))


def counted_bytes(tree: Tree, heads: Heads) -> tuple[float, dict[str, float]]:
    """The least bytes, and those of each rule's packs."""
    _, least = _oracle(tree, heads)
    return least, {
        "greedy": plan_bytes(tree, _counted(tree, heads, item_overhead_s=NO_OVERHEAD_S)),
        "default": plan_bytes(tree, _counted(tree, heads)),
        "paper": plan_bytes(tree, _counted(tree, heads, policy="paper")),
        "compute": plan_bytes(tree, _counted(tree, heads, policy="padding")),
        "naive": plan_bytes(tree, _counted(tree, heads, policy="naive")),
    }


def measure(tree: Tree, heads: Heads, permuted: bool, timer: Clock, rates: Rates) -> AblationRow:
    """Capture, check and time every variant on one tree."""
    timed = measure_all(tree, heads, variants(tree, heads, permuted), timer)
    if timed.failed:
        named = "; ".join(f"{name}: {why}" for name, why in timed.failed.items())
        raise RuntimeError(f"{heads} {tree}: {named}; leave the tree out by --trees")
    plans = timed.plans
    least, counted = counted_bytes(tree, heads)
    return AblationRow(
        heads=str(heads),
        spec=str(tree),
        permuted=permuted,
        floor_us=floor_us(tree, heads, rates),
        noise=timed.noise,
        times=timed.times,
        items={name: plan.num_items for name, plan in plans.items()},
        partials={name: plan.num_partials for name, plan in plans.items()},
        errors=timed.errors,
        degraded={name: plan.degraded for name, plan in plans.items() if plan.degraded},
        least_bytes=least,
        bytes=counted,
    )


def run(
    heads: Sequence[Heads],
    trees: Sequence[Tree],
    permuted: bool,
    document: Document,
    timer: Clock,
    rates: Rates,
    path: Path | None,
) -> None:
    """Add the rows of all trees to ``document``, written to ``path`` as it grows."""
    for each in heads:
        for tree in trees:
            row = measure(tree, each, permuted, timer, rates)
            found = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
            print(f"{row.heads} {row.spec}: {found} us", flush=True)
            document["rows"].append(asdict(row))
            write(document, path)


def table(rows: Iterable[AblationRow]) -> list[str]:
    """Times as multiples of the floor, then bytes as multiples of the least, with geometric means
    at the end of each; blocks by heads and layout."""
    lines = []
    for title, members in groups(rows):
        lines += ["", f"{title}: time / floor"]
        lines += _columns([(row.spec, _times(row)) for row in members])
        lines += ["", f"{title}: bytes / least"]
        lines += _columns([(row.spec, _bytes(row)) for row in members])
    return lines


def _columns(rows: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    names = list(rows[0][1])
    means = {name: geomean([found[name] for _, found in rows]) for name in names}
    lines = [f"{'tree':44}" + "".join(f"{name:>13}" for name in names)]
    for label, found in [*rows, ("geometric mean", means)]:
        lines.append(f"{label:44}" + "".join(f"{found[name]:13.3f}" for name in names))
    return lines


def draw(rows: Sequence[AblationRow], path: Path) -> None:
    """Write a picture: for each of heads and layout a panel with a bar a variant, the geometric
    mean of its times over the floor, and beside it the same of each rule's bytes over the least."""
    panels = groups(rows)
    figure = require().Figure(figsize=(12, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), (title, members) in zip(axes, panels, strict=True):
        for axis, what, found in (
            (left, f"{title}: time / floor", [_times(row) for row in members]),
            (right, "bytes / least", [_bytes(row) for row in members]),
        ):
            means = {name: geomean([each[name] for each in found]) for name in found[0]}
            bars = axis.barh(list(means), list(means.values()), color=COLOURS["fa3"])
            bars[0].set_color(COLOURS["pat"])
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            axis.invert_yaxis()
            axis.axvline(1, color="black", linewidth=0.8)
            head(axis, what)
    figure.savefig(path, dpi=150)


def _times(row: AblationRow) -> dict[str, float]:
    return {name: time / row.floor_us for name, time in row.times.items()}


def _bytes(row: AblationRow) -> dict[str, float]:
    return {name: moved / row.least_bytes for name, moved in row.bytes.items()}


def complaints(rows: Iterable[AblationRow]) -> list[str]:
    """Outputs that are wrong and plans that ran out of room, a line each."""
    lines = []
    for row in rows:
        lines += wrong_outputs(row)
        lines += [f"{row.heads} {row.spec}: {name}: {why}" for name, why in row.degraded.items()]
    return lines
