# SPDX-License-Identifier: Apache-2.0
"""The backend of SGLang that ``pat`` extends: the one that stock SGLang would run."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

from packaging.version import Version

from sglang_pat.srt import stock

logger = logging.getLogger("sglang_pat")

_HOME = "sglang.srt.layers.attention"
# Backends that can be extended, by the name SGLang registers them under: the module, the class and
# the arguments beside the runner. On a GPU none of those for which SGLang turns graphs off.
_CUDA: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fa3": ("flashattention_backend", "FlashAttentionBackend", {}),
    "fa4": ("flashattention_backend", "FlashAttentionBackend", {"fa_impl_ver": 4}),
    "flashinfer": ("flashinfer_backend", "FlashInferAttnBackend", {}),
    "triton": ("triton_backend", "TritonAttnBackend", {}),
    "trtllm_mha": ("trtllm_mha_backend", "TRTLLMHAAttnBackend", {}),
}
_CPU: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torch_native": ("torch_native_backend", "TorchNativeAttnBackend", {})
}


@dataclass(frozen=True)
class Base:
    """A backend of SGLang: its registered name, its class and what its constructor takes beside
    the runner."""

    name: str
    cls: type
    arguments: dict[str, Any] = field(default_factory=dict)


def base_of(runner: Any) -> Base:
    """The base for a model runner.

    Where the options name a backend that cannot be extended, it is what SGLang would choose without
    them, and where the choice does not take the server's page size, another one; both is logged.

    Raises RuntimeError if that cannot be extended either, or its package has another version than
    SGLang asks for.
    """
    known = _CPU if runner.device == "cpu" else _CUDA
    name = stock.stock_backend(runner.server_args, runner.model_config)
    if name not in known:
        named, name = name, stock.default_backend(runner.server_args, runner.model_config)
        if name not in known:
            raise RuntimeError(
                f"sglang_pat cannot extend {name!r}, which SGLang would choose for this GPU and "
                f"model, only {', '.join(known)}: set --prefill-attention-backend to one of these "
                "and --decode-attention-backend pat"
            )
        if named != name:
            logger.warning(
                "sglang_pat cannot extend %r: decode layers and steps that are not its own run on "
                "%s",
                named,
                name,
            )
    name = _fit_pages(name, runner)
    module, cls, arguments = known[name]
    if name == "flashinfer":
        _check_flashinfer()
        arguments = {"init_new_workspace": runner.init_new_workspace}
    return Base(name, getattr(import_module(f"{_HOME}.{module}"), cls), dict(arguments))


def _fit_pages(name: str, runner: Any) -> str:
    fitting, why = stock.fit_pages(name, runner.server_args, runner.model_config)
    if why:
        logger.warning("sglang_pat: %s", why)
    return fitting


def build_stock(runner: Any) -> tuple[str, Any]:
    """The backend that stock SGLang would run with this page size, made by its registry, and its
    name."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = stock.stock_backend(runner.server_args, runner.model_config)
    name = _fit_pages(name, runner)
    return name, ATTENTION_BACKENDS[name](runner)


def _check_flashinfer() -> None:
    """What SGLang checks when it is given ``--attention-backend flashinfer`` by that name; the
    version is the one that its own package requires.

    Raises RuntimeError for an older version.
    """
    from sglang.srt.utils import get_bool_env_var

    if get_bool_env_var("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"):
        return
    for requirement in metadata.requires("sglang") or ():
        pinned = re.match(r"flashinfer[-_]python(?:\[[^]]*\])?\s*==\s*([^\s;,]+)", requirement)
        if pinned and Version(metadata.version("flashinfer_python")) < Version(pinned[1]):
            raise RuntimeError(
                f"flashinfer_python is {metadata.version('flashinfer_python')}, SGLang needs "
                f"{pinned[1]} or newer: pip install flashinfer_python=={pinned[1]}, or choose "
                "another --attention-backend"
            )


def prefill_attention(runner: Any, base: type) -> str:
    """What runs prefill: the base, unless ``--prefill-attention-backend`` names another."""
    named: str | None = getattr(runner, "prefill_attention_backend_str", None)
    return base.__name__ if named in (None, "pat") else named
