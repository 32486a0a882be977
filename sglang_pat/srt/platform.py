# SPDX-License-Identifier: Apache-2.0
"""Entry point ``pat_cpu`` of the group ``sglang.srt.platforms``: SGLang on a machine without a GPU.

SGLang's own CPU engine needs kernels that its wheel does not bring. As an out-of-tree platform
whose device operations are those of a CPU, and whose capabilities are all at their conservative
defaults, the stock server runs on torch alone: no graphs, torch allocators, eager forward.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

NAME = "pat_cpu"


class PatCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU that SGLang does not know, served by torch and ``sglang_pat``."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    # Without these two a request for a profile would end the server.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def activate() -> str | None:
    """The platform's name if ``SGLANG_PLATFORM`` asks for it, else None: SGLang activates every
    installed platform when the variable is unset, also on a machine with a GPU."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return f"{__name__}.{PatCpuPlatform.__qualname__}"
