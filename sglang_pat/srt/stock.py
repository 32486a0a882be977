# SPDX-License-Identifier: Apache-2.0
"""What stock SGLang would choose, were ``pat`` not chosen: the attention backend, which ``pat``
extends, and the dtype of the K/V cache."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

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
_FILE = "hf_quant_config.json"  # where ModelOpt writes what config.json lacks


def stock_backend(server_args: Any, model_config: Any) -> str:
    """The name of the backend that stock SGLang would choose for this GPU and model.

    Where the split options name another backend than ``pat``, it is that one. Else SGLang itself is
    asked: what it declares for the model's architecture, then its default. ``server_args`` are
    resolved and are not changed.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view

    for name in attention_backends_of(resolving_view(server_args)):
        if name != BACKEND:
            return str(name)
    return default_backend(server_args, model_config)


def default_backend(server_args: Any, model_config: Any) -> str:
    """As ``stock_backend``, but whatever the options name."""
    from sglang.srt.arg_groups.overrides import resolving_view

    # SGLang's other backend of CPUs needs kernels that its wheel lacks.
    if resolving_view(server_args).device == "cpu":
        return "torch_native"
    return _default(server_args, model_config)


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


def lost_states(server_args: Any, model_config: Any) -> str:
    """Why the server will die at its first prompts under any attention backend, with the way out,
    or "". SGLang 0.5.23 takes a model of which every layer attends for one without state spaces,
    and captures these in prefill graphs, which then read what was freed after the capture."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.utils import is_cuda

    args = resolving_view(server_args)
    if "FalconH1ForCausalLM" not in (model_config.hf_config.architectures or ()):
        return ""
    captures = args.cuda_graph_config.prefill.backend != Backend.DISABLED
    if not is_cuda():  # asked about a GPU elsewhere: here SGLang disables these graphs by itself
        captures = not (args.disable_prefill_cuda_graph or args.disable_cuda_graph)
    if args.device != "cuda" or not captures:
        return ""
    return (
        "SGLang 0.5.23 captures the state spaces of a Falcon-H1 in prefill graphs, and the server "
        "dies at its first prompts, also without pat; restart with --disable-prefill-cuda-graph"
    )


def _default(server_args: Any, model_config: Any) -> str:
    from sglang.srt.arg_groups import overrides

    record = _Unset(server_args, model_config)
    config = model_config.hf_config
    with _quiet("sglang.srt.arg_groups"):
        for architecture in (config.architectures or [])[:1]:
            for _, declared in overrides.collect_model_override_declarations(
                architecture, record, config
            ):
                record.declare(declared)
        for rule in (
            overrides._attention_backend_default,
            overrides._attention_backend_fa3_fp8_fallback,
        ):
            record.declare(rule(overrides.resolved_view(record)))
    prefill, _ = overrides.attention_backends_of(overrides.resolving_view(record))
    return str(prefill)


class _Unset:
    """The arguments as SGLang resolved them, but for the attention backends, which are not set.

    SGLang reads an argument from the last declaration that has it, else from the attribute.
    """

    def __init__(self, server_args: Any, model_config: Any) -> None:
        self._server_args = server_args
        self._model_config = model_config
        self._model_config_built_from = None  # it is this one, wherever it came from
        self._resolved_overrides = [
            *(getattr(server_args, "_resolved_overrides", None) or ()),
            (BACKEND, dict.fromkeys(_FIELDS)),
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server_args, name)

    def declare(self, declared: dict[str, Any]) -> None:
        """Take what is declared of the attention backends."""
        chosen = {name: value for name, value in declared.items() if name in _FIELDS}
        self._resolved_overrides.append((BACKEND, chosen))


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the log lines of a package of SGLang: it has logged its choices when it made them."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
    name = stock_backend(runner.server_args, runner.model_config)
    if name not in known:
        named, name = name, default_backend(runner.server_args, runner.model_config)
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
    fitting, why = fit_pages(name, runner.server_args, runner.model_config)
    if why:
        logger.warning("sglang_pat: %s", why)
    return fitting


def build_stock(runner: Any) -> tuple[str, Any]:
    """The backend that stock SGLang would run with this page size, made by its registry, and its
    name."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = stock_backend(runner.server_args, runner.model_config)
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
