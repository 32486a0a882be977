# SPDX-License-Identifier: Apache-2.0
"""PackInfer: how full the tiles of a plan are where short requests of many lengths meet, what that
takes, what uneven lengths cost, by batch size, and whether copying K and V together would pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import options_of
from sglang_pat.bench.kernel.report import geomean
from sglang_pat.bench.kernel.studies import consolidated
from sglang_pat.bench.kernel.studies.engine import BASE, Study, StudyRow
from sglang_pat.bench.kernel.studies.lengths import MIXES, even
from sglang_pat.bench.kernel.studies.ratios import by_family, listed, mean, means

BATCHES = (8, 16, 32, 64, 128, 256)
CAPACITIES = (256, 512, 2048)  # tokens of a group, beside the preset's 1,024


def batches(heads: Heads, quick: bool) -> list[tuple[str, Requests]]:
    """Each mix by batch size; then the even batches."""
    sizes = BATCHES[1::3] if quick else BATCHES
    found = [(mix, draw(size)) for mix, draw in MIXES.items() for size in sizes]
    return [*found, *((f"{mix} even", even(forest)) for mix, forest in found)]


def summary(rows: Sequence[StudyRow]) -> Iterator[str]:
    """By mix: times over the default's and utilisation; then what uneven lengths cost, and when a
    copy of K and V has paid."""
    families = by_family(rows)
    for family, members in families.items():
        filled = {
            name: geomean([row.utilisation[name] for row in members])
            for name in RULES
            if all(name in row.utilisation for row in members)
        }
        yield f"{family}: times {listed(means(members))}; utilisation {listed(filled)}"
    for mix in MIXES:
        of_size = {row.queries: row for row in families.get(f"{mix} even", [])}
        pairs = [
            (row, of_size[row.queries]) for row in families.get(mix, []) if row.queries in of_size
        ]
        names = dict.fromkeys(name for row, _ in pairs for name in row.times)
        costs = {
            name: geomean([row.times[name] / flat.times[name] for row, flat in pairs])
            for name in names
            if all(name in row.times and name in flat.times for row, flat in pairs)
        }
        if costs:
            yield f"{mix} over as many tokens in even lengths, unshared: {listed(costs)}"
    scattered, copied = mean(rows, "in place", BASE), mean(rows, "copied", BASE)
    if scattered is not None and copied is not None:
        yield (
            f"slots at random places take {scattered:.3f} of consecutive ones' time, and a step "
            f"that copies them together first {copied:.3f}: {_paid_after(scattered, copied)}"
        )


def _paid_after(scattered: float, copied: float) -> str:
    """``scattered``, ``copied``: times over that of consecutive slots. Each step but the first
    gains ``scattered - 1``; the first loses ``copied - scattered``."""
    if scattered <= 1.0:
        return "a copy never pays"
    return f"a copy pays after {1 + (copied - scattered) / (scattered - 1):.0f} steps"


RULES = {
    BASE: options_of("default", {})[0],
    "paged": options_of("paged", {})[0],
    "no split": options_of("default", {"split": "none"})[0],
    "packinfer": options_of("packinfer", {})[0],
    **{
        f"packinfer-{tokens}": options_of("packinfer", {"split_tokens": str(tokens)})[0]
        for tokens in CAPACITIES
    },
}

STUDY = Study(
    title="PackInfer: mixes of short requests by batch size, with the utilisation of each plan",
    heads=(Heads(32, 8), Heads(32, 4)),
    batches=batches,
    rules=RULES,
    summary=summary,
    peers=("fa3", "flashinfer"),
    scattered=consolidated.PEERS,
)
