# SPDX-License-Identifier: Apache-2.0
"""What is measured behind a router, run by run, and its table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pat.bench.serving.client import AnswerTimes
from sglang_pat.bench.serving.rows import COUNTED_HEADS, Counted, Spread, counted_cells, unique
from sglang_pat.bench.serving.timing import latencies
from sglang_pat.bench.serving.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRow(Counted):
    """One run of a workload through a router. pat's counters are sums over the servers."""

    backend: str
    policy: str
    workload: str
    groups: int
    per_group: int
    prefix: int
    private: int
    run: int
    itl_p50_ms: float  # while all requests decode, over all servers
    itl_p99_ms: float
    tpot_ms: float  # mean over requests
    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float
    cached: float  # fraction of the prompt tokens that a cache had
    spread: list[list[int]]  # for each system prompt, how many of its requests each server got

    @property
    def together(self) -> float:
        """Fraction of a system prompt's requests on the server that got most of them; the mean."""
        return statistics.mean(max(counts) / sum(counts) for counts in self.spread)

    @property
    def by_server(self) -> list[int]:
        """How many requests each server got."""
        return [sum(counts) for counts in zip(*self.spread, strict=True)]

    @property
    def saved(self) -> float | None:
        """Fraction of the K/V reads that packing saved; None for another backend."""
        if self.kv_tokens_read is None or not self.kv_tokens_unpacked:
            return None
        return 1 - self.kv_tokens_read / self.kv_tokens_unpacked


def row_of(
    answers: Sequence[AnswerTimes],
    prompt_of: Sequence[int],
    *,
    backend: str,
    policy: str,
    workload: Workload,
    run: int,
    prompt_tokens: int,
    servers: Sequence[str],
) -> RouterRow:
    """A row from answers; ``prompt_of``: the number of each one's system prompt. ``servers``: their
    names in the answers.

    Raises:
        TooShort: as ``latencies`` does.
    """
    found = latencies(answers, together=True)
    got = Counter((i, answer.server) for i, answer in zip(prompt_of, answers, strict=True))
    return RouterRow(
        backend=backend,
        policy=policy,
        workload=str(workload),
        groups=workload.groups,
        per_group=workload.per_group,
        prefix=workload.prefix,
        private=workload.private,
        run=run,
        itl_p50_ms=found.itl_p50_ms,
        itl_p99_ms=found.itl_p99_ms,
        tpot_ms=found.tpot_ms,
        ttft_p50_ms=found.ttft_ms,
        ttft_p99_ms=found.ttft_p99_ms,
        tokens_per_s=found.tokens_per_s,
        cached=sum(answer.cached for answer in answers) / prompt_tokens,
        spread=[[got[i, name] for name in servers] for i in range(workload.groups)],
    )


def router_table(rows: Sequence[RouterRow]) -> list[str]:
    """Medians and spreads by workload, policy and backend; then each policy's inter-token time, pat
    over the best of the others; then each backend's, the first policy over the others."""
    lines = [
        f"{'workload':14} {'policy':12} {'backend':12} runs  {'ITL p50 ms':>22} {'p99':>7} "
        f"{'TTFT p50':>9} {'p99':>8} {'tokens/s':>9} {'cached':>6} {'together':>8} "
        f"{'by server':>10} {'saved':>6} {COUNTED_HEADS}"
    ]
    for workload in unique(row.workload for row in rows):
        cells = {
            (policy, backend): found
            for policy in unique(row.policy for row in rows)
            for backend in unique(row.backend for row in rows)
            if (
                found := [
                    row
                    for row in rows
                    if (row.workload, row.policy, row.backend) == (workload, policy, backend)
                ]
            )
        }
        lines += [_line(found) for found in cells.values()]
        itl = {
            key: statistics.median(row.itl_p50_ms for row in found) for key, found in cells.items()
        }
        lines += [f"{workload}: inter-token time, {ratio}" for ratio in _ratios(itl)]
    return [
        *lines,
        "together: requests of a system prompt on the server that got most of them. saved: of the "
        "K/V reads, by packing.",
    ]


def _ratios(itl: dict[tuple[str, str], float]) -> list[str]:
    """From medians by policy and backend."""
    lines = []
    policies, backends = (unique(key[i] for key in itl) for i in (0, 1))
    for policy in policies:
        others = {b: itl[policy, b] for b in backends if b != "pat" and (policy, b) in itl}
        if (policy, "pat") in itl and others:
            best = min(others, key=lambda backend: others[backend])
            lines.append(f"{policy}, pat / {best}: {itl[policy, 'pat'] / others[best]:.3f}")
    for backend in backends:
        for other in policies[1:]:
            if (policies[0], backend) in itl and (other, backend) in itl:
                ratio = itl[policies[0], backend] / itl[other, backend]
                lines.append(f"{backend}, {policies[0]} / {other}: {ratio:.3f}")
    return lines


def _line(rows: Sequence[RouterRow]) -> str:
    def median(name: str) -> float:
        return float(statistics.median(getattr(row, name) for row in rows))

    first = rows[0]
    saved = Spread.of(row.saved for row in rows)
    by_server = "/".join(map(str, first.by_server))
    if any(row.by_server != first.by_server for row in rows):
        by_server += ".."
    return (
        f"{first.workload:14} {first.policy:12} {first.backend:12} {len(rows):4}  "
        f"{Spread.of(row.itl_p50_ms for row in rows)!s:>22} {median('itl_p99_ms'):7.2f} "
        f"{median('ttft_p50_ms'):9.1f} {median('ttft_p99_ms'):8.1f} "
        f"{median('tokens_per_s'):9.0f} {median('cached'):6.0%} {median('together'):8.0%} "
        f"{by_server:>10} {f'{saved.median:.0%}' if saved else '-':>6} {counted_cells(rows)}"
    )
