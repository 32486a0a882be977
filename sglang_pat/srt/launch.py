# SPDX-License-Identifier: Apache-2.0
"""Refuses a server in its launcher, before any weight is loaded, with one line for each reason.

SGLang resolves the server's arguments once, in the process that launches the server:
``ServerArgs.resolve_once``. ``python -m sglang.launch_server``, ``sglang serve`` and ``Engine`` all
go through it, and the model's config.json is read in it. Two hooks stand around it. The checks when
the backend is made (``sglang_pat.srt.refusals``) stay, because only then pools and layers are
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_pat import gpus
from sglang_pat.config import CPU_PLATFORM, PatConfig
from sglang_pat.srt import BACKEND

TARGET = "sglang.srt.server_args.ServerArgs.resolve_once"
# Without --attention-backend SGLang runs torch_native there.
ON_CPU = (
    f"start the server with SGLANG_PLATFORM={CPU_PLATFORM}, --device cpu and "
    f"--attention-backend {BACKEND}"
)
_BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# Set on a record of arguments that was checked. It travels with the record to other processes.
_CHECKED = "_sglang_pat_checked"


class LaunchRefused(RuntimeError):
    """``pat`` does not serve this model with these arguments: one line for each reason."""


def asks_for_pat(server_args: Any) -> bool:
    """Whether any of the three flags of attention backends is ``pat``."""
    return any(getattr(server_args, name, None) == BACKEND for name in _BACKEND_FIELDS)


def mark_checked(server_args: Any) -> None:
    """Let the hooks pass this record of arguments."""
    setattr(server_args, _CHECKED, True)


def before_resolve(server_args: Any) -> None:
    """Hook before ``resolve_once``: refuse wrong options of ours, and a machine on which SGLang
    itself finds no device.

    Without the latter, SGLang fails there with "No accelerator ... is available" or, with
    ``--device cpu``, with "No module named 'vllm'".
    """
    if getattr(server_args, _CHECKED, False) or not asks_for_pat(server_args):
        return
    if reasons := [
        reason for reason in (reason_against_options(), reason_against_machine()) if reason
    ]:
        _refuse(server_args, reasons)


def after_resolve(_result: None, server_args: Any) -> None:
    """Hook after ``resolve_once``: refuse what is known from the arguments and config.json."""
    from sglang.srt.arg_groups.overrides import resolving_view

    if getattr(server_args, _CHECKED, False) or not asks_for_pat(resolving_view(server_args)):
        return
    if reasons := list(launch_refusals(server_args)):
        _refuse(server_args, reasons)
    mark_checked(server_args)


def reason_against_machine() -> str:
    """Why SGLang cannot start here at all, with the way out, or "".

    SGLang falls back to its base platform when it finds neither a GPU of any kind nor a platform
    of a plugin; of the devices it knows only HPUs are not among its platforms.
    """
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.interface import SRTPlatform
    from sglang.srt.utils.common import is_habana_available

    if type(current_platform) is not SRTPlatform or is_habana_available():
        return ""
    return f"no GPU was found and SGLANG_PLATFORM is not set: {ON_CPU}"


def launch_refusals(server_args: Any) -> Iterator[str]:
    """Every reason, with its way out, against a server with these resolved arguments."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_pat.srt.interface import interface_mismatches
    from sglang_pat.srt.support import config_refusals

    if reason := reason_against_options():  # where pat is the platform's default
        yield reason
    mismatches = list(interface_mismatches())
    yield from mismatches
    arguments = resolving_view(server_args)
    if arguments.device == "cuda" and (reason := reason_against_device(arguments.base_gpu_id)):
        yield reason
    # SGLang has no config.json for these two, and the rest reads what a foreign SGLang may lack.
    if mismatches or str(arguments.model_path).lower() in ("none", "dummy"):
        return
    yield from config_refusals(server_args, model_config_of(server_args))
    if arguments.device == "cuda":
        yield from blackwell_refusals(model_config_of(server_args))


def blackwell_refusals(model_config: Any) -> Iterator[str]:
    """Why SGLang would not start on a Blackwell GPU: for models of gated delta nets it takes only
    its own backends there (``attention_registry.attn_backend_wrapper``)."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.runtime_context import get_platform

    if get_platform().is_blackwell and hybrid_gdn_config(model_config) is not None:
        yield (
            "on Blackwell GPUs SGLang takes only backends of its own for models with gated delta "
            "nets (Qwen3-Next, Qwen3.5): choose another --attention-backend"
        )


def reason_against_options() -> str:
    """Why ``SGLANG_PAT_*`` is wrong, or ""."""
    try:
        PatConfig.from_env()
    except ValueError as error:
        return str(error)
    return ""


def reason_against_device(index: int) -> str:
    """Why our kernels cannot run on CUDA device ``index``, or "", by its properties alone.

    Trying a kernel, as the backend does when it is made, would make a CUDA context here, and a
    launcher would hold hundreds of megabytes of the GPU for as long as the server runs.
    """
    import torch

    return reason_against_capability(torch.cuda.get_device_capability(index), "this GPU")


def reason_against_capability(capability: tuple[int, int], name: str) -> str:
    """Why our kernels cannot run on a GPU of this compute capability, or ""."""
    from sglang_pat import _C

    if not hasattr(_C, "cuda_probe"):
        return (
            "this sglang_pat was built without CUDA kernels: install it with PAT_CUDA=ON, or "
            "choose another --attention-backend"
        )
    if gpus.code_for(capability):
        return ""
    major, minor = capability
    return (
        f"our kernels, built for compute capability {gpus.built_for()}, do not run on {name} of "
        f"{major}.{minor}: choose another --attention-backend"
    )


def _refuse(server_args: Any, reasons: list[str]) -> None:
    """Raise SystemExit in a program that parsed a command line, else LaunchRefused.

    Python prints the message of a SystemExit without a traceback and exits with status 1. A program
    that calls ``Engine(...)`` gets an exception that it can catch.
    """
    message = "\n".join(
        f"sglang_pat refuses to serve with --attention-backend pat: {reason}" for reason in reasons
    )
    command = getattr(server_args, "launch_command", None)
    if command is None or command.startswith("Engine("):
        raise LaunchRefused(message)
    raise SystemExit(message)
