# SPDX-License-Identifier: Apache-2.0
"""A GPU that has work hides the host's, one that has none does not."""

from __future__ import annotations

import torch

from sglang_pat.srt.step import StepClock

LONG = 200_000_000  # clock cycles: some 0.1 s


def test_only_a_busy_gpu_hides_the_host() -> None:
    clock = StepClock(on_gpu=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    clock.start()
    assert clock.is_hidden()
    torch.cuda.synchronize()
    assert not clock.is_hidden()
    clock.start()  # of a GPU without work
    torch.cuda._sleep(LONG)  # later work, such as the plan's own copy, hides nothing
    first = next(i for i in range(1_000_000) if not clock.is_hidden())
    assert first < 1_000  # the event itself takes some microseconds
    torch.cuda.synchronize()
