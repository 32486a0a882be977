# SPDX-License-Identifier: Apache-2.0
"""How the scheduler's batch reaches the backend: one hook after ``ForwardBatch.init_new``.

A ``ForwardBatch`` carries tensors but not the requests, and it is copied field by field on its way
to the attention backend, so nothing can be attached to it. But ``init_new`` and the forward that
follows run on one thread, after all evictions and splits of the step, so a mailbox on the model
runner is enough: the hook puts the batch in, ``init_forward_metadata`` takes it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TARGET = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
_ATTRIBUTE = "_sglang_pat_mailbox"


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """The requests of a decode or verify step, in row order, and the cache of their prefixes.

    ``rows`` [>= len(reqs)] int64, CPU: the row of ``req_to_token`` of each query of the batch.
    ``others``: forwards of other kinds that came before, of the same model runner.
    ``exact``: ``others`` is a counter of SGLang's instead, and while it and ``rows`` stay the same,
    so does where each request stands in the cache.
    """

    reqs: list[Any]
    tree_cache: Any
    rows: torch.Tensor
    others: int = 0
    exact: bool = False


class Mailbox:
    """Holds the batch of the forward that comes next, if that is a decode or verify step."""

    def __init__(self) -> None:
        self._batch: LiveBatch | None = None
        self._mode = ""
        self.scheduled_mode = ""  # of the forward that was taken last, as ``scheduled_mode`` has it
        self.others = 0

    @classmethod
    def on(cls, runner: Any) -> Mailbox:
        """The mailbox of a model runner; made on first use."""
        mailbox = getattr(runner, _ATTRIBUTE, None)
        if mailbox is None:
            mailbox = cls()
            setattr(runner, _ATTRIBUTE, mailbox)
        return mailbox

    def put(self, batch: LiveBatch | None, mode: str) -> None:
        """Replace what is held, so that no forward ever sees an older one's batch."""
        self._batch, self._mode = batch, mode
        self.others += batch is None

    def take(self, _forward_batch: Any = None) -> LiveBatch | None:
        batch, self._batch = self._batch, None
        self.scheduled_mode, self._mode = self._mode, ""
        return batch


def scheduled_mode(batch: Any) -> str:
    """SGLang's name of the mode that its scheduler meant for ``batch``, a ``ScheduleBatch`` as
    ``ForwardBatch.init_new`` gets it.

    On its way to the backend SGLang gives a forward other modes: its runners make EXTEND of MIXED,
    and the padding of data parallel attention makes it of DECODE and IDLE. One is rewritten before
    that: while another rank prefills, ``convert_decode_to_extend`` makes a prefill of a decode
    step, all requests of which are ``decoding_reqs`` then.
    """
    name: str = batch.forward_mode.name
    return "DECODE" if name == "EXTEND" and batch.decoding_reqs else name


def after_init_new(
    _forward_batch: Any, _cls: type, batch: Any, model_runner: Any, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER hook of ``ForwardBatch.init_new(batch, model_runner, ...)``; changes nothing."""
    mailbox = getattr(model_runner, _ATTRIBUTE, None)
    if mailbox is not None:
        live = None
        mode = batch.forward_mode
        if mode.is_decode() or mode.is_target_verify():
            rows = batch.req_pool_indices_cpu
            live = LiveBatch(batch.reqs, batch.tree_cache, rows, mailbox.others)
        mailbox.put(live, scheduled_mode(batch))


def is_installed(function: Any, wanted: Any = after_init_new) -> bool:
    """Whether the hook ``wanted`` is in the chain of wrappers around a hooked function."""
    function = getattr(function, "__func__", function)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is wanted:
                return True
        function = getattr(function, "__wrapped__", None)
    return False
