# SPDX-License-Identifier: Apache-2.0
"""Which attention layers of a loaded model ``pat`` serves, before the first forward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_pat.srt import refusals
from sglang_pat.srt.layers import SPARSE, Heads, ranges, sparse_layers
from sglang_pat.srt.speculation import draft_tokens_of

logger = logging.getLogger("sglang_pat")


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
    pool, heads = runner.token_to_kv_pool, heads_of(runner)
    reasons: dict[int, str] = {}
    without: list[int] = []
    sparse = sparse_layers(runner.model_config)
    for layer in _attention_layers(runner.model):
        try:
            pool.get_key_buffer(layer.layer_id)
            reason = refusals.reason_against_layer(layer, runner.dtype, pool, heads)
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


def _attention_layers(model: Any) -> Iterator[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            yield module
