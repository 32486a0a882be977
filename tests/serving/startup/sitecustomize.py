# SPDX-License-Identifier: Apache-2.0
"""Run by Python at the start of every process of the tests' CPU servers.

Each of a server's three processes imports some 9,000 modules, in which the cyclic garbage collector
finds nothing to free. With fewer collections the imports take a sixth less time.

Most servers are forks themselves (``kit/forks.py``) and do without what follows, which is for those
whose environment must be there when SGLang is imported. SGLang spawns its scheduler and its
detokenizer, each of which then imports everything again. With ``PAT_TESTS_FORK`` set, one process
imports it once and both are forks of that, before SGLang loads plugins in them. On two busy cores a
server so starts in 19 s instead of 28 s. A scheduler that dies then signals to that process instead
of the launcher, so tests of dying servers leave it out.
"""

import gc
import multiprocessing
import multiprocessing.context
import os

gc.set_threshold(100_000, 50, 100)

_IMPORTED = ["sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"]


def _set_start_method(method: str, force: bool = False) -> None:
    context = multiprocessing.context._default_context
    if method == "spawn":
        method = "forkserver"
        context.set_forkserver_preload(_IMPORTED)
    context.set_start_method(method, force)


if os.environ.get("PAT_TESTS_FORK"):
    multiprocessing.set_start_method = _set_start_method
