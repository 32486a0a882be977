# SPDX-License-Identifier: Apache-2.0
"""Why ``pat`` would serve nothing on a server, or could never pack there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_pat.config import DEFAULT_MIN_BATCH
from sglang_pat.srt import BACKEND
from sglang_pat.srt.speculation import obstacle

CHOOSE_ANOTHER = "choose another --attention-backend"


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


def idle_reasons(
    server_args: Any, model_config: Any, *, min_batch: int = DEFAULT_MIN_BATCH
) -> list[IdleReason]:
    """Every reason for which ``pat`` would serve nothing, or could never pack. ``min_batch``: as in
    ``PatConfig``."""
    from sglang.srt.arg_groups.overrides import resolving_view

    args = resolving_view(server_args)
    return [
        *_idle_backend(args),
        *_idle_model(model_config),
        *_idle_role(args),
        *_idle_batches(args, min_batch),
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
        reason, way_out = obstacle(args)
        if reason:
            yield IdleReason(reason, way_out)


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
    # With --enable-pd-role-switch a prefill server may become a decode server while it runs.
    if args.disaggregation_mode == "prefill" and not args.enable_pd_role_switch:
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


def _idle_batches(args: Any, min_batch: int) -> Iterator[IdleReason]:
    """Batches never grow to what pat serves."""
    if args.max_running_requests is None:
        return
    # As SGLang shares them out (S mem_cache/kv_cache_configurator.py:3131).
    most = max(1, args.max_running_requests // max(1, int(args.attn_dp_size)))
    if most < min_batch:
        yield IdleReason(
            f"--max-running-requests {args.max_running_requests} lets at most {most} decode at a "
            f"time, and pat serves batches of {min_batch} or more",
            f"raise it to {min_batch * max(1, int(args.attn_dp_size))} or more",
        )
