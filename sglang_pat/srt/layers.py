# SPDX-License-Identifier: Apache-2.0
"""Who serves each layer of a model: pat, or SGLang's own attention, and why.

``reason_against_layer`` is asked of the modules of the loaded model (``survey_layers``), of layers
as they come by (``LayerRoutes``), and, by config.json alone, of what stands in for them
(``reasons_by_layer``, for ``sglang-pat doctor``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sglang_pat import _C
from sglang_pat.ops import sinks_fit
from sglang_pat.srt.support import CHOOSE_ANOTHER, E4M3, MOST_DRAFT_ROWS, draft_tokens_of
from sglang_pat.target import HEAD_DIM_STEP, MAX_HEAD_DIM, Target

logger = logging.getLogger("sglang_pat")

SLIDING = "a sliding window"
CHUNKED = "chunked attention (use_irope)"
SPARSE = "sparse attention, which SGLang runs on a backend of its own"
CAPPED = "logit capping, under speculative decoding"
NO_ATTENTION = "no attention: linear attention, a state space or an MLP alone"
# Kinds of layers in config.json that are not ours.
BY_KIND = {
    "sliding_attention": SLIDING,
    "sliding_window": SLIDING,
    "swa": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": NO_ATTENTION,
    "mamba": NO_ATTENTION,
    "conv": NO_ATTENTION,
}
CUDA_HEAD_DIMS, CUDA_MAX_GROUP = _C.CUDA_HEAD_DIMS, _C.CUDA_MAX_GROUP


class Heads(NamedTuple):
    """What plans are made for: this rank's query and KV heads, the head dim, and the draft tokens
    of a request (``Target``)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    draft_tokens: int = 1


