# SPDX-License-Identifier: Apache-2.0
"""What the demo prints: a table for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_pat.demo.compare import Agreement
    from sglang_pat.demo.counters import Counters
    from sglang_pat.demo.workload import Generation


@dataclass(frozen=True, slots=True)
class Run:
    """One backend's pass through the workload."""

    backend: str
    generations: list[Generation]
    seconds: float  # of both turns, each from its requests to its last answer
    counters: Counters  # of this pass alone; all 0 on a stock backend

    @property
    def output_tokens(self) -> int:
        return sum(len(generation.output_ids) for generation in self.generations)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def tpot_ms(self) -> float:
        """Median over the requests of the time per output token after the first."""
        return 1000 * statistics.median(generation.tpot_s for generation in self.generations)


def summary(
    pat: Run,
    stock: Run,
    agreement: Agreement,
    itself: Agreement | None,
    *,
    facts: dict[str, Any],
    passed: bool,
) -> dict[str, Any]:
    """The JSON object; ``facts`` (device, versions, model) come first. A NaN becomes null.

    ``itself``: how far the stock backend agrees with itself in other batches, if that was measured.
    """
    counters = pat.counters
    fields = {
        "backend": pat.backend,
        "stock_backend": stock.backend,
        **facts,
        "requests": len(pat.generations),
        "output_tokens": pat.output_tokens,
        "tokens_equal": agreement.tokens_equal,
        "token_match_rate": agreement.token_match_rate,
        "max_logprob_diff": agreement.max_logprob_diff,
        "mean_logprob_diff": agreement.mean_logprob_diff,
        "stock_itself_max_logprob_diff": itself.max_logprob_diff if itself else None,
        "stock_itself_mean_logprob_diff": itself.mean_logprob_diff if itself else None,
        "smallest_margin": min(min(g.margins) for g in stock.generations),
        "decode_steps": counters.decode_steps,
        "packed_steps": counters.packed_steps,
        "kv_tokens_read": counters.kv_tokens_read,
        "kv_tokens_unpacked": counters.kv_tokens_unpacked,
        "kv_reads_saved": kv_reads_saved(counters),
        "plans_made": counters.plans_made,
        "plans_reused": counters.plans_reused,
        "host_us_per_step": 1e6 * counters.host_seconds / max(counters.decode_steps, 1),
        "base_forwards": counters.base_forwards,
        "fallbacks": counters.fallbacks,
        "tpot_ms": pat.tpot_ms,
        "stock_tpot_ms": stock.tpot_ms,
        "workload_s": pat.seconds,
        "stock_workload_s": stock.seconds,
        "tokens_per_s": pat.tokens_per_s,
        "stock_tokens_per_s": stock.tokens_per_s,
        "passed": passed,
    }
    return {name: _json_value(value) for name, value in fields.items()}


def kv_reads_saved(counters: Counters) -> float:
    """Share of decode attention's K/V reads that were saved, 0 to 1."""
    unpacked = counters.kv_tokens_unpacked
    return 1 - counters.kv_tokens_read / unpacked if unpacked else 0.0


def table(pat: Run, stock: Run, agreement: Agreement, itself: Agreement | None = None) -> str:
    """The two runs side by side, then what pat did and whether they agree. ``itself`` as in
    ``summary``."""
    counters = pat.counters
    steps = max(counters.decode_steps, 1)
    read, unpacked = counters.kv_tokens_read / steps, counters.kv_tokens_unpacked / steps
    rows = [
        ("", stock.backend, pat.backend, ""),
        ("output tokens", f"{stock.output_tokens}", f"{pat.output_tokens}", ""),
        _timed("total time, s", stock.seconds, pat.seconds, higher=False),
        _timed("output tokens per second", stock.tokens_per_s, pat.tokens_per_s, higher=True),
        _timed("time per output token, median, ms", stock.tpot_ms, pat.tpot_ms, higher=False),
        (
            "K/V tokens read per decode step",
            f"{unpacked:,.0f}",
            f"{read:,.0f}",
            _ratio(unpacked, read),
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    lines.insert(1, "  " + "-" * (sum(widths[:3]) + 4))
    lines += [
        "",
        f"  K/V reads saved: {kv_reads_saved(counters):.0%}.",
        f"  Packed: {counters.packed_steps} of {counters.decode_steps} decode steps "
        f"({counters.packed_steps / steps:.0%}); {counters.plans_made} plans made, "
        f"{counters.plans_reused} reused, {1e6 * counters.host_seconds / steps:.0f} us of host "
        "time per step.",
        f"  Tokens equal to {stock.backend}: {agreement.token_match_rate:.1%}; log-probabilities "
        f"differ by {agreement.mean_logprob_diff:.1e} on average, {agreement.max_logprob_diff:.1e} "
        "at most.",
    ]
    if itself:
        lines.append(
            f"  {stock.backend} differs from itself in other batches by "
            f"{itself.mean_logprob_diff:.1e} and {itself.max_logprob_diff:.1e}."
        )
    return "\n".join(lines)


def to_line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, allow_nan=False)


def _timed(name: str, stock: float, pat: float, *, higher: bool) -> tuple[str, str, str, str]:
    return (
        name,
        f"{stock:,.1f}",
        f"{pat:,.1f}",
        _ratio(pat, stock) if higher else _ratio(stock, pat),
    )


def _ratio(larger: float, smaller: float) -> str:
    return f"{larger / smaller:.2f}x" if smaller else ""


def _json_value(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
