# SPDX-License-Identifier: Apache-2.0
"""Who serves each layer of a model: pat, or SGLang's own attention, and why: of a loaded model
(``survey_layers``), of layers as they come by (``LayerRoutes``), and by config.json alone
(``reasons_by_layer``, for ``sglang-pat doctor``)."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import groupby
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sglang_pat import _C
from sglang_pat.ops import sinks_fit
from sglang_pat.srt.facts import (
    CAPPED,
    CHUNKED,
    SLIDING,
    TEMPERATURE,
    caps_logits,
    facts,
    kinds,
)
from sglang_pat.srt.support import (
    CHOOSE_ANOTHER,
    E4M3,
    MOST_DRAFT_ROWS,
    MOST_LATENT_ROWS,
    draft_tokens_of,
)
from sglang_pat.target import HEAD_DIM_STEP, LATENT_DIMS, MAX_HEAD_DIM, Target

logger = logging.getLogger("sglang_pat")

CUDA_HEAD_DIMS, CUDA_MAX_GROUP = _C.CUDA_HEAD_DIMS, _C.CUDA_MAX_GROUP


class Heads(NamedTuple):
    """What plans are made for: this rank's query and KV heads, the head dim, the draft tokens of a
    request and, of latents (MLA), the head dim of V, else 0 (``Target``)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    draft_tokens: int = 1
    v_head_dim: int = 0


def heads_by_config(model: Any, ranks: int, draft_tokens: int = 1) -> Heads:
    """The heads of each of so many ranks that share them, by SGLang's ``ModelConfig``. With latents
    (MLA), K of a token is its latent and its rope part, and V the latent."""
    queries: int = model.get_num_attention_heads(ranks)
    if model.attention_arch.name == "MLA":
        latent: int = model.kv_lora_rank
        return Heads(queries, 1, latent + model.qk_rope_head_dim, draft_tokens, latent)
    return Heads(queries, model.get_num_kv_heads(ranks), model.head_dim, draft_tokens)


def reads_latents(planned: Target | Heads) -> bool:
    """Whether V is the first part of K."""
    return planned.v_head_dim not in (0, planned.head_dim)


def reason_against_layer(layer: Any, dtype: torch.dtype, pool: Any, planned: Target | Heads) -> str:
    """Why the base must serve a layer (SGLang's ``RadixAttention``), or "" if ``pat`` can.
    ``dtype``: of the queries. Raises what the pool raises for a layer that it does not have."""
    return (
        _against_kind(layer, pool, planned)
        or reason_against_heads(layer, pool.device, draft_tokens=planned.draft_tokens)
        or _against_cache(layer, dtype, pool)
    )


def _against_kind(layer: Any, pool: Any, planned: Target | Heads) -> str:
    mapping = getattr(pool, "layers_mapping", None)  # layer -> (its id in its pool, sliding?)
    window = layer.sliding_window_size
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
    for holds, reason in (
        (layer.is_cross_attention, "cross attention"),
        (layer.attn_type.value != "decoder", f"attention type {layer.attn_type.value}"),
        (window is not None and window > -1, SLIDING),
        (layer.use_irope, CHUNKED),  # FlashAttention attends within chunks of the sequence there
        (layer.xai_temperature_len > 0, TEMPERATURE),
        (
            heads != (planned.num_q_heads, planned.num_kv_heads, planned.num_kv_heads),
            f"{heads} query, K and V heads, planned for others",
        ),
        (
            layer.qk_head_dim != planned.head_dim,
            f"head dim {layer.qk_head_dim}, planned for {planned.head_dim}",
        ),
    ):
        if holds:
            return reason
    if mapping is not None and mapping[layer.layer_id][1]:
        return "its K/V in the sliding-window pool"  # slots beyond it are freed while it runs
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"logit capping by {layer.logit_capping_method}"
    if layer.logit_cap > 0 and planned.draft_tokens > 1 and pool.device != "cpu":
        return CAPPED
    return ""


