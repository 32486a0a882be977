# SPDX-License-Identifier: Apache-2.0
"""The heads that a plan is made for, from a model and options."""

from __future__ import annotations

from dataclasses import replace

from sglang_pat import _C
from sglang_pat.estimate.model import Model
from sglang_pat.estimate.requests import InputError


def heads_of_rank(model: Model, heads: str | None, tp: int) -> tuple[Model, int, int]:
    """The model with ``heads`` (as "32/8") in place of its own, if given, and the query and KV
    heads of one of ``tp`` ranks. As in SGLang a rank has one KV head where there are fewer of them
    than ranks.

    Raises InputError for heads that make no sense or that pat's CUDA kernels do not have.
    """
    if heads is not None:
        query, _, kv = heads.partition("/")
        if not (query.isdecimal() and kv.isdecimal()):
            raise InputError(f"--heads is {heads!r}, must be QUERY/KV, as 32/8")
        model = replace(model, q_heads=int(query), kv_heads=int(kv))
    q_heads, kv_heads = model.q_heads, model.kv_heads
    if min(q_heads, kv_heads) < 1 or q_heads % kv_heads:
        raise InputError(
            f"the heads are {q_heads}/{kv_heads}: the KV heads must divide the query heads; give "
            "others with --heads, as 32/8"
        )
    if q_heads % tp or (kv_heads % tp and tp % kv_heads):
        raise InputError(
            f"--tp is {tp}: it must divide the {q_heads} query heads, and divide the {kv_heads} KV "
            "heads or be a multiple of them"
        )
    q_heads, kv_heads = q_heads // tp, max(1, kv_heads // tp)
    if q_heads // kv_heads > _C.CUDA_MAX_GROUP:
        raise InputError(
            f"{q_heads} query heads share {kv_heads} KV heads on a GPU: pat's kernels have up to "
            f"{_C.CUDA_MAX_GROUP} query heads a KV head, so SGLang's own attention runs this model"
        )
    if model.head_dim not in _C.CUDA_HEAD_DIMS:
        raise InputError(
            f"the head dim is {model.head_dim}: pat's kernels have "
            f"{', '.join(map(str, _C.CUDA_HEAD_DIMS))}, so SGLang's own attention runs other layers"
        )
    return model, q_heads, kv_heads
