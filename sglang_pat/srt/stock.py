# SPDX-License-Identifier: Apache-2.0
"""What stock SGLang would choose, were ``pat`` not chosen: the attention backend, which ``pat``
extends, and the dtype of the K/V cache. It is asked of SGLang's own code."""

from __future__ import annotations

import logging
import re
from copy import copy
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sglang_pat.srt import BACKEND

logger = logging.getLogger("sglang_pat")

# Tokens of a page that trtllm_mha takes. Where SGLang chooses that backend it sets 64, for pat 1.
_TRTLLM_PAGES = (16, 32, 64, 128)
_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
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
# Values of --kv-cache-dtype whose cache holds scales beside the values; SGLang refuses some of
# them on its own.
SCALED_KV = ("mxfp8", "nvfp4", "fp4_mx_block16")


def stock_backend(server_args: Any, model_config: Any) -> str:
    """The name of the backend that stock SGLang would choose for this GPU and model.

    Where the split options name another backend than ``pat``, it is that one, else
    ``default_backend``. ``server_args`` are resolved and are not changed.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view

    for name in attention_backends_of(resolving_view(server_args)):
        if name != BACKEND:
            return str(name)
    return default_backend(server_args, model_config)


def default_backend(server_args: Any, model_config: Any) -> str:
    """As ``stock_backend``, but whatever the options name: what SGLang declares for the model's
    architecture, then its default, of a copy of the arguments that names no backend."""
    from sglang.srt.arg_groups import overrides

    # SGLang's other backend of CPUs needs kernels that its wheel lacks.
    if overrides.resolving_view(server_args).device == "cpu":
        return "torch_native"
    unset = copy(server_args)  # of its fields
    unset.__dict__.update(server_args.__dict__)  # and of what the resolution keeps beside them
    declared = getattr(server_args, "_resolved_overrides", None) or ()
    unset._resolved_overrides = [*declared, (BACKEND, dict.fromkeys(_FIELDS))]
    unset._model_config = model_config
    config = model_config.hf_config
    log = logging.getLogger("sglang.srt.arg_groups")  # has told these choices when they were made
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        for architecture in (config.architectures or [])[:1]:
            unset._resolved_overrides += overrides.collect_model_override_declarations(
                architecture, unset, config
            )
        overrides.run_post_process_pass(unset, overrides._attention_backend_default)
        overrides.run_post_process_pass(unset, overrides._attention_backend_fa3_fp8_fallback)
    finally:
        log.setLevel(level)
    prefill, _ = overrides.attention_backends_of(overrides.resolving_view(unset))
    return str(prefill)


def fit_pages(name: str, server_args: Any, model_config: Any) -> tuple[str, str]:
    """The backend ``name``, or where it does not take the server's page size another one and why.

    That is the backend which SGLang would choose for this GPU if it had no ``trtllm_mha``.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_platform

    pages = resolving_view(server_args).page_size or 1
    if name != "trtllm_mha" or pages in _TRTLLM_PAGES:
        return name, ""
    flashinfer = get_platform().has_flashinfer and not model_config.has_attention_sinks
    other = "flashinfer" if flashinfer else "triton"
    return other, (
        f"prefill, and decode that is not pat's, run on {other}: stock SGLang's choice for this "
        f"GPU, {name}, takes pages of {', '.join(map(str, _TRTLLM_PAGES))} tokens, not of {pages}; "
        "--page-size 64 lets it run them"
    )


class Base(NamedTuple):
    """A backend of SGLang: its registered name, its class and what its constructor takes beside
    the runner."""

    name: str
    cls: type
    arguments: dict[str, Any]


def extended(server_args: Any, model_config: Any) -> tuple[str, str]:
    """The backend that the options name, else SGLang's choice, and the one that ``pat`` extends.

    Where the first cannot be extended, that is what SGLang would choose without the options, or
    "" where that cannot be extended either.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    known = _CPU if resolving_view(server_args).device == "cpu" else _CUDA
    named = name = stock_backend(server_args, model_config)
    if name not in known:
        name = default_backend(server_args, model_config)
    return named, name if name in known else ""


def base_of(runner: Any) -> Base:
    """The base for a model runner, one of those of which ``extended`` knows one.

    Where the options name a backend that cannot be extended, it is what SGLang would choose without
    them, and where the choice does not take the server's page size, another one; both is logged.

    Raises what SGLang raises where FlashInfer's package is older than it asks for.
    """
    named, name = extended(runner.server_args, runner.model_config)
    if name != named:
        logger.warning(
            "sglang_pat cannot extend %r: decode layers and steps that are not its own run on %s",
            *(named, name),
        )
    name = _fit_pages(name, runner)
    module, cls, arguments = (_CUDA | _CPU)[name]
    if name == "flashinfer":
        _check_flashinfer()
        arguments = {"init_new_workspace": runner.init_new_workspace}
    return Base(name, getattr(import_module(f"{_HOME}.{module}"), cls), dict(arguments))


def build_stock(runner: Any) -> tuple[str, Any]:
    """The backend that stock SGLang would run with this page size, made by its registry, and its
    name."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = _fit_pages(stock_backend(runner.server_args, runner.model_config), runner)
    return name, ATTENTION_BACKENDS[name](runner)


def _fit_pages(name: str, runner: Any) -> str:
    fitting, why = fit_pages(name, runner.server_args, runner.model_config)
    if why:
        logger.warning("sglang_pat: %s", why)
    return fitting


def _check_flashinfer() -> None:
    """What SGLang checks when it is given ``--attention-backend flashinfer`` by that name; the
    version is the one that its own package requires."""
    from sglang.srt.utils import assert_pkg_version, get_bool_env_var

    if get_bool_env_var("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"):
        return
    for requirement in metadata.requires("sglang") or ():
        if pinned := re.match(r"flashinfer[-_]python[^=]*==\s*([^\s;,]+)", requirement):
            install = f"pip install flashinfer_python=={pinned[1]}"
            way_out = f"{install}, or choose another --attention-backend"
            assert_pkg_version("flashinfer_python", pinned[1], way_out)


def prefill_attention(runner: Any, base: type) -> str:
    """What runs prefill: the base, unless ``--prefill-attention-backend`` names another."""
    named: str | None = getattr(runner, "prefill_attention_backend_str", None)
    return base.__name__ if named in (None, BACKEND) else named


def kv_cache_dtype(choice: str, model_config: Any) -> torch.dtype:
    """The cache's dtype under ``--kv-cache-dtype choice``, by SGLang's own rule.

    Raises ValueError for a choice that SGLang does not know.
    """
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    # A checkpoint counts where no option does.
    reads = choice == "auto" and model_config.quantization
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=choice,
        model=SimpleNamespace(quant_config=_quant_config(model_config) if reads else None),
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return dtype  # type: ignore[no-any-return]


def _quant_config(model_config: Any) -> Any:
    """How SGLang reads a checkpoint's quantization when it loads the model; None for what it cannot
    read, which it will say itself."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    try:
        return get_quant_config(model_config, LoadConfig(), {})
    except Exception as error:
        logger.debug("sglang_pat: %s", error)
        return None
