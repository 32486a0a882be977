# SPDX-License-Identifier: Apache-2.0
"""What can be said of a server before a weight is loaded, from SGLang's arguments and the model's
configuration: why ``pat`` refuses it, why it would serve or pack nothing, and which backend stock
SGLang would choose.

``server_args`` is SGLang's ``ServerArgs`` after ``resolve_once()``, ``model_config`` its
``ModelConfig``. No function here needs a model runner or a GPU. The check when the backend is made
(``sglang_pat.refusals``) takes the same facts from the runner, and the texts from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang_pat.plugin import BACKEND
from sglang_pat.srt import checkpoint
from sglang_pat.srt.stock import stock_backend

__all__ = [
    "BACKEND",
    "IdleReason",
    "config_refusals",
    "idle_message",
    "idle_reasons",
    "stock_backend",
]

CHOOSE_ANOTHER = "choose another --attention-backend"
# What the executors read, by device.
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


@dataclass(frozen=True)
class IdleReason:
    """Why ``pat`` has nothing to gain on a server: ``reason``, and the ``way_out`` of it.

    ``serves``: whether it still runs decode steps, each request on its own; else SGLang does.
    """

    reason: str
    way_out: str
    serves: bool = False


def idle_message(reasons: list[IdleReason]) -> str:
    """All reasons in one line for the log."""
    what = "packs nothing" if all(reason.serves for reason in reasons) else "serves nothing"
    listed = "; ".join(f"{reason.reason} ({reason.way_out})" for reason in reasons)
    return f"pat {what} on this server: {listed}"


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
            f"SGLANG_PLATFORM=pat_cpu and --device cpu, or {CHOOSE_ANOTHER}"
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


def kv_dtype_refusals(
    device: str, cache_dtype: torch.dtype, model_dtype: torch.dtype
) -> Iterator[str]:
    """Reasons against the dtype of the K/V cache. fp8_e4m3 on a GPU is none: its layers are the
    base's, and ``idle_reasons`` says so."""
    dtypes = DTYPES[device]
    if device == "cuda" and cache_dtype == torch.float8_e4m3fn:
        return
    if cache_dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        yield (
            f"the K/V cache is {cache_dtype}, on {device} pat reads {names}: set "
            "--kv-cache-dtype auto and one of these --dtype"
        )
    elif cache_dtype != model_dtype:
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


def idle_reasons(
    server_args: Any, model_config: Any, cache_dtype: torch.dtype | None = None
) -> list[IdleReason]:
    """Every reason for which ``pat`` would serve nothing, or could never pack.

    ``cache_dtype``: that of the K/V cache where it is known; else as the arguments and the
    checkpoint's configuration say.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    args = resolving_view(server_args)
    if cache_dtype is None and args.kv_cache_dtype not in checkpoint.SCALED_KV:
        cache_dtype = checkpoint.kv_cache_dtype(args.kv_cache_dtype, model_config)
    return [
        *_idle_backend(args),
        *_idle_model(model_config),
        *_idle_role(args),
        *_idle_cache(args, cache_dtype),
    ]


def _idle_backend(args: Any) -> Iterator[IdleReason]:
    """The backend is not ours where decode steps run."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    prefill, decode = attention_backends_of(args)
    if prefill == BACKEND and decode != BACKEND:
        yield IdleReason(
            f"decode runs on --decode-attention-backend {decode}",
            "drop that option, or set it to pat",
        )
    elif decode != BACKEND:
        yield IdleReason(
            f"decode runs on {decode}, which SGLang's configuration chose",
            "set --attention-backend pat; where it is set, SGLang replaces it for this model",
        )
    if args.speculative_algorithm is not None:
        yield IdleReason(
            f"under --speculative-algorithm {args.speculative_algorithm} the model verifies drafts "
            "instead of decoding, and that is SGLang's attention",
            "drop that option, or pat",
        )


def _idle_model(model_config: Any) -> Iterator[IdleReason]:
    from sglang.srt.configs.model_config import (
        AttentionArch,
        is_minimax_sparse,
        uses_minimax_m3_nvfp4_native_stack,
    )
    from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

    config = model_config.hf_config
    if not model_config.is_generation:
        yield IdleReason(
            "an embedding or reward model never decodes", f"{CHOOSE_ANOTHER}: nothing is lost"
        )
    if model_config.attention_arch == AttentionArch.SSM:
        yield IdleReason("the model has no attention, only state spaces", "drop the option")
    if is_qwen_qsa(config):
        yield IdleReason(
            "SGLang runs the model's sparse attention (QSA) on a backend of its own", CHOOSE_ANOTHER
        )
    if is_minimax_sparse(config) and uses_minimax_m3_nvfp4_native_stack(model_config.quantization):
        yield IdleReason(
            "SGLang runs the model's NVFP4 sparse attention on a backend of its own", CHOOSE_ANOTHER
        )


def _idle_role(args: Any) -> Iterator[IdleReason]:
    """What the server's role in a deployment leaves of decode steps and of shared prefixes."""
    if args.disaggregation_mode == "prefill":
        yield IdleReason(
            "the prefill server of a disaggregated pair never decodes",
            "give --attention-backend pat to the decode server",
        )
    elif args.disable_radix_cache and args.disaggregation_mode == "decode":
        yield IdleReason(
            "the decode server of a disaggregated pair keeps no radix cache, which tells shared "
            "prefixes",
            "set --disaggregation-decode-enable-radix-cache",
            serves=True,
        )
    elif args.disable_radix_cache:
        yield IdleReason(
            "the radix cache, which tells shared prefixes, is off",
            "drop --disable-radix-cache; where it is not set, SGLang turned the cache off for this "
            "model",
            serves=True,
        )


def _idle_cache(args: Any, cache_dtype: torch.dtype | None) -> Iterator[IdleReason]:
    if cache_dtype != torch.float8_e4m3fn or args.device != "cuda":
        return
    choice = args.kv_cache_dtype
    if choice == "auto":
        yield IdleReason(
            "the K/V cache is fp8_e4m3, as the checkpoint asks for, which pat does not read",
            "set --kv-cache-dtype bfloat16",
        )
    else:
        yield IdleReason(
            f"the K/V cache is fp8_e4m3 (--kv-cache-dtype {choice}), which pat does not read",
            "set --kv-cache-dtype auto",
        )


def _has_architecture(model_config: Any, names: tuple[str, ...]) -> bool:
    return any(name in names for name in model_config.hf_config.architectures or ())


def _hnd_is_set() -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_USE_HND_KVCACHE.get())
