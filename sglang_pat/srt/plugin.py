# SPDX-License-Identifier: Apache-2.0
"""Entry point ``pat`` of the group ``sglang.srt.plugins``: what SGLang runs in every process."""

from __future__ import annotations

from sglang_pat.srt import BACKEND


def register() -> None:
    """Add ``--attention-backend pat`` and our hooks. Idempotent.

    One hook hands us the batch, where SGLang itself does not, one tells us that the server has
    woken up (``hook``), and two check the arguments of a server that asks for ``pat``. SGLang only
    logs what a plugin raises, so nothing is verified here: the launcher does that, and the backend
    when it is made (``launch``). No heavy module is imported before it is needed.
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

    from sglang_pat.srt import hook, launch

    if ATTENTION_BACKENDS.get(BACKEND) is _make_backend:
        return
    register_attention_backend(BACKEND)(_make_backend)
    if not hook.carries_requests():
        HookRegistry.register(hook.INIT_NEW, hook.after_init_new, HookType.AFTER)
    HookRegistry.register(hook.RESUME, hook.after_resume, HookType.AFTER)
    HookRegistry.register(launch.RESOLVE, launch.before_resolve, HookType.BEFORE)
    HookRegistry.register(launch.RESOLVE, launch.after_resolve, HookType.AFTER)
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])


def _make_backend(runner: object) -> object:
    from sglang_pat.srt.factory import make_pat_backend

    return make_pat_backend(runner)
