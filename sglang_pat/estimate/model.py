# SPDX-License-Identifier: Apache-2.0
"""A model as far as the time of a decode step depends on it, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.model import SHAPES
from sglang_pat.estimate.layers import DEFAULTS, full_attention_layers, reason_against
from sglang_pat.estimate.requests import InputError, fail

_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder over all GPUs. ``attention_layers``: those of ``layers`` with full
    attention, in which pat can gain; ``dense``: weights that every step reads and every token is
    multiplied with; ``expert``: weights of one expert of all layers, ``experts`` and
    ``experts_per_token`` how many there are and how many a token takes (0 in a dense model);
    ``weight_bytes``: bytes of a weight."""

    name: str
    layers: int
    attention_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dense: float
    expert: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    weight_bytes: float = 2.0

    def bytes_read(self, queries: int) -> float:
        """Of the weights, in a step of so many queries. Experts are taken to be chosen evenly."""
        if not self.experts:
            return self.dense * self.weight_bytes
        missed = (1 - self.experts_per_token / self.experts) ** queries
        return (self.dense + self.expert * self.experts * (1 - missed)) * self.weight_bytes

    def flops(self, queries: int) -> float:
        """Multiplications and additions with weights, in a step of so many queries."""
        return 2.0 * queries * (self.dense + self.expert * self.experts_per_token)


def open_model(name: str) -> Model:
    """A shape of the benchmarks (``llama3-8b``, ``qwen3-8b``), or the folder of a model, of which
    config.json is read.

    Raises InputError for neither, for a config.json without the sizes, and for a model that pat
    does not serve.
    """
    if name in SHAPES:
        return _model(name, SHAPES[name])
    path = Path(name)
    path = path if path.name == "config.json" else path / "config.json"
    if not path.is_file():
        raise InputError(
            f"--model is {name!r}, must be a folder with a config.json or one of "
            f"{', '.join(SHAPES)}"
        )
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"--model {name}: {path} is not JSON: {error}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        named = {"architectures": config.get("architectures")}
        config = {**config, **config["text_config"], **named}
    if isinstance(config, dict):
        config = {**DEFAULTS.get(str(config.get("model_type")), {}), **config}
    if not isinstance(config, dict) or any(not _is_size(config.get(key)) for key in _NEEDED):
        fail(f"--model {name}", f"{path} must have {', '.join(_NEEDED)}, each 1 or more")
    return _model(name, config)


def _model(name: str, config: Mapping[str, Any]) -> Model:
    if reason := reason_against(config):
        raise InputError(f"--model {name}: {reason} (docs/support.md)")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    experts = _first(config, _EXPERTS)
    width = config.get("intermediate_size") or 4 * hidden
    shared = 0
    if experts:
        width = config.get("moe_intermediate_size") or width
        shared = config.get("shared_expert_intermediate_size") or width * (
            config.get("n_shared_experts") or 0
        )
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    mlp = 3 * hidden * (shared if experts else width)
    # Of the embedding a step reads a row a token; the head it reads in full.
    dense = layers * (attention + mlp) + config["vocab_size"] * hidden
    return Model(
        name,
        layers,
        full_attention_layers(config),
        heads,
        kv_heads,
        head_dim,
        float(dense),
        float(layers * 3 * hidden * width) if experts else 0.0,
        experts,
        min(_first(config, _PER_TOKEN) or 1, experts),
        _weight_bytes(config),
    )


def _weight_bytes(config: Mapping[str, Any]) -> float:
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        bits = quantized.get("bits") or quantized.get("w_bit")
        if bits:
            return float(bits) / 8
        return 1.0 if "fp8" in str(quantized.get("quant_method")) else 2.0
    return 2.0  # SGLang loads float32 in 16 bits, too, and pat's kernels on a GPU take no other


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((int(config[name]) for name in names if _is_size(config.get(name))), 0)


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
