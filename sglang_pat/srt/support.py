# SPDX-License-Identifier: Apache-2.0
"""What can be said of a server before a weight is loaded, from SGLang's arguments and the model's
configuration: why ``pat`` refuses it, why it would serve or pack nothing (``idle``), and which
backend stock SGLang would choose (``stock``).

``server_args`` is SGLang's ``ServerArgs`` after ``resolve_once()``, ``model_config`` its
``ModelConfig``. No function here needs a model runner or a GPU. The check when the backend is made
(``sglang_pat.srt.refusals``) takes the same facts from the runner, and the texts from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sglang_pat.srt import BACKEND, checkpoint
from sglang_pat.srt.idle import CHOOSE_ANOTHER, IdleReason, idle_message, idle_reasons
from sglang_pat.srt.stock import stock_backend

__all__ = [
    "BACKEND",
    "CHOOSE_ANOTHER",
    "IdleReason",
    "config_refusals",
    "idle_message",
    "idle_reasons",
    "stock_backend",
]

# Dtypes of a model that the executors take, by device. K/V are of the same, or in float8_e4m3fn.
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
DEVICES = tuple(DTYPES)
# Models whose attention window is applied by SGLang's backend and stands in no layer: the queries
# of a decode step see the prompt and the last tokens (``ModelRunner.prefill_aware_swa``).
PREFILL_AWARE_SWA = ("UnlimitedOCRForCausalLM",)

# Why a mode of SGLang is refused, by the fact that tells of it.
_MODES = {
    "two_batch_overlap": ("--enable-two-batch-overlap: half batches have no requests of their own"),
    "pdmux": "--enable-pdmux: two backends share one model runner",
    "deterministic": "--enable-deterministic-inference: packing depends on the batch",
    "torch_compile": "--enable-torch-compile: it would freeze a plan",
    "dcp": "--dcp-size > 1: a rank holds part of each sequence",
    "cp": "--attn-cp-size > 1: a rank holds part of each sequence",
    "kv_sharding": "--enable-kv-cache-sharding: pages are interleaved over ranks",
    "hisparse": "--enable-hisparse: slots move during a request",
    "no_kv_cache": "--prefill-only-disable-kv-cache: nothing is cached",
    "glue_graph": "SGLANG_ENABLE_METADATA_GLUE_GRAPH: it would freeze a plan",
}


def config_refusals(server_args: Any, model_config: Any) -> list[str]:
    """Every reason against serving with ``pat``, each with the way out; empty if there is none.

    Beyond these, a server may still be refused for its GPU and for what its K/V pool turns out
    to be.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import AttentionArch

    args = resolving_view(server_args)
    device = args.device
    reasons = list(device_refusals(device))
    reasons += model_refusals(
        uses_mla=model_config.attention_arch == AttentionArch.MLA,
        is_encoder_decoder=model_config.is_encoder_decoder,
        prefill_aware_swa=_has_architecture(model_config, PREFILL_AWARE_SWA),
    )
    reasons += state_refusals(device, model_config)
    if device in DEVICES and args.kv_cache_dtype not in checkpoint.SCALED_KV:
        cache = checkpoint.kv_cache_dtype(args.kv_cache_dtype, model_config)
        reasons += kv_dtype_refusals(device, cache, model_config.dtype)
    reasons += pool_refusals(
        virtual_slots=args.enable_unified_memory or args.enable_page_major_kv_layout,
        layouts=("hnd",) if _hnd_is_set() else (),
        quant_name=args.kv_cache_dtype if args.kv_cache_dtype in checkpoint.SCALED_KV else "",
    )
    return reasons + list(mode_refusals(modes_of(server_args)))


def device_refusals(device: str) -> Iterator[str]:
    """Reasons against a device by its name; whether our kernels run on a GPU is asked elsewhere."""
    if device not in DEVICES:
        yield (
            f"this version serves on {', '.join(DEVICES)}, not on {device!r}: set "
            f"SGLANG_PLATFORM=pat_cpu, --device cpu and --attention-backend {BACKEND}, or "
            f"{CHOOSE_ANOTHER}"
        )
    elif device == "cpu" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        yield (
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine: unset it and set "
            "SGLANG_PLATFORM=pat_cpu"
        )


