# SPDX-License-Identifier: Apache-2.0
"""Is it worth copying K and V together? PackInfer does so for each of its groups.

Slots of a pool in use lie at random places. ``in_place`` attends to them there. ``copied`` first
copies all K and V of the batch, as often as they are unique, into buffers in which those of a node
or tail are consecutive, and attends to these: what a step takes in which a plan's copy is made.
Later steps of that plan read the buffers, in the time of the default with consecutive slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.kv import TreeBatch, slot_table
from sglang_pat.bench.kernel.layer import Layer, PatOptions
from sglang_pat.bench.kernel.peers import Maker, Run


def _layer(batch: TreeBatch, tree: Requests, scale: float) -> Layer:
    _, q_heads, head_dim = batch.q.shape
    heads = Heads(q_heads, batch.k_cache.shape[1], head_dim)
    return Layer(batch, tree, heads, PatOptions(), scale)


def in_place(batch: TreeBatch, tree: Requests, scale: float) -> Run:
    """The default's forward and merge."""
    return _layer(batch, tree, scale).attend


def copied(batch: TreeBatch, tree: Requests, scale: float) -> Run:
    """The same behind a copy of K and V, a call of ``torch.index_select`` each."""
    table, _ = slot_table(tree, permuted=False)
    table = table.to(batch.req_to_token.device)
    # Which slot of the pool a slot of the buffers is copied from; 0 belongs to nobody.
    sources = torch.zeros(tree.unique_tokens + 1, dtype=torch.int64, device=table.device)
    sources[table.long()] = batch.req_to_token.long()
    keys, values = (cache[sources] for cache in (batch.k_cache, batch.v_cache))
    together = replace(batch, k_cache=keys, v_cache=values, req_to_token=table)
    layer = _layer(together, tree, scale)

    def run() -> torch.Tensor:
        torch.index_select(batch.k_cache, 0, sources, out=keys)
        torch.index_select(batch.v_cache, 0, sources, out=values)
        return layer.attend()

    return run


PEERS: dict[str, Maker] = {"in place": in_place, "copied": copied}
