# SPDX-License-Identifier: Apache-2.0
"""Entry point ``pat`` of the group ``sglang.srt.plugins``: what SGLang runs in every process."""

from __future__ import annotations

from sglang_pat.srt import BACKEND


def register() -> None:
    """Add ``--attention-backend pat`` and our hooks. Idempotent.

    One hook hands us the batch, where SGLang itself does not (``upstream``), one tells us that the
    server has woken up, and two check the arguments of a server that asks for ``pat``. SGLang only
    logs what a plugin raises, so nothing is verified here: the launcher does that
    (``sglang_pat.srt.launch``), and the backend when it is made (``sglang_pat.srt.refusals``). No
    heavy module is imported before it is needed.
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

    from sglang_pat.srt import hook, launch, sleep, upstream

    if ATTENTION_BACKENDS.get(BACKEND) is _make_backend:
        return
    register_attention_backend(BACKEND)(_make_backend)
    if not upstream.carries_requests():
        HookRegistry.register(hook.TARGET, hook.after_init_new, HookType.AFTER)
    HookRegistry.register(sleep.TARGET, sleep.after_resume, HookType.AFTER)
    HookRegistry.register(launch.TARGET, launch.before_resolve, HookType.BEFORE)
    HookRegistry.register(launch.TARGET, launch.after_resolve, HookType.AFTER)
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])


def _make_backend(runner: object) -> object:
    from sglang_pat.srt.factory import make_pat_backend

    return make_pat_backend(runner)
