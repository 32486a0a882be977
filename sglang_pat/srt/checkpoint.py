# SPDX-License-Identifier: Apache-2.0
"""The dtype of the K/V cache, from the option and what a checkpoint's configuration declares."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import torch

# Values of --kv-cache-dtype whose cache holds scales beside the values; SGLang refuses some of
# them on its own.
SCALED_KV = ("mxfp8", "nvfp4", "fp4_mx_block16")
_FILE = "hf_quant_config.json"  # where ModelOpt writes what config.json lacks


def kv_cache_dtype(choice: str, model_config: Any) -> torch.dtype:
    """The cache's dtype under ``--kv-cache-dtype choice``, by SGLang's own rule.

    Raises ValueError for a choice that SGLang does not know.
    """
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    declared = SimpleNamespace(kv_cache_quant_algo=_declared_algorithm(model_config))
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=choice,
        model=SimpleNamespace(quant_config=declared),
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return dtype  # type: ignore[no-any-return]


def _declared_algorithm(model_config: Any) -> str | None:
    """The K/V quantization that SGLang would read of the checkpoint: "FP8", another, or None.

    Only the methods of ModelOpt and SGLang's fp8 read one; it is in ``config.json`` or in a file
    beside it, which is looked for on this machine only.
    """
    from sglang.srt.configs.model_config import unwrap_modelopt_quantization_config
    from sglang.srt.model_loader.checkpoint_quantization import resolve_checkpoint_quant_spec

    method = model_config.quantization or ""
    if not method.startswith(("modelopt", "fp8", "mxfp8")):
        return None
    spec = resolve_checkpoint_quant_spec(model_config.hf_config)
    for config in (spec.config if spec else None, _read_file(model_config)):
        if config is None:
            continue
        section = unwrap_modelopt_quantization_config(config)
        if algorithm := section.get("kv_cache_quant_algo"):
            return str(algorithm)
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, str):
            return {"FLOAT8": "FP8"}.get(scheme.strip().upper(), scheme)
        if isinstance(scheme, dict) and method.startswith("modelopt"):
            is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
            return "FP8" if is_fp8 else None
    return None


def _read_file(model_config: Any) -> dict[str, Any] | None:
    path = os.path.join(model_config.model_path, _FILE)
    if not os.path.isdir(model_config.model_path):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(
            model_config.model_path, _FILE, revision=model_config.revision
        )
        if not isinstance(cached, str):
            return None
        path = cached
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found
