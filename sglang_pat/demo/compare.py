# SPDX-License-Identifier: Apache-2.0
"""Do two backends agree? Token by token in fp32, by log-probability of forced tokens in bf16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_pat.demo.workload import Generation

# Bound on differences of log-probabilities (natural logarithm) in fp32, which rounding explains for
# the demo's models, whose sharp attention amplifies it: 2e-5 at most was measured on a CPU, pat
# against torch_native.
MAX_LOGPROB_DIFF_FP32 = 2e-3
# In bf16 they depend on the model, see ``Scale``; these are for the one of four layers. bf16 itself
# differs from fp32 on it by 0.039 on average and 0.24 at most (transformers, 512 random tokens, on
# a CPU), two correct backends, which both round, by less: pat and torch_native by 0.013 and 0.07.
# The right tokens after another agent's prompt, most of which is the same, differ by 2.2.
MEAN_LOGPROB_DIFF_BF16 = 0.04
MAX_LOGPROB_DIFF_BF16 = 0.3


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far ``pat`` and the stock backend agree on one workload.

    ``max_logprob_diff`` and ``mean_logprob_diff`` are over the log-probabilities of equal tokens
    after equal contexts; NaN if one of them is NaN or missing.
    """

    token_match_rate: float  # share of positions with the same token, 0 to 1
    max_logprob_diff: float
    mean_logprob_diff: float

    @property
    def tokens_equal(self) -> bool:
        return self.token_match_rate == 1.0


def compare(pat: Sequence[Generation], stock: Sequence[Generation]) -> Agreement:
    """Agreement of two free runs of one workload; log-probabilities up to the first other token."""
    same = positions = 0
    diffs: list[float] = []
    for ours, theirs in zip(pat, stock, strict=True):
        pairs = list(zip(ours.output_ids, theirs.output_ids, strict=True))
        positions += len(pairs)
        same += sum(a == b for a, b in pairs)
        if ours.prompt_ids != theirs.prompt_ids:
            continue  # an earlier turn differed
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        diffs += _differences(ours.logprobs[:agreed], theirs.logprobs[:agreed])
    return Agreement(same / positions, *_max_and_mean(diffs))


def compare_forced(
    forced: Sequence[Sequence[float]], stock: Sequence[Generation], token_match_rate: float
) -> Agreement:
    """Agreement by what ``pat`` thinks of the stock's tokens (``forcing.forced_logprobs``)."""
    diffs: list[float] = []
    for ours, theirs in zip(forced, stock, strict=True):
        diffs += _differences(ours, theirs.logprobs)
    return Agreement(token_match_rate, *_max_and_mean(diffs))


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


def _max_and_mean(values: Sequence[float]) -> tuple[float, float]:
    if not values or any(math.isnan(value) for value in values):
        return math.nan, math.nan  # max() would pass over a NaN
    return max(values), sum(values) / len(values)
