# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a batch's sequence lengths before the step runs.

A decode step's lengths are on the host. Where SGLang overlaps the scheduler with the GPU and
speculates, they are not: how many draft tokens the last verify step accepted is known on the GPU
only. The host then has bounds, which SGLang keeps of each request (S
managers/schedule_batch.py:962, ``S`` being SGLang 0.5.23's ``srt/``): the tokens that were
committed when it last looked, at most one step ago, and those that it has slots for, the draft
tokens of the step to come among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Bounds further apart are not used: a plan made for the least lengths holds for at least 128 tokens
# more (csrc/pack/headroom.h), of which the steps to come are to have some.
MAX_SLACK = 96


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """``least``, ``most`` [B] int64, CPU, contiguous: bounds of each query's tokens, those that it
    decodes or verifies included. The same tensor where the lengths are known."""

    least: torch.Tensor
    most: torch.Tensor

    @property
    def are_known(self) -> bool:
        return self.least is self.most

    def first(self, count: int) -> Lengths:
        """Those of the first ``count`` queries."""
        if count == len(self.least):
            return self
        least = self.least[:count]
        return Lengths(least, least if self.are_known else self.most[:count])


def known(seq_lens: torch.Tensor) -> Lengths:
    """Lengths [B] int64, CPU, contiguous, that the host knows."""
    return Lengths(seq_lens, seq_lens)


def lengths_of(forward_batch: Any, added: int = 0) -> Lengths:
    """SGLang's lengths of a batch, with ``added`` tokens each. Waits for the device where SGLang
    keeps no copy of them on the host."""
    lens: torch.Tensor | None = forward_batch.seq_lens_cpu
    if lens is None:
        lens = forward_batch.seq_lens.cpu()
    if lens.dtype != torch.int64 or not lens.is_contiguous():
        lens = lens.to(torch.int64).contiguous()
    return known(lens + added if added else lens)


def bounds_of(reqs: Sequence[Any], draft_tokens: int) -> Lengths | None:
    """Bounds of the lengths of a verify step, from what SGLang keeps of its requests; None if they
    are too far apart to plan with."""
    owned = [req.kv for req in reqs]
    # NumPy takes a third of torch's time for so few numbers.
    least = np.array([kv.kv_committed_len for kv in owned], np.int64) + draft_tokens
    most = np.array([kv.kv_allocated_len for kv in owned], np.int64)
    slack = most - least
    if slack.size and not (slack.min() >= 0 and slack.max() <= MAX_SLACK):
        return None
    return Lengths(torch.from_numpy(least), torch.from_numpy(most))
