# SPDX-License-Identifier: Apache-2.0
"""Random K/V caches laid out for a tree: shared nodes hold shared slots, at random places."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from benchmarks.common.forests import Forest
from benchmarks.kernel.floor import Heads

_T: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class TreeBatch:
    """Inputs of ``sglang_pat.decode`` for a tree; shapes as there, T being ``draft_tokens``."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: float = 1.0  # 1 unless K and V are in float8_e4m3fn
    v_scale: float = 1.0
    draft_tokens: int = 1
    q_rope: torch.Tensor | None = None  # of latents (MLA): of q and K the last columns
    sinks: torch.Tensor | None = None

    @property
    def whole_q(self) -> torch.Tensor:
        """q as it stands to the whole of K: with ``q_rope`` behind it."""
        return self.q if self.q_rope is None else torch.cat([self.q, self.q_rope], -1)

    @property
    def inputs(self) -> tuple[_T, _T, _T, _T, _T, _T]:
        """The leading arguments of ``decode``."""
        return self.q, self.k_cache, self.v_cache, self.req_to_token, self.rows, self.seq_lens


def slot_table(tree: Forest, *, permuted: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [1 + queries, tokens of the longest] slots of each query from row 1 on, and int64
    [queries] lengths, on the CPU. Slots are 1 to ``unique_tokens``; slot 0 and row 0 belong to
    nobody, as in SGLang. ``permuted`` scatters them, else every node's slots are consecutive. A
    query may share the first tokens of a node only."""
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(1, tree.unique_tokens + 1, dtype=torch.int32)
    if permuted:
        order = order[torch.randperm(len(order), generator=generator)]
    seq_lens = torch.tensor(tree.seq_lens)
    table = torch.zeros((tree.num_queries + 1, int(seq_lens.max())), dtype=torch.int32)
    ends: dict[int, int] = {}
    for path in tree.paths:
        ends |= {node: max(end, ends.get(node, 0)) for node, _, end in path}
    taken = 0
    slots: dict[int, torch.Tensor] = {}
    for query, path in enumerate(tree.paths):
        for node, start, end in path:
            if node not in slots:
                slots[node] = order[taken : taken + ends[node] - start]
                taken += len(slots[node])
            table[query + 1, start:end] = slots[node][: end - start]
        shared = path[-1][2] if path else 0
        tail = int(seq_lens[query]) - shared
        table[query + 1, shared : shared + tail] = order[taken : taken + tail]
        taken += tail
    return table, seq_lens


def make_batch(
    tree: Forest,
    heads: Heads,
    permuted: bool = False,
    draft_tokens: int = 1,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> TreeBatch:
    """Random normal q, K and V, made on ``device``, with the slots of ``slot_table``.
    ``draft_tokens``: rows of q for each query, the last tokens of its sequence."""
    values = torch.Generator(device).manual_seed(0)
    table, seq_lens = slot_table(tree, permuted=permuted)
    num_slots = tree.unique_tokens + 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=values, dtype=dtype, device=device)

    return TreeBatch(
        q=normal(tree.num_queries * draft_tokens, heads.q, heads.dim),
        k_cache=normal(num_slots, heads.kv, heads.dim),
        v_cache=normal(num_slots, heads.kv, heads.dim),
        req_to_token=table.to(device),
        rows=torch.arange(1, tree.num_queries + 1, device=device),
        seq_lens=seq_lens.to(device),
        draft_tokens=draft_tokens,
    )


def quantised(batch: TreeBatch) -> TreeBatch:
    """The batch with K and V in float8_e4m3fn, each by one scale that makes its largest value the
    largest of the dtype, as a calibrated checkpoint has it."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    k_scale, v_scale = (
        float(cache.abs().max()) / largest for cache in (batch.k_cache, batch.v_cache)
    )
    return replace(
        batch,
        k_cache=(batch.k_cache / k_scale).to(torch.float8_e4m3fn),
        v_cache=(batch.v_cache / v_scale).to(torch.float8_e4m3fn),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
