# SPDX-License-Identifier: Apache-2.0
"""Whether pat gains, in a word, and why."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pat.estimate.planning import Estimate
from sglang_pat.estimate.step import StepModel

# Time per token with pat over that without: below the first it gains, below the second a little.
GAIN, LITTLE = 0.95, 0.99


@dataclass(frozen=True, slots=True)
class Verdict:
    """``word``: gain, little or none."""

    word: str
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def judge(found: Estimate, model: StepModel, moved: Estimate | None = None) -> Verdict:
    """What the modelled times come to. ``moved``: the estimate with what keeps prompts from
    sharing at their end."""
    verdict = _judge(found, model)
    if moved is None or moved.packed_step_s > LITTLE * found.packed_step_s:
        return verdict
    hint = (
        "with what differs at the end of the prompts a token would take "
        f"{moved.packed_step_s / found.packed_step_s:.2f} of this time (see below)"
    )
    return Verdict(verdict.word, f"{verdict.reason}; {hint}")


def _judge(found: Estimate, model: StepModel) -> Verdict:
    ratio, attention_s = found.ratio, found.mean("unpacked_s")
    part = attention_s / found.unpacked_step_s
    if found.queries < 2:
        return Verdict("none", "one request runs at a time, and has nobody to share with")
    if found.saved <= 0:
        return Verdict(
            "none",
            "requests that run at the same time share no tokens, or too few to read them together",
        )
    times = f"{ratio:.2f} of the time per token" if ratio <= LITTLE else "no less time per token"
    why = f"{found.saved:.0%} of the K/V reads go away, and attention takes {part:.0%} of a step"
    if ratio <= GAIN:
        return Verdict("gain", f"{times}: {why} without pat")
    word = "little" if ratio <= LITTLE else "none"
    return Verdict(word, f"{times}: {why} without pat; {_break_even(found, model)}")


def _break_even(found: Estimate, model: StepModel) -> str:
    """What a step would have to save for GAIN."""
    needed_s = (1 - GAIN) * found.unpacked_step_s
    saved_s = found.mean("unpacked_s") - found.mean("packed_s")
    saved = found.mean("unpacked") - found.mean("read")
    if saved_s <= 0:
        return "packing costs as much as it saves: longer common prompts or more requests at a time"
    return (
        f"{1 - GAIN:.0%} would take about {saved * needed_s / saved_s:,.0f} K/V tokens saved a "
        f"step, where it is {saved:,.0f}: longer common prompts or more requests at a time"
    )
