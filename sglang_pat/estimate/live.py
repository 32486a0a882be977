# SPDX-License-Identifier: Apache-2.0
"""What ``sglang-pat estimate`` says of a running server: text for people, data for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_pat.estimate.server import Observed
from sglang_pat.estimate.step import StepModel
from sglang_pat.estimate.verdict import GAIN, LITTLE, Verdict

_LEAST_SAVED = 0.01


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step with pat and without. ``modelled``: which of them are not measured."""

    packed_s: float
    unpacked_s: float
    modelled: str


def times(seen: Observed, model: StepModel) -> Times | None:
    """Of an observed server, with what packing saves modelled: the K/V bytes that it need not read
    again, at what the cost model charges for a read from the L2. None where too little is known."""
    if seen.read is None or seen.unpacked is None:
        return None
    target = model.target
    token_s = target.reread_factor * 2 * target.head_dim * target.kv_bytes / target.bytes_per_s
    saved = max(0.0, seen.unpacked - seen.read) * target.num_kv_heads
    saved_s = model.model.attention_layers * saved * token_s
    if seen.token_s is None:
        first_s = seen.read * target.num_kv_heads * token_s / target.reread_factor
        packed_s = model.rest_s(max(1, round(seen.running or 1)))
        packed_s += model.model.attention_layers * first_s
        return Times(packed_s, packed_s + saved_s, "both")
    if seen.by_pat:
        return Times(seen.token_s, seen.token_s + saved_s, "without")
    return Times(max(0.0, seen.token_s - saved_s), seen.token_s, "with pat")


def judge(seen: Observed, found: Times | None) -> Verdict:
    """By the modelled times, else by the reads alone."""
    if seen.by_pat and not seen.serving:
        return Verdict(
            "none", "pat is installed, but serves nothing on this server; its log says why"
        )
    if seen.unpacked is None:
        what = "ran on pat" if seen.by_pat else "was seen"
        return Verdict("unknown", f"no decode step of several requests {what}: send it requests")
    if seen.saved < _LEAST_SAVED:
        return Verdict(
            "none",
            "requests that run at the same time share no tokens, or too few: give the prompts with "
            "--prompts to see which differ in their first tokens",
        )
    saved = f"{seen.saved:.0%} of the K/V reads {'go away' if seen.by_pat else 'could go away'}"
    if found is None:
        return Verdict("reads saved", f"{saved}; for times name the GPU with --gpu")
    ratio = found.packed_s / found.unpacked_s
    word = "gain" if ratio <= GAIN else "little" if ratio <= LITTLE else "none"
    return Verdict(word, f"{ratio:.2f} of the time per token: {saved}")


def text(seen: Observed, model: StepModel | None) -> str:
    """The report; ``model``: of a step, where the GPU is known."""
    lines = [f"{seen.url}: {seen.model or 'an unnamed model'} on {seen.backend or 'SGLang'}"]
    lines += _of_pat(seen) if seen.by_pat else _of_stock(seen)
    if seen.token_s is not None:
        lines.append(f"time per token as SGLang measured it: {seen.token_s * 1e3:.2f} ms")
    found = None if model is None else times(seen, model)
    if found is not None:
        lines.append(
            f"time per token: {found.packed_s * 1e3:.2f} ms with pat, {found.unpacked_s * 1e3:.2f} "
            f"without ({found.modelled}: modelled, docs/estimate.md)"
        )
    return "\n".join([*lines, "", f"verdict: {judge(seen, found)}"])


def _of_pat(seen: Observed) -> list[str]:
    lines = [
        f"pat {'serves' if seen.serving else 'serves nothing'}: {seen.packed:,} of {seen.steps:,} "
        f"decode steps had requests that share ({seen.period})"
    ]
    if seen.read is not None and seen.unpacked is not None:
        lines.append(
            f"K/V tokens read a step: {seen.read:,.0f} instead of {seen.unpacked:,.0f}, "
            f"{seen.saved:.0%} saved"
        )
    for what, counts in (
        ("on SGLang's attention as intended", seen.base_forwards),
        ("not served by pat as it should have been", seen.fallbacks),
    ):
        if counts:
            words = ", ".join(f"{count:,} x {name}" for name, count in counts.items())
            lines.append(f"{what}, since its start: {words}")
    return lines


def _of_stock(seen: Observed) -> list[str]:
    lines = [
        "pat does not run here: its counters are not on /metrics. What SGLang's own gauges allow "
        "to say:"
    ]
    if seen.read is not None and seen.unpacked is not None:
        lines.append(
            f"  the decoding requests have {seen.unpacked:,.0f} K/V tokens and hold "
            f"{seen.read:,.0f} slots: at most {seen.saved:.0%} of the reads can be saved "
            f"({seen.period})"
        )
    else:
        lines.append(f"  no decoding was seen ({seen.period}): read it while requests run")
    if seen.running is not None:
        lines.append(f"  {seen.running:,.1f} requests run at a time, while any do")
    if seen.cache_hits is not None:
        lines.append(f"  {seen.cache_hits:.0%} of the last prompts' tokens were in the cache")
    return lines


def data(seen: Observed, model: StepModel | None) -> dict[str, Any]:
    """The same for JSON, in seconds, and K/V tokens of a step and layer."""
    found = None if model is None else times(seen, model)
    return {
        **asdict(seen),
        "saved": seen.saved,
        "times": None if found is None else asdict(found),
        "verdict": asdict(judge(seen, found)),
    }
