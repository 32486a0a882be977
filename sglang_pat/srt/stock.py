# SPDX-License-Identifier: Apache-2.0
"""Which attention backend stock SGLang would run, were ``pat`` not chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_pat.srt import BACKEND

# Tokens of a page that trtllm_mha takes. Where SGLang chooses that backend it sets 64, for pat 1.
_TRTLLM_PAGES = (16, 32, 64, 128)
_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


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