def model_refusals(
    *, uses_mla: bool, is_encoder_decoder: bool, prefill_aware_swa: bool
) -> Iterator[str]:
    """Reasons against the kind of attention of a whole model."""
    if uses_mla:
        yield f"the model uses MLA, whose cache holds latents instead of K and V: {CHOOSE_ANOTHER}"
    if is_encoder_decoder:
        yield f"encoder-decoder models shift their rows of req_to_token: {CHOOSE_ANOTHER}"
    if prefill_aware_swa:
        yield (
            "the model attends to its prompt and a window of its last tokens "
            f"({', '.join(PREFILL_AWARE_SWA)}), which pat does not know: {CHOOSE_ANOTHER}"
        )


def state_refusals(device: str, model_config: Any) -> Iterator[str]:
    """Reasons against layers without attention: on a CPU the server would die in its first prefill,
    for want of kernels."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if device == "cpu" and mambaish_config(model_config) is not None:
        yield (
            "SGLang's kernels of linear attention and state spaces need a GPU: start the server on "
            "one"
        )


def kv_dtype_refusals(
    device: str, cache_dtype: torch.dtype, model_dtype: torch.dtype
) -> Iterator[str]:
    """Reasons against the dtype of the K/V cache, or of the queries, which are the model's."""
    dtypes = DTYPES[device]
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if model_dtype not in dtypes:
        yield f"the model is {model_dtype}, on {device} pat takes {names}: set one as --dtype"
    if cache_dtype in (torch.float8_e4m3fn, model_dtype):
        return
    if cache_dtype not in dtypes:
        yield (
            f"the K/V cache is {cache_dtype}, on {device} pat reads {names} and float8_e4m3fn: set "
            "--kv-cache-dtype auto or fp8_e4m3"
        )
    else:
        yield (
            f"the K/V cache is {cache_dtype} but the model {model_dtype}: set --kv-cache-dtype auto"
        )


def pool_refusals(
    *, virtual_slots: bool, layouts: tuple[str, ...], quant_name: str
) -> Iterator[str]:
    """Reasons against the K/V pool: whether its slot ids are translated, the layouts of its parts
    and the name of its quantization, "" for none."""
    if virtual_slots:
        yield (
            "slot ids of a unified memory pool are virtual: drop --enable-unified-memory and "
            "--enable-page-major-kv-layout"
        )
    for layout in layouts:
        if layout != "nhd":
            yield (
                f"the K/V cache has layout {layout!r}, not 'nhd': unset SGLANG_USE_HND_KVCACHE or "
                "the option that chose it"
            )
    if quant_name:
        yield f"the K/V cache is quantized by {quant_name}: set --kv-cache-dtype auto"


def mode_refusals(modes: Mapping[str, bool]) -> Iterator[str]:
    """Reasons against the modes that are on, of ``modes_of`` or of the published configuration."""
    for name, why in _MODES.items():
        if modes[name]:
            yield f"{why}; drop it or {CHOOSE_ANOTHER}"


def modes_of(server_args: Any) -> dict[str, bool]:
    """Which of the modes that ``mode_refusals`` knows these arguments turn on."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import attn_dcp_size_of

    args = resolving_view(server_args)
    return {
        "two_batch_overlap": args.enable_two_batch_overlap,
        "pdmux": args.enable_pdmux,
        "deterministic": args.enable_deterministic_inference,
        "torch_compile": args.enable_torch_compile,
        "dcp": attn_dcp_size_of(args) > 1,
        "cp": args.attn_cp_size > 1,
        "kv_sharding": args.enable_kv_cache_sharding,
        "hisparse": args.enable_hisparse,
        "no_kv_cache": args.prefill_only_disable_kv_cache,
        "glue_graph": envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
    }


def _has_architecture(model_config: Any, names: tuple[str, ...]) -> bool:
    return any(name in names for name in model_config.hf_config.architectures or ())


def _hnd_is_set() -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_USE_HND_KVCACHE.get())
