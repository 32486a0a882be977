# SPDX-License-Identifier: Apache-2.0
"""When two servers agree."""

from __future__ import annotations

from collections.abc import Sequence

from .server import Answer

LOGPROB_TOLERANCE = 2e-3  # natural log, fp32


def disagreements(got: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    """What differs between two servers' greedy answers to the same prompts; [] if nothing does."""
    if len(got) != len(expected):
        return [f"{len(got)} answers instead of {len(expected)}"]
    found = []
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours.tokens != theirs.tokens:
            pairs = zip(ours.tokens, theirs.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the shorter one's end")
            found.append(f"answer {index}: tokens differ from token {at} on")
            continue
        gap = max(
            (abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)), default=0.0
        )
        if not gap <= LOGPROB_TOLERANCE:  # NaN is a disagreement
            found.append(f"answer {index}: log-probabilities differ by {gap:.2e}")
    return found
