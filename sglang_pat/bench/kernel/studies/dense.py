# SPDX-License-Identifier: Apache-2.0
"""Peers that take K and V as [B, L, Hkv, D], without slots: what paging is compared with.

They take batches of equal lengths that share nothing and have consecutive slots, one query after
the other, and read the very K and V of the other peers.
"""

from __future__ import annotations

from importlib import import_module

import torch

from sglang_pat.bench.common.trees import Requests
from sglang_pat.bench.kernel.kv import TreeBatch
from sglang_pat.bench.kernel.peers import Maker, Run


def _caches(batch: TreeBatch, tree: Requests) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, [B, L, Hkv, D].

    Raises ValueError for a batch that has no such view.
    """
    lengths = set(tree.seq_lens)
    tokens = max(lengths)
    if len(lengths) > 1 or any(tree.paths):
        raise ValueError(
            f"{tree}: lengths differ or tokens are shared, so K and V are not [B, L, Hkv, D]; "
            "leave peers without slots out"
        )
    slots = batch.req_to_token[batch.rows][:, :tokens].flatten()
    consecutive = torch.arange(1, len(slots) + 1, dtype=slots.dtype, device=slots.device)
    if not torch.equal(slots, consecutive):
        raise ValueError(f"{tree}: slots are not consecutive; leave peers without slots out")
    shape = (tree.num_queries, tokens, *batch.k_cache.shape[1:])
    end = len(slots) + 1
    return batch.k_cache[1:end].view(shape), batch.v_cache[1:end].view(shape)


def fa3(batch: TreeBatch, tree: Requests, scale: float) -> Run:
    """``flash_attn_with_kvcache`` of sgl-kernel without a page table."""
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    keys, values = _caches(batch, tree)
    lens = batch.seq_lens.int()

    def run() -> torch.Tensor:
        out: torch.Tensor = attend(
            batch.q.unsqueeze(1),
            keys,
            values,
            cache_seqlens=lens,
            softmax_scale=scale,
            causal=True,
        )
        return out.squeeze(1)

    return run


def sdpa(batch: TreeBatch, tree: Requests, scale: float) -> Run:
    """``torch.nn.functional.scaled_dot_product_attention``, the kernel that torch chooses."""
    keys, values = (cache.transpose(1, 2) for cache in _caches(batch, tree))
    grouped = batch.q.shape[1] != keys.shape[1]

    def run() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            batch.q.unsqueeze(2), keys, values, scale=scale, enable_gqa=grouped
        )
        return out.squeeze(2)

    return run


PEERS: dict[str, Maker] = {"fa3-dense": fa3, "sdpa-dense": sdpa}
