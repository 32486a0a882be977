# SPDX-License-Identifier: Apache-2.0
"""Stops a server that ``pat`` does not serve, with one line for each reason.

However a server is launched, SGLang resolves its arguments once, by ``ServerArgs.resolve_once``,
and reads the model's config.json there. Two hooks stand around it and ask the tables (``support``)
before any weight is loaded. They are asked again when the backend is made, of what the model runner
has turned out to be. SGLang only logs a plugin that fails, so this is also where a missing hook or
a changed interface stops the server.
"""

from __future__ import annotations

from typing import Any

from sglang_pat.config import TESTED_SGLANG, PatConfig
from sglang_pat.srt import BACKEND, hook, interface, stock, support

RESOLVE = "sglang.srt.server_args.ServerArgs.resolve_once"
# Set on a record of arguments that was checked. It travels with the record to other processes.
_CHECKED = "_sglang_pat_checked"
_REFUSES = f"sglang_pat refuses to serve with --attention-backend {BACKEND}:"
_LOOK = (
    "look for 'Failed to apply hooks' or 'Failed to execute general plugin: pat' in the log above, "
    "and list pat in SGLANG_PLUGINS if that is set"
)
_UNRESOLVED = f"the hook before {RESOLVE} is not installed: {_LOOK}"


class LaunchRefused(RuntimeError):
    """``pat`` does not serve this model with these arguments: one line for each reason."""


def before_resolve(server_args: Any) -> None:
    """Hook before ``resolve_once``: refuse wrong options of ours, and a machine on which SGLang
    itself finds no device; then let SGLang resolve the rest as without ``pat``."""
    if getattr(server_args, _CHECKED, False) or not stock.asks_for_pat(server_args):
        return
    found = (reason_against_options(), _reason_against_machine())
    if reasons := [reason for reason in found if reason]:
        _refuse(server_args, reasons)
    if not getattr(server_args, "_resolution_finished", False):
        stock.let_sglang_choose(server_args)


def after_resolve(_result: None, server_args: Any) -> None:
    """Hook after ``resolve_once``: refuse what is known from the arguments and config.json."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view

    args = resolving_view(server_args)
    if getattr(server_args, _CHECKED, False) or not stock.asks_for_pat(server_args):
        return
    reasons = foreign_reasons()
    if BACKEND in attention_backends_of(args):
        reasons = [_UNRESOLVED, *reasons]
    if not reasons:  # the rest reads what a foreign SGLang may lack
        named = str(args.model_path).lower() not in ("none", "dummy")  # these have no config.json
        model = model_config_of(server_args) if named else None
        server = support.by_arguments(server_args, model)
        reasons = [str(reason) for reason in support.refusals(server)]
    if reasons:
        _refuse(server_args, reasons)
    mark_checked(server_args)


def mark_checked(server_args: Any) -> None:
    """Let the hooks pass this record of arguments."""
    setattr(server_args, _CHECKED, True)


def refuse_unsafe(runner: Any) -> None:
    """Raise RuntimeError with every reason against serving a model runner with ``pat``, each with
    the way out."""
    reasons: list[Any] = foreign_reasons()
    # The rest reads what a foreign interface may lack.
    if reasons := reasons or support.refusals(support.by_runner(runner)):
        raise RuntimeError("\n  - ".join([_REFUSES, *map(str, reasons)]))


def refuse_unresolved(_runner: Any) -> Any:
    """The registry's entry for the name ``pat``, of which SGLang never hears after our hooks."""
    raise RuntimeError(f"{_REFUSES} {_UNRESOLVED}")


def foreign_reasons() -> list[str]:
    """What SGLang lacks of the interface that the plugin uses, the hook included, by name."""
    from sglang.version import __version__

    reasons = []
    if not hook.carries_requests() and not hook.is_installed(hook.INIT_NEW, hook.after_init_new):
        reasons = [f"the hook after {hook.INIT_NEW} is not installed: {_LOOK}"]
    other = f"sglang_pat is made for SGLang {' and '.join(TESTED_SGLANG)} as released, this is "
    return reasons + [f"{lack}: {other}{__version__}" for lack in interface.interface_mismatches()]


def reason_against_options() -> str:
    """Why ``SGLANG_PAT_*`` is wrong, or ""."""
    try:
        PatConfig.from_env()
    except ValueError as error:
        return str(error)
    return ""


def _reason_against_machine() -> str:
    """Why SGLang cannot start here at all, with the way out, or "": it falls back to its base
    platform when it finds neither a GPU of any kind nor a platform of a plugin; of the devices it
    knows only HPUs are not among its platforms. It would say "No accelerator ... is available"."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.interface import SRTPlatform
    from sglang.srt.utils.common import is_habana_available

    if type(current_platform) is not SRTPlatform or is_habana_available():
        return ""
    return f"no GPU was found and SGLANG_PLATFORM is not set: {support.ON_CPU}"


def _refuse(server_args: Any, reasons: list[str]) -> None:
    """Raise SystemExit, which Python prints without a traceback, in a program that parsed a command
    line; one that calls ``Engine(...)`` gets an exception that it can catch."""
    message = "\n".join(f"{_REFUSES} {reason}" for reason in reasons)
    command = getattr(server_args, "launch_command", None)
    if command is None or command.startswith("Engine("):
        raise LaunchRefused(message)
    raise SystemExit(message)
