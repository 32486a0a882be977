# SPDX-License-Identifier: Apache-2.0
"""What SGLang offers once ``patches/0.5.23-pat.patch``, or a part of it, is in it.

Every part is looked for by its name and used where it is there; none is needed. This module is the
only one that looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from sglang_pat.srt import BACKEND
from sglang_pat.srt.hook import LiveBatch, Mailbox, scheduled_mode
from sglang_pat.srt.source import names_of

logger = logging.getLogger("sglang_pat")

_FORWARD = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_REPLAY = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view"
_HANDLES = "request_handles"


class Batches(Protocol):
    """Where a backend finds the requests of the forward that it prepares."""

    # Of the forward taken last, as ``hook.scheduled_mode`` has it; "" if no scheduler made it.
    scheduled_mode: str

    def take(self, forward_batch: Any) -> LiveBatch | None:
        """Those of a decode or verify step, once; None for any other forward and for a warm-up."""


@cache
def carries_requests() -> bool:
    """Whether a ``ForwardBatch`` and the view that a graph replay makes of it name the requests:
    then there is no hook after ``ForwardBatch.init_new``."""
    return all(_HANDLES in names_of(path) for path in (_FORWARD, _REPLAY))


def batches_of(runner: Any) -> Batches:
    """Where the backend of this model runner finds the requests of its forwards."""
    if not carries_requests():
        return Mailbox.on(runner)
    logger.debug("sglang_pat: takes the requests of a step from SGLang's forward batch, no hook")
    return CarriedRequests()


class CarriedRequests:
    """Takes the requests from the forward itself.

    With ``anchor_version``, a counter of the prefix cache, equal rows and counters mean that every
    request stands where it stood; without one, as with the hook, other forwards are counted.
    """

    def __init__(self) -> None:
        self._others = 0
        self.scheduled_mode = ""

    def take(self, forward_batch: Any) -> LiveBatch | None:
        # A replay's view has the mode of the capture, and beside it that of the forward.
        mode = getattr(forward_batch, "actual_forward_mode", forward_batch.forward_mode)
        # SGLang also makes views of a forward that leave the requests out, such as a draft's.
        handles = getattr(forward_batch, _HANDLES, None)
        self.scheduled_mode = "" if handles is None else scheduled_mode(handles)
        if handles is None or not (mode.is_decode() or mode.is_target_verify()):
            self._others += 1
            return None
        cache, rows = handles.tree_cache, handles.req_pool_indices_cpu
        version = getattr(cache, "anchor_version", None)
        if version is None:
            return LiveBatch(handles.reqs, cache, rows, self._others)
        return LiveBatch(handles.reqs, cache, rows, version, exact=True)


def draft_with(name: str) -> bool:
    """Let the drafts of a server with ``pat`` run on SGLang's own backend ``name``. Whether SGLang
    has a registry to say so in."""
    drafts = import_module("sglang.srt.speculative.draft_utils")
    register = getattr(drafts, "register_draft_attention_backend", None)
    if register is None:
        return False

    def built_in(_factory: Any, factories: dict[str, Callable[[], Any]]) -> Any:
        return factories[name]()

    register(BACKEND, decode=built_in, extend=built_in)
    return True