def reason_against_heads(
    layer: Any, device: str, shared: int | None = None, draft_tokens: int = 1
) -> str:
    """Why the executor of a device has no room for a layer's heads, or "". ``draft_tokens``: of a
    query. ``shared``: bytes of shared memory that a block has on a GPU that is not here; None asks
    ``device``."""
    dims = (layer.qk_head_dim, layer.v_head_dim)
    if torch.device(device).type == "cpu":
        wrong = [dim for dim in dims if dim > MAX_HEAD_DIM or dim % HEAD_DIM_STEP]
        words = f"not a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        return f"head dim {wrong[0]}, {words}" if wrong else ""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    if dims == LATENT_DIMS:
        if group * draft_tokens <= MOST_LATENT_ROWS:
            return ""
        drafts = f"{draft_tokens} draft tokens of " if draft_tokens > 1 else ""
        return f"{drafts}{group} query heads on a latent, of which packing saves nothing"
    if dims[0] != dims[1] or dims[0] not in CUDA_HEAD_DIMS:
        known = f"both one of {CUDA_HEAD_DIMS}, nor {LATENT_DIMS[0]} and {LATENT_DIMS[1]}"
        return f"head dims {dims[0]} and {dims[1]}, not {known}"
    return _against_group(group, draft_tokens) or _against_shared(dims[0], device, shared)


def _against_group(group: int, draft_tokens: int) -> str:
    if group > CUDA_MAX_GROUP:
        return f"{group} query heads per KV head, more than {CUDA_MAX_GROUP}"
    if draft_tokens > 1 and group * draft_tokens > MOST_DRAFT_ROWS:
        return (
            f"{draft_tokens} draft tokens of {group} query heads per KV head: from "
            f"{MOST_DRAFT_ROWS + 1} packed rows a request on, SGLang's attention serves them"
        )
    return ""


def _against_shared(head_dim: int, device: str, shared: int | None) -> str:
    needed = _C.cuda_min_shared_bytes(head_dim)
    if shared is None:
        properties: Any = torch.cuda.get_device_properties(device)
        shared = int(properties.shared_memory_per_block_optin)
    if needed <= shared:
        return ""
    words = f"which needs {needed} bytes of shared memory per block where this GPU has {shared}"
    return f"head dim {head_dim}, {words}"


def _against_cache(layer: Any, dtype: torch.dtype, pool: Any) -> str:
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if keys.shape[1:] != (layer.tp_k_head_num, layer.qk_head_dim):
        return f"a K cache of shape {tuple(keys.shape)}"
    if values.shape[1:] != (layer.tp_v_head_num, layer.v_head_dim):
        return f"a V cache of shape {tuple(values.shape)}"
    if keys.dtype == values.dtype == E4M3:
        device = torch.device(pool.device).type
        return _against_scale(layer.k_scale, layer.k_scale_float, device) or _against_scale(
            layer.v_scale, layer.v_scale_float, device
        )
    for cache in (keys, values):
        if cache.dtype != dtype:
            return f"a {cache.dtype} cache under {dtype} queries"
    return ""


def _against_scale(scale: Any, known: Any, device: str) -> str:
    """``scale``, ``known``: of K or V in fp8_e4m3, on the device and on the host."""
    if scale is None and known is None:
        return ""
    # --quantization-param-path sets the first alone, to a float.
    if scale is None or not isinstance(known, float):
        return "K/V scales that are not both on the device and on the host"
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        return f"{scale.numel()} K/V scales"
    if not 0 < known < inf:
        return f"a K/V scale of {known}"
    if known != 1 and device == "cpu":
        return "K/V scales, which SGLang's attention on a CPU does not apply"
    return ""


def reasons_by_layer(
    model_config: Any, ranks: int, device: str, shared: int | None, draft_tokens: int
) -> list[str]:
    """For each layer of SGLang's ``ModelConfig`` why it is not ours, or "". ``ranks``: that share
    the heads; ``shared``, ``draft_tokens``: as in ``reason_against_heads``."""
    planned = heads_by_config(model_config, ranks)
    heads = SimpleNamespace(
        qk_head_dim=planned.head_dim,
        v_head_dim=planned.v_head_dim or model_config.v_head_dim,
        tp_q_head_num=planned.num_q_heads,
        tp_k_head_num=planned.num_kv_heads,
    )
    of_all = reason_against_heads(heads, device, shared, draft_tokens)
    if device != "cpu" and draft_tokens > 1 and caps_logits(model_config):
        of_all = CAPPED
    return [reason or of_all for reason in kinds(model_config)]


def ranges(layers: list[int]) -> str:
    """Ascending layer ids in words: "0-3, 7", or "0, 2, ... 24 (13 layers)" for many ranges."""
    words = []
    for _, run in groupby(enumerate(layers), lambda numbered: numbered[1] - numbered[0]):
        ids = [layer for _, layer in run]
        words.append(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}")
    if len(words) > 6:
        return f"{', '.join(words[:3])}, ... {words[-1]} ({len(layers)} layers)"
    return ", ".join(words)


def describe(survey: dict[int, str]) -> str:
    """A survey in words."""
    counts = Counter(survey.values())
    ours = counts.pop("", 0)
    if not counts:
        return f"all {ours} attention layers"
    listed = "; ".join(f"{count} with {reason}" for reason, count in counts.items())
    return f"{ours or 'none'} of {len(survey)} attention layers ({listed})"


