# SPDX-License-Identifier: Apache-2.0
"""What a study is, and how one is run: batches, rules for pat, peers, and what its rows say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from sglang_pat.bench.common import forests
from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.common.document import Document, write
from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.clock import Clock
from sglang_pat.bench.kernel.floor import Heads, Rates, floor_us
from sglang_pat.bench.kernel.layer import PatOptions
from sglang_pat.bench.kernel.peers import PEERS, Maker
from sglang_pat.bench.kernel.report import too_far
from sglang_pat.bench.kernel.studies import lengths
from sglang_pat.bench.kernel.variants import Peer, Variant, measure
from sglang_pat.utilisation import utilisation

BASE = "default"  # the rule that all others are compared with; every study has it
PERMUTED = "/perm"  # ends the names of what has its slots at random places


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One batch and head configuration. By name of a rule or peer, unless said."""

    heads: str
    family: str
    spec: str
    queries: int
    tokens: int  # that all queries attend to
    unique_tokens: int  # the same, shared ones counted once
    floor_us: float
    noise: float  # at worst, between the medians of two turns, as a fraction
    times: dict[str, float]  # medians in microseconds
    items: dict[str, int]  # of rules
    partials: dict[str, int]
    read: dict[str, float]  # K/V tokens that the plan reads over unique_tokens
    utilisation: dict[str, float]  # of rules
    errors: dict[str, float]  # against fp32, relative norm over a few queries
    degraded: dict[str, str]  # rules whose plans ran out of room, and why
    failed: dict[str, str]  # without a time, and why
    rules: list[str]  # the names among these that are pat's
    outgrown: list[str] = field(default_factory=list)  # rules whose old plans no longer hold

    @property
    def wrong(self) -> dict[str, float]:
        """Outputs that are too far off."""
        return too_far(self.errors)

    @property
    def over_base(self) -> dict[str, float]:
        """Times over that of BASE; none if that has none."""
        base = self.times.get(BASE)
        return {name: time / base for name, time in self.times.items()} if base else {}

    @property
    def is_sound(self) -> bool:
        """Whether every output is right and every rule ran."""
        return not self.wrong and not any(name in self.failed for name in self.rules)


@dataclass(frozen=True)
class Case:
    heads: Heads
    family: str
    batch: Requests

    @property
    def name(self) -> str:
        """By which ``--only`` picks."""
        return f"{self.family}/{self.batch}-{self.heads}"


@dataclass(frozen=True)
class Study:
    """``batches``: of a head configuration, fewer if told so, as (family, batch), the most telling
    first. ``summary``: what rows of one head configuration say. ``peers``: names of ``PEERS``.
    ``contiguous``: peers that take K and V without slots. ``scattered``: peers that take slots at
    random places alone. ``layouts``: permuted or not, of all but those. ``ages``: of older plans of
    BASE that stand beside it, in decode steps."""

    title: str
    heads: tuple[Heads, ...]
    batches: Callable[[Heads, bool], Sequence[tuple[str, Requests]]]
    rules: Mapping[str, PatOptions]
    summary: Callable[[Sequence[StudyRow]], Iterable[str]]
    peers: tuple[str, ...] = ()
    contiguous: Mapping[str, Maker] = field(default_factory=dict)
    scattered: Mapping[str, Maker] = field(default_factory=dict)
    layouts: tuple[bool, ...] = (False,)
    ages: tuple[int, ...] = ()

    def cases(self, heads: Sequence[Heads], quick: bool, only: Sequence[str]) -> list[Case]:
        """What to run, those whose names hold what a pattern in ``only`` matches; all without.

        Raises ValueError if no name matches.
        """
        chosen = heads or (self.heads[:1] if quick else self.heads)
        every = [
            Case(each, family, batch)
            for each in chosen
            for family, batch in self.batches(each, quick)
        ]
        found = [
            case
            for case in every
            if not only or any(fnmatchcase(case.name, f"*{one}*") for one in only)
        ]
        if not found:
            raise ValueError(
                f"--only {' '.join(only)} matches no row; rows are FAMILY/BATCH-HEADS, as "
                f"{every[0].name}"
            )
        return found

    def variants(self, batch: Requests) -> list[Variant]:
        found = [
            Variant(_named(name, permuted), batch, settings, permuted)
            for permuted in self.layouts
            for name, settings in self.rules.items()
        ]
        aged = self.rules[BASE]
        return found + [Variant(aged_name(age), batch, aged, age=age) for age in self.ages]

    def usable_peers(self, absent: Mapping[str, str]) -> list[Peer]:
        """The peers but those that are ``absent``."""
        found = [
            Peer(_named(name, permuted), PEERS[name], permuted)
            for permuted in self.layouts
            for name in self.peers
            if name not in absent
        ]
        found += [
            Peer(name, make)
            for name, make in self.contiguous.items()
            if name.removesuffix("-dense") not in absent
        ]
        return found + [Peer(name, make, permuted=True) for name, make in self.scattered.items()]


def aged_name(age: int) -> str:
    return f"{age} old"


def _named(name: str, permuted: bool) -> str:
    return name + PERMUTED * permuted


def row_of(
    study: Study, case: Case, absent: Mapping[str, str], timer: Clock, rates: Rates
) -> StudyRow:
    """Capture, check and time all of a study on one batch."""
    batch, heads = case.batch, case.heads
    variants, peers = study.variants(batch), study.usable_peers(absent)
    timed = measure(batch, heads, variants, timer, peers)
    plans, total, unique = timed.plans, sum(batch.seq_lens), batch.unique_tokens
    lengths = np.asarray(batch.seq_lens, dtype=np.int64)
    return StudyRow(
        heads=str(heads),
        family=case.family,
        spec=str(batch),
        queries=batch.num_queries,
        tokens=total,
        unique_tokens=unique,
        floor_us=floor_us(batch, heads, rates),
        noise=timed.noise,
        times=timed.times,
        items={name: plan.num_items for name, plan in plans.items()},
        partials={name: plan.num_partials for name, plan in plans.items()},
        read={name: plan.kv_tokens_read(total) / unique for name, plan in plans.items()},
        utilisation={name: utilisation(plan, batch.seq_lens) for name, plan in plans.items()},
        errors=timed.errors,
        degraded={name: plan.degraded for name, plan in plans.items() if plan.degraded},
        failed=timed.failed,
        rules=[variant.name for variant in variants],
        outgrown=[
            name for name, plan in plans.items() if not plan.fits(lengths.ctypes.data, len(lengths))
        ],
    )


def run(
    study: Study,
    todo: Sequence[Case],
    document: Document,
    timer: Clock,
    rates: Rates,
    *,
    budget_s: float,
    path: Path | None,
) -> None:
    """Add a row to ``document`` for every case, or a line to its ``left_out``; written to ``path``
    as it grows."""
    document |= {"generators": [forests.GENERATOR, lengths.GENERATOR], "left_out": []}
    budget = Budget(time.monotonic() + budget_s)
    for place, case in enumerate(todo, 1):
        if not budget.allows("row"):
            document["left_out"].append(f"{case.name}: the time is up")
            continue
        began = time.monotonic()
        row = row_of(study, case, document["absent"], timer, rates)
        document["rows"].append(asdict(row))
        write(document, path)
        took = time.monotonic() - began
        budget.took("row", took)
        found = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
        print(
            f"{place}/{len(todo)} {case.name}: {found} us; {took:.1f} s{budget}",
            flush=True,
        )
    write(document, path)