def reason_against_layer(layer: Any, dtype: torch.dtype, pool: Any, planned: Target | Heads) -> str:
    """Why the base must serve a layer (SGLang's ``RadixAttention``), or "" if ``pat`` can.

    ``dtype``: of the queries. ``planned``: the heads that plans are made for. Raises what the pool
    raises for a layer that it does not have.
    """
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
        (layer.xai_temperature_len > 0, "a temperature by position"),
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
    query (``Target``).

    ``shared``: bytes of shared memory that one block of the GPU can have, of a GPU that is not
    here; None asks ``device``.
    """
    dims = (layer.qk_head_dim, layer.v_head_dim)
    if torch.device(device).type == "cpu":
        for dim in dims:
            if dim > MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
                return f"head dim {dim}, not a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        return ""
    if dims[0] != dims[1] or dims[0] not in CUDA_HEAD_DIMS:
        return f"head dims {dims[0]} and {dims[1]}, not both one of {CUDA_HEAD_DIMS}"
    group = layer.tp_q_head_num // layer.tp_k_head_num
    if group > CUDA_MAX_GROUP:
        return f"{group} query heads per KV head, more than {CUDA_MAX_GROUP}"
    if draft_tokens > 1 and group * draft_tokens > MOST_DRAFT_ROWS:
        return (
            f"{draft_tokens} draft tokens of {group} query heads per KV head: from "
            f"{MOST_DRAFT_ROWS + 1} packed rows a request on, SGLang's attention serves them"
        )
    needed = _C.cuda_min_shared_bytes(dims[0])
    if shared is None:
        properties: Any = torch.cuda.get_device_properties(device)
        shared = int(properties.shared_memory_per_block_optin)
    if needed > shared:
        return (
            f"head dim {dims[0]}, which needs {needed} bytes of shared memory per block where "
            f"this GPU has {shared}"
        )
    return ""


def _against_cache(layer: Any, dtype: torch.dtype, pool: Any) -> str:
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if keys.shape[1:] != (layer.tp_k_head_num, layer.qk_head_dim):
        return f"a K cache of shape {tuple(keys.shape)}"
    if values.shape[1:] != (layer.tp_v_head_num, layer.v_head_dim):
        return f"a V cache of shape {tuple(values.shape)}"
    if keys.dtype == values.dtype == E4M3:
        on_cpu = torch.device(pool.device).type == "cpu"
        return _against_scale(layer.k_scale, layer.k_scale_float, on_cpu=on_cpu) or _against_scale(
            layer.v_scale, layer.v_scale_float, on_cpu=on_cpu
        )
    for cache in (keys, values):
        if cache.dtype != dtype:
            return f"a {cache.dtype} cache under {dtype} queries"
    return ""


def _against_scale(scale: Any, known: Any, *, on_cpu: bool) -> str:
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
    if known != 1 and on_cpu:
        return "K/V scales, which SGLang's attention on a CPU does not apply"
    return ""


# By config.json alone.


def reasons_by_layer(
    model_config: Any, ranks: int, device: str, shared: int | None, draft_tokens: int
) -> list[str]:
    """For each layer of SGLang's ``ModelConfig`` why it is not ours, or "". ``ranks``: that share
    the heads; ``shared``, ``draft_tokens``: as in ``reason_against_heads``.

    Kinds are from SGLang's own lists where it has them, else from ``layer_types`` of config.json.
    What stands in neither, but in the model's code, is found out only when the server runs.
    """
    heads = SimpleNamespace(
        qk_head_dim=model_config.head_dim,
        v_head_dim=model_config.v_head_dim,
        tp_q_head_num=model_config.get_num_attention_heads(ranks),
        tp_k_head_num=model_config.get_num_kv_heads(ranks),
    )
    of_all = reason_against_heads(heads, device, shared, draft_tokens)
    if device != "cpu" and draft_tokens > 1 and _caps_logits(model_config):
        of_all = CAPPED
    return [reason or of_all for reason in _kinds(model_config)]


def _kinds(model_config: Any) -> list[str]:
    text = model_config.hf_text_config
    reasons = [""] * model_config.num_hidden_layers
    listed = model_config.swa_attention_layer_ids
    if listed is None:
        for layer, kind in enumerate((getattr(text, "layer_types", None) or ())[: len(reasons)]):
            reasons[layer] = BY_KIND.get(kind, "")
    # Those that SGLang counts as windowed are Llama 4's chunks: MiMo has a chunk size in its
    # config.json, too, and windows in its layers.
    llama4 = any("Llama4" in name for name in model_config.hf_config.architectures or ())
    for layer in listed or ():
        reasons[layer] = CHUNKED if llama4 else SLIDING
    for layer in sparse_layers(model_config):
        reasons[layer] = SPARSE
    for config in (model_config.hf_config, text):  # of a hybrid of SGLang's configurations
        attends: Iterable[int] | None = getattr(config, "full_attention_layer_ids", None)
        if attends is not None:
            for layer in set(range(len(reasons))) - set(attends):
                reasons[layer] = NO_ATTENTION
            break
    return reasons


def _caps_logits(model_config: Any) -> bool:
    """Whether the attention logits are capped, in all layers: by the code of the two models that
    do (S models/gemma2.py:161, grok.py:425, ``S`` being SGLang 0.5.23's ``srt/``)."""
    names = model_config.hf_config.architectures or ()
    if not any(name.startswith(("Gemma2", "Grok1")) for name in names):
        return False
    cap = getattr(model_config.hf_text_config, "attn_logit_softcapping", 30.0)
    return cap is not None and cap > 0


def sparse_layers(model_config: Any) -> list[int]:
    """Layers that SGLang's wrapper keeps from us, of models with attention of two kinds (MiniMax
    M3): to look at, they are attention like any other."""
    from sglang.srt.configs import model_config as configs

    config = model_config.hf_config
    if not configs.is_minimax_sparse(config):
        return []
    sparse = configs.get_minimax_sparse_attention_config(config)
    return list(configs.get_minimax_sparse_layer_ids(sparse)[1])


def ranges(layers: list[int]) -> str:
    """Ascending layer ids in words: "0-3, 7", or "0, 2, ... 24 (13 layers)" for many ranges."""
    words = []
    for _, run in groupby(enumerate(layers), lambda numbered: numbered[1] - numbered[0]):
        ids = [layer for _, layer in run]
        words.append(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}")
    if len(words) > 6:
        return f"{', '.join(words[:3])}, ... {words[-1]} ({len(layers)} layers)"
    return ", ".join(words)


# Of a loaded model.


@dataclass(frozen=True)
class Survey:
    """``reasons``: why a layer is the base's, or "" if it is ours, by layer id."""

    reasons: dict[int, str]

    @property
    def serves_none(self) -> bool:
        """Whether there are attention layers, and none of them is ours."""
        return bool(self.reasons) and all(self.reasons.values())

    def __str__(self) -> str:
        counts = Counter(self.reasons.values())
        total, ours = len(self.reasons), counts.pop("", 0)
        if not counts:
            return f"all {total} attention layers"
        listed = "; ".join(f"{count} with {reason}" for reason, count in counts.items())
        return f"{ours or 'none'} of {total} attention layers ({listed})"


def survey_layers(runner: Any) -> Survey:
    """Decide of each ``RadixAttention`` of the runner's model whether it is ours.

    A layer that the pool has no K/V of is left out: linear attention that is built like attention
    and never comes by, or one that is decided when it does, as are layers that hand over arguments
    which are not known before.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    pool, heads = runner.token_to_kv_pool, heads_of(runner)
    reasons: dict[int, str] = {}
    without: list[int] = []
    sparse = sparse_layers(runner.model_config)
    for layer in runner.model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        try:
            pool.get_key_buffer(layer.layer_id)
            reason = reason_against_layer(layer, runner.dtype, pool, heads)
            reason = SPARSE if layer.layer_id in sparse else reason
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
    return Survey(reasons)


def heads_of(runner: Any) -> Heads:
    """This rank's heads of the model, by SGLang's configuration of it."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel().attn_tp_size
    model = runner.model_config
    return Heads(
        model.num_attention_heads // ranks,
        model.get_num_kv_heads(ranks),
        model.head_dim,
        draft_tokens_of(resolving_view(runner.server_args)),
    )


def _are_sinks(value: object, num_q_heads: int) -> bool:
    """Whether an argument is attention sinks that the executors can read."""
    return isinstance(value, torch.Tensor) and sinks_fit(value, num_q_heads)


class LayerRoutes:
    """The layers that have come by, or that a survey of the model has seen.

    ``survey``: layers that it lacks are decided when they come by. ``reporter``: is told when pat
    turns out to serve none.
    """

    def __init__(self, survey: Survey | None, target: Target, reporter: Any) -> None:
        self._target = target
        self._reporter = reporter
        # By layer id: why the layer is the base's, or "". Then the reasons of those that are.
        self._reasons = dict(survey.reasons) if survey else {}
        self._surveyed = bool(self._reasons)
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
        attention beside what every model gives; one that is None is none, and sinks are served."""
        given = sorted(
            name
            for name, value in arguments.items()
            if not (value is None or (name == "sinks" and _are_sinks(value, layer.tp_q_head_num)))
        )
        reason = self._reasons.get(layer.layer_id)
        if reason is not None and (reason or not given):
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