def survey_layers(runner: Any) -> dict[int, str]:
    """Of each ``RadixAttention`` of the runner's model, by layer id, why it is the base's, or "" if
    it is ours. A layer that the pool has no K/V of is left out: linear attention that is built like
    attention and never comes by, or one that is decided when it does."""
    pool, heads = runner.token_to_kv_pool, heads_of(runner)
    reasons: dict[int, str] = {}
    without: list[int] = []
    fact = facts(runner.model_config)
    for layer in attention_layers(runner.model, heads):
        try:
            pool.get_key_buffer(layer.layer_id)
            reason = fact(layer.layer_id) or reason_against_layer(layer, runner.dtype, pool, heads)
        except (IndexError, KeyError, ValueError):  # as SGLang's pools raise it
            without.append(layer.layer_id)
            continue
        # Where two modules have one id, both are the base's if one is.
        reasons[layer.layer_id] = reasons.get(layer.layer_id) or reason
    if without:
        logger.info(
            "sglang_pat: attention layers %s have no K/V in the pool: decided if they come by",
            ranges(sorted(set(without))),
        )
    return reasons


def attention_layers(model: torch.nn.Module, planned: Heads) -> list[Any]:
    """The ``RadixAttention`` of a model of SGLang that decode."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, RadixAttention):
            found.append(module)
        # Models of transformers get theirs out of a dict, where they are no submodules (S
        # models/transformers.py:651).
        found += getattr(module, "attention_instances", {}).values()
    if not reads_latents(planned):
        return found
    # A layer that reads latents has a second one, which expands them and prefills alone (S
    # models/deepseek_v2.py:2206).
    of_latents = {each.layer_id for each in found if each.qk_head_dim == planned.head_dim}
    return [
        each
        for each in found
        if each.qk_head_dim == planned.head_dim or each.layer_id not in of_latents
    ]


def heads_of(runner: Any) -> Heads:
    """This rank's heads of the model, by SGLang's configuration of it."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    drafts = draft_tokens_of(resolving_view(runner.server_args))
    return heads_by_config(runner.model_config, get_parallel().attn_tp_size, drafts)


class LayerRoutes:
    """The layers that a survey of the model has seen, and others that have come by. ``reporter`` is
    told when pat turns out to serve none."""

    def __init__(self, survey: dict[int, str], target: Target, reporter: Any) -> None:
        self._target = target
        self._reporter = reporter
        self._reasons = dict(survey)  # by layer id: why it is the base's, or ""
        self._surveyed = bool(survey)
        self.of_base = [reason for reason in self._reasons.values() if reason]

    @property
    def all_are_ours(self) -> bool:
        """False before a layer has come by."""
        return bool(self._reasons) and not self.of_base

    @property
    def none_is_ours(self) -> bool:
        """False before a layer has come by."""
        return bool(self._reasons) and len(self.of_base) == len(self._reasons)

    def reason_against(
        self, layer: Any, dtype: torch.dtype, pool: Any, arguments: dict[str, Any]
    ) -> str:
        """Why a layer is the base's, or "" if it is ours. Decided once and kept, but for arguments
        that come later. ``dtype``: of its queries; ``arguments``: what the model gives its
        attention beside what every model gives; one that is None is none."""
        given = sorted(name for name in arguments if not self._takes(layer, name, arguments[name]))
        reason = self._reasons.get(layer.layer_id)
        # The other module of a layer with latents would have its id, and other heads.
        known = not given and layer.qk_head_dim == self._target.head_dim
        if reason is not None and (reason or known):
            return reason
        reason = f"arguments {', '.join(given)}" if given else ""
        reason = reason or reason_against_layer(layer, dtype, pool, self._target)
        self._reasons[layer.layer_id] = reason
        self.of_base = [reason for reason in self._reasons.values() if reason]
        if self._surveyed and self.none_is_ours:
            self._reporter.set_serving(False)
            logger.warning(
                "sglang_pat: serves nothing on this server: the last layer has %s; %s",
                *(reason, CHOOSE_ANOTHER),
            )
        return reason

    def _takes(self, layer: Any, name: str, value: Any) -> bool:
        """Served are sinks or, with latents, the rope parts of q and K."""
        if value is None:
            return True
        if reads_latents(self._target):
            return name in ("q_rope", "k_rope")
        tensor = name == "sinks" and isinstance(value, torch.Tensor)
        return tensor and sinks_fit(value, layer.tp_q_head_num)
