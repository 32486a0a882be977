# SPDX-License-Identifier: Apache-2.0
"""GPUs as far as a verdict on a server needs them: the one that is here, and those by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from sglang_pat.gpus import GPUS, SHARED_PER_BLOCK, machine_of


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``capability``: compute capability; ``memory_mib``: what nvidia-smi shows in all;
    ``shared_per_block``: bytes of shared memory that one block can have."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    shared_per_block: int


def known_gpu(name: str) -> Gpu:
    """The GPU of that name; see ``machine_of``, which raises ValueError for one that is not
    known."""
    machine = machine_of(name)
    (known,) = (key for key, each in GPUS.items() if each is machine)
    capability = (machine.major, machine.minor)
    return Gpu(known.upper(), capability, machine.memory_mib, SHARED_PER_BLOCK[capability])


def gpu_here(index: int = 0) -> Gpu | None:
    """CUDA device ``index`` of this machine, or None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found: Any = torch.cuda.get_device_properties(index)
    return Gpu(
        found.name,
        (found.major, found.minor),
        found.total_memory // 2**20,
        found.shared_memory_per_block_optin,
    )


@contextmanager
def as_if_here(gpu: Gpu) -> Iterator[None]:
    """Let SGLang resolve arguments as it would on a machine with that GPU.

    Covers what the resolution asks about the machine: kind, compute capability and memory, and
    whether FlashInfer is there, which SGLang denies without a GPU.
    """
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import override_platform

    major, minor = gpu.capability
    facts = {
        "is_cuda": True,
        "is_sm90": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major in (10, 11),
        "is_sm110": major == 11,
        "is_sm120": major == 12,
        "is_blackwell": major >= 10,
        "device_sm": 10 * major + minor,
        "device_capability": gpu.capability,
        "has_flashinfer": find_spec("flashinfer") is not None,
    }
    with ExitStack() as stack:
        stack.enter_context(override_platform(**facts))
        for owner, name, value in (
            (memory_hook, "get_device_memory_capacity", lambda _device=None: gpu.memory_mib),
            (current_platform, "is_out_of_tree", lambda: False),
        ):
            stack.callback(_put_back(owner, name))
            setattr(owner, name, value)
        yield


def _put_back(owner: Any, name: str) -> Callable[[], None]:
    """What gives the attribute its present value again, or takes it away from an instance."""
    if name in vars(owner):
        return partial(setattr, owner, name, vars(owner)[name])
    return partial(delattr, owner, name)
