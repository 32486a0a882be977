# SPDX-License-Identifier: Apache-2.0
"""Entry point ``pat`` of the group ``sglang.srt.plugins``: what SGLang runs in every process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_pat.srt import BACKEND


def register() -> None:
    """Add ``--attention-backend pat`` and the hooks of ``hook`` and ``launch``. Idempotent.

    After the resolution of its arguments SGLang asks its registry for the backend that it would run
    without ``pat``: each entry gives ours over that one to a server that asked for ``pat``. SGLang
    only logs what a plugin raises, so nothing else is verified here: the launcher does that, and
    the backend when it is made. No heavy module is imported before it is needed.
    """
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )

    try:
        from sglang_pat.srt import hook, launch
    except ImportError as error:  # no native module, say
        # SGLang would log it, and end in hundreds of lines of usage as it does not know ``pat``.
        if any(argument.rpartition("=")[2] == BACKEND for argument in sys.argv[1:]):
            raise SystemExit(f"--attention-backend {BACKEND}: {error}") from None
        raise
    if ATTENTION_BACKENDS.get(BACKEND) is launch.refuse_unresolved:
        return
    for name, of_sglang in list(ATTENTION_BACKENDS.items()):
        register_attention_backend(name)(_maker(name, of_sglang))
    register_attention_backend(BACKEND)(launch.refuse_unresolved)
    if not hook.carries_requests():
        HookRegistry.register(hook.INIT_NEW, hook.after_init_new, HookType.AFTER)
    HookRegistry.register(hook.RESUME, hook.after_resume, HookType.AFTER)
    HookRegistry.register(launch.RESOLVE, launch.before_resolve, HookType.BEFORE)
    HookRegistry.register(launch.RESOLVE, launch.after_resolve, HookType.AFTER)
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])


def _maker(name: str, of_sglang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The registry's entry for a backend of SGLang, which ``of_sglang`` makes for a model runner.

    Drafts do not go through the scheduler's batches: they stay SGLang's.
    """

    def make(runner: Any) -> Any:
        from sglang_pat.srt.stock import asks_for_pat

        decodes = name == runner.decode_attention_backend_str and not runner.is_draft_worker
        if not decodes or not asks_for_pat(runner.server_args):
            return of_sglang(runner)
        from sglang_pat.srt.factory import make_pat_backend

        return make_pat_backend(runner, name, of_sglang)

    return make
