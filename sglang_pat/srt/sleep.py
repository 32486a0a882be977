# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake: our device memory goes and comes back with SGLang's K/V pool.

With ``--enable-memory-saver`` a server gives its memory back while it sleeps
(``release_memory_occupation``) and takes it again (``resume_memory_occupation``): addresses stay,
contents do not, and captured graphs stay valid. What we hold is allocated in the region of the K/V
pool (S mem_cache/memory_pool.py:405), and a hook after the resume resets it. Without
``--enable-memory-saver`` the same requests only flush the cache, nothing is released, and the reset
costs one copy of a plan.
"""

from __future__ import annotations

import logging
import pkgutil
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakSet

from sglang_pat.srt import hook

logger = logging.getLogger("sglang_pat")

TARGET = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.resume_memory_occupation"
)


class Sleeper(Protocol):
    """What holds device memory whose contents a sleep loses."""

    def reset(self) -> None:
        """Be as new, at the same addresses."""


# All of this process: it has one scheduler, whose sleep is of all that the process holds.
_sleepers: WeakSet[Any] = WeakSet()


def reset_on_wake(sleeper: Sleeper) -> None:
    """Call ``sleeper.reset()`` whenever the K/V pool's memory has come back; holds no reference."""
    _sleepers.add(sleeper)


def after_resume(_result: Any, _updater: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of ``resume_memory_occupation(self, recv_req)``; changes nothing of SGLang's."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    # No tags are all tags. A server may wake in parts, and until the K/V pool's is back our memory
    # is not there to be written to.
    if request.tags and GPU_MEMORY_TYPE_KV_CACHE not in request.tags:
        return
    for sleeper in list(_sleepers):
        sleeper.reset()
        logger.info("sglang_pat: awake, the next plan is loaded anew")


def kv_cache_region(runner: Any) -> AbstractContextManager[None]:
    """The context in which to allocate what sleeps with a model runner's K/V pool; one that does
    nothing without ``--enable-memory-saver``.

    Raises RuntimeError if nobody would tell us of the wake.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    adapter = runner.memory_saver_adapter
    if adapter.enabled and not _is_hooked():
        raise RuntimeError(
            f"sglang_pat: the hook after {TARGET} is not installed, so after a sleep stale memory "
            "would be read: look for 'Failed to apply hooks' in the log above, or drop "
            "--enable-memory-saver"
        )
    region: AbstractContextManager[None] = adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
    return region


def _is_hooked() -> bool:
    try:
        resume = pkgutil.resolve_name(TARGET)
    except (ImportError, AttributeError):  # another SGLang, to which no hook was applied either
        return False
    return hook.is_installed(resume, after_resume)
