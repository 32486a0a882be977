# SPDX-License-Identifier: Apache-2.0
"""What SGLang tells us while a server runs: the batch of a step, and that the server has woken up.

A ``ForwardBatch`` carries tensors but not the requests, and it is copied field by field on its way
to the attention backend, so nothing can be attached to it. But ``init_new`` and the forward that
follows run on one thread, after all evictions and splits of the step, so a mailbox on the model
runner is enough: the hook puts the batch in, ``init_forward_metadata`` takes it out. Where
``patches/0.5.23-pat.patch`` is in SGLang, batches carry their requests, and there is no such hook.

With ``--enable-memory-saver`` a server gives its memory back while it sleeps and takes it again
(``resume_memory_occupation``): addresses stay, contents do not, and captured graphs stay valid.
What we hold is allocated in the region of the K/V pool, and a hook after the resume resets it.
"""

from __future__ import annotations

import logging
import pkgutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

from sglang_pat.srt.interface import names_of

logger = logging.getLogger("sglang_pat")

INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
RESUME = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.resume_memory_occupation"
)
_REPLAY = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view"
_HANDLES = "request_handles"
_ATTRIBUTE = "_sglang_pat_mailbox"


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """The requests of a decode or verify step, in row order, and the cache of their prefixes."""

    reqs: list[Any]
    tree_cache: Any
    rows: torch.Tensor  # [>= len(reqs)] int64, CPU: the row of req_to_token of each query
    others: int = 0  # forwards of other kinds that this model runner ran before
    # ``others`` is SGLang's own counter instead: while it and the rows stay, requests have not
    # moved in the tree.
    exact: bool = False


def batches_of(runner: Any) -> Mailbox | CarriedRequests:
    """Where the backend of this model runner finds the requests of a forward that it prepares.

    ``take(forward_batch)``: those of a decode or verify step, once; None for any other forward and
    for a warm-up. ``scheduled_mode``: of the forward taken last, as the function of that name has
    it; "" if no scheduler made it.
    """
    if carries_requests():
        logger.debug("sglang_pat: takes the requests of a step from SGLang's forward batch")
        return CarriedRequests()
    mailbox = getattr(runner, _ATTRIBUTE, None) or Mailbox()
    setattr(runner, _ATTRIBUTE, mailbox)
    return mailbox


@cache
def carries_requests() -> bool:
    """Whether a ``ForwardBatch`` and the view that a graph replay makes of it name the requests."""
    forward = INIT_NEW.removesuffix(".init_new")
    return all(_HANDLES in names_of(path) for path in (forward, _REPLAY))


class CarriedRequests:
    """Takes the requests from the forward itself, and ``anchor_version`` from the prefix cache."""

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


class Mailbox:
    """Holds the batch of the forward that comes next, if that is a decode or verify step."""

    def __init__(self) -> None:
        self._held: tuple[LiveBatch | None, str] = (None, "")  # and the mode
        self.scheduled_mode = ""
        self.others = 0

    def put(self, batch: LiveBatch | None, mode: str) -> None:
        """Replace what is held, so that no forward ever sees an older one's batch."""
        self._held = (batch, mode)
        self.others += batch is None

    def take(self, _forward_batch: Any = None) -> LiveBatch | None:
        (batch, self.scheduled_mode), self._held = self._held, (None, "")
        return batch


def scheduled_mode(batch: Any) -> str:
    """SGLang's name of the mode that its scheduler meant for ``batch``, a ``ScheduleBatch``.

    On its way to the backend SGLang gives a forward other modes: its runners make EXTEND of MIXED,
    and the padding of data parallel attention makes it of DECODE and IDLE. One is rewritten before:
    while another rank prefills, ``convert_decode_to_extend`` makes a prefill of a decode step, all
    requests of which are ``decoding_reqs`` then.
    """
    name: str = batch.forward_mode.name
    return "DECODE" if name == "EXTEND" and batch.decoding_reqs else name


def after_init_new(
    _forward_batch: Any, _cls: type, batch: Any, model_runner: Any, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER hook of ``ForwardBatch.init_new(batch, model_runner, ...)``; changes nothing."""
    mailbox = getattr(model_runner, _ATTRIBUTE, None)
    if mailbox is not None:
        live, mode = None, batch.forward_mode
        if mode.is_decode() or mode.is_target_verify():
            rows = batch.req_pool_indices_cpu
            live = LiveBatch(batch.reqs, batch.tree_cache, rows, mailbox.others)
        mailbox.put(live, scheduled_mode(batch))


# All whose ``reset()`` is called when the K/V pool's memory has come back. A process has one
# scheduler: when that sleeps, all that the process holds does.
sleepers: WeakSet[Any] = WeakSet()


def after_resume(_result: Any, _updater: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of ``resume_memory_occupation(self, recv_req)``; changes nothing of SGLang's."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    # No tags are all tags. A server may wake in parts, and until the K/V pool's is back our memory
    # is not there to be written to.
    if request.tags and GPU_MEMORY_TYPE_KV_CACHE not in request.tags:
        return
    for sleeper in list(sleepers):
        sleeper.reset()
        logger.info("sglang_pat: awake, the next plan is loaded anew")


def kv_cache_region(runner: Any) -> AbstractContextManager[None]:
    """The context in which to allocate what sleeps with a model runner's K/V pool. Raises
    RuntimeError if nobody would tell us of the wake."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    adapter = runner.memory_saver_adapter
    if adapter.enabled and not is_installed(RESUME, after_resume):
        raise RuntimeError(
            f"sglang_pat: the hook after {RESUME} is not installed, so after a sleep stale memory "
            "would be read: look for 'Failed to apply hooks' in the log above, or drop "
            "--enable-memory-saver"
        )
    region: AbstractContextManager[None] = adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
    return region


def is_installed(target: str, wanted: Any) -> bool:
    """Whether the hook ``wanted`` is in the chain of wrappers around a function of SGLang."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):  # another SGLang, to which no hook was applied either
        return False
    function = getattr(function, "__func__", function)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is wanted:
                return True
        function = getattr(function, "__wrapped__", None)
    return False
