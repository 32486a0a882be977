# SPDX-License-Identifier: Apache-2.0
"""What stays SGLang's own on a server with ``pat``: all that follows from the name of an attention
backend, which is the base's there, and the dtype of the K/V cache.

SGLang decides by that name in a hundred places, such as page sizes and the backends of drafts. So
it never hears of ``pat``: its arguments are resolved as if no flag named it, and the backend of
decode that comes of that is the one that ``pat`` extends, under its name (``plugin``).
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from sglang_pat.srt import BACKEND

logger = logging.getLogger("sglang_pat")

_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_HOME = "sglang.srt.layers.attention"
# Backends that can be extended, by device and SGLang's names of them: the module, the class and the
# arguments beside the runner. On a GPU none of those for which SGLang turns graphs off; on a CPU
# SGLang's other needs kernels that its wheel lacks.
EXTENDABLE: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "cuda": {
        "fa3": ("flashattention_backend", "FlashAttentionBackend", {}),
        "fa4": ("flashattention_backend", "FlashAttentionBackend", {"fa_impl_ver": 4}),
        "flashinfer": ("flashinfer_backend", "FlashInferAttnBackend", {}),
        "triton": ("triton_backend", "TritonAttnBackend", {}),
        "trtllm_mha": ("trtllm_mha_backend", "TRTLLMHAAttnBackend", {}),
    },
    "cpu": {"torch_native": ("torch_native_backend", "TorchNativeAttnBackend", {})},
}
# Values of --kv-cache-dtype whose cache holds scales beside the values; SGLang refuses some of
# them on its own.
SCALED_KV = ("mxfp8", "nvfp4", "fp4_mx_block16")


def asks_for_pat(server_args: Any) -> bool:
    """Whether any of the three flags of attention backends is ``pat``: SGLang keeps what was given
    in the record, and what it decides beside it."""
    return BACKEND in _flags_of(server_args).values()


def asked_for_decode(server_args: Any) -> str | None:
    """The backend that the flags name for decode, or None."""
    both, _, decode = _flags_of(server_args).values()
    return decode or both


def _flags_of(server_args: Any) -> dict[str, str | None]:
    return {name: getattr(server_args, name, None) for name in _FLAGS}


def let_sglang_choose(server_args: Any) -> None:
    """Declare the flags that name ``pat`` open, before SGLang resolves the record. A backend named
    for prefill alone is for decode, too, then: for the layers and the steps that are not ours."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.platforms import current_platform

    flags = _flags_of(server_args)
    left: dict[str, str | None] = {name: None for name, flag in flags.items() if flag == BACKEND}
    both, prefill, decode = (None if flag == BACKEND else flag for flag in flags.values())
    if both is None and decode is None:
        on_cpu = (server_args.device or current_platform.device_type) == "cpu"
        left["attention_backend"] = prefill or ("torch_native" if on_cpu else None)
    declare_resolution(server_args, BACKEND, **left)


def base_of(name: str, runner: Any) -> tuple[type, dict[str, Any]]:
    """The class that is the base, and what its constructor takes beside the runner."""
    module, cls, arguments = EXTENDABLE[runner.device][name]
    if name == "flashinfer":
        arguments = {"init_new_workspace": runner.init_new_workspace}
    return getattr(import_module(f"{_HOME}.{module}"), cls), arguments


def kv_cache_dtype(choice: str, model_config: Any) -> torch.dtype:
    """The cache's dtype under ``--kv-cache-dtype choice``, by SGLang's own rule. Raises ValueError
    for a choice that SGLang does not know."""
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
