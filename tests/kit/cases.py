# SPDX-License-Identifier: Apache-2.0
"""Inputs to execute plans of hand on, and the CPU executor compared with attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.common.reference import attention
from kit.pieces import DYNAMIC, Parts, Piece, branched, pieces_of
from kit.plans import HandPlan, encode
from sglang_pat import decode

E4M3 = torch.float8_e4m3fn
# Of the CPU executor, relative to the norm of the output: what sums in fp32 leave, or what rounds
# to q's dtype.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """Inputs of one step; every slot that no query owns holds NaN. ``draft_tokens``: rows of q of
    each query; ``draft_masks``: int64 [B, T], what they attend to if they are a tree."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    pieces: Parts
    scale: float
    logit_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    draft_tokens: int = 1
    draft_masks: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The leading arguments of ``decode``."""
        return self.q, self.k, self.v, self.table, self.rows, self.seq_lens

    @property
    def options(self) -> dict[str, Any]:
        """``decode``'s factors, draft masks and sinks."""
        names = ("scale", "logit_cap", "k_scale", "v_scale", "draft_masks", "sinks")
        return {name: getattr(self, name) for name in names}

    def plan(self, wide: bool = False) -> HandPlan:
        return encode(self.pieces, len(self.rows), self.heads, wide, self.draft_tokens)

    def to(self, dtype: torch.dtype) -> Case:
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def to_e4m3(self, k_scale: float = 1.0, v_scale: float = 1.0) -> Case:
        """With K and V divided by their scales and stored in float8_e4m3fn."""
        k, v = (self.k.float() / k_scale).to(E4M3), (self.v.float() / v_scale).to(E4M3)
        return replace(self, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def truth(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE by definition, computed in ``dtype``."""
        return attention(*self.inputs, **self.options, draft_tokens=self.draft_tokens, dtype=dtype)


def case(
    parts: Parts,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    v_head_dim: int | None = None,
    *,
    seed: int = 0,
    tails: tuple[int, ...] = (0, 1, 7, 63, 64, 65, 130),
    logit_cap: float = 0.0,
    draft_tokens: int = 1,
) -> Case:
    """Random inputs for pieces of queries 0...n - 1: dynamic pieces get a length of ``tails``, rows
    and slots are shuffled, and strides are wider than the tensors."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    pieces = pieces_of(parts)
    num_queries = 1 + max((query for piece in pieces for query in piece.queries), default=-1)
    lengths = [
        int(rng.choice(tails)) if piece.length == DYNAMIC else piece.length for piece in pieces
    ]
    seq_lens = np.zeros(num_queries, np.int64)
    for piece, length in zip(pieces, lengths, strict=True):
        for query in piece.queries:
            seq_lens[query] = max(seq_lens[query], piece.start + length)
    owned = sum(lengths)
    num_slots = owned + 50
    slots = rng.permutation(num_slots)
    rows = rng.permutation(num_queries + 3)[:num_queries]
    width = int(seq_lens.max(initial=0)) + 5
    # What no token owns names a slot of NaN, too.
    table = np.full((num_queries + 3, width), slots[-1], np.int32)
    used = 0
    for piece, length in zip(pieces, lengths, strict=True):
        for query in piece.queries:
            table[rows[query], piece.start : piece.start + length] = slots[used : used + length]
        used += length
    num_q_heads, num_kv_heads = heads
    v_dim = v_head_dim or head_dim
    unowned = torch.from_numpy(slots[owned:].astype(np.int64))
    k = torch.randn(num_slots, num_kv_heads + 1, head_dim + 8)
    v = torch.randn(num_slots, num_kv_heads + 2, v_dim)
    k[unowned] = v[unowned] = float("nan")
    return Case(
        q=torch.randn(num_queries * draft_tokens, num_q_heads, head_dim + 3)[..., :head_dim],
        k=k[:, :num_kv_heads, :head_dim],
        v=v[:, 2:],
        table=torch.from_numpy(table),
        rows=torch.from_numpy(rows),
        seq_lens=torch.from_numpy(seq_lens),
        pieces=parts,
        scale=head_dim**-0.5,
        logit_cap=logit_cap,
        draft_tokens=draft_tokens,
    )


def random_trees(inputs: Case, seed: int = 0) -> Case:
    """With drafts that are trees: each draft token behind a random one before it."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((len(inputs.rows), inputs.draft_tokens), np.uint64)
    for of_query in masks:
        of_query[0] = 1
        for i in range(1, inputs.draft_tokens):
            of_query[i] = of_query[rng.integers(i)] | np.uint64(1 << i)
    return replace(inputs, draft_masks=torch.from_numpy(masks.view(np.int64)))


def by_hand(pieces: list[Piece], heads: tuple[int, int], **options: Any) -> Case:
    """A case with all pieces in branches, of 64 packed rows or so many queries."""
    rows = heads[0] // heads[1] * options.get("draft_tokens", 1)
    most = options.pop("most", 64 // rows)
    inputs = case(pieces, heads, **options)
    return replace(inputs, pieces=branched(pieces, most))


def grown(inputs: Case, seq_lens: list[int], seed: int = 0) -> Case:
    """The case with longer sequences, of slots beyond its own."""
    torch.manual_seed(seed)
    add = np.array(seq_lens) - inputs.seq_lens.numpy()
    slots, width = len(inputs.k), max(seq_lens) + 1
    table = torch.full((len(inputs.table), width), slots - 1, dtype=torch.int32)
    copied = min(width, inputs.table.shape[1])
    table[:, :copied] = inputs.table[:, :copied]
    first = slots
    for row, old, more in zip(inputs.rows.tolist(), inputs.seq_lens.tolist(), add, strict=True):
        table[row, old : old + more] = torch.arange(first, first + more)
        first += int(more)
    more_k, more_v = (
        torch.randn(first - slots, *t.shape[1:]).to(t.dtype) for t in (inputs.k, inputs.v)
    )
    return replace(
        inputs,
        k=torch.cat([inputs.k, more_k]),
        v=torch.cat([inputs.v, more_v]),
        table=table,
        seq_lens=torch.tensor(seq_lens),
    )


def execute(
    inputs: Case, plan: Any = None, *, threads: int = 2, partial: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the CPU executor on a plan, by default the case's. Returns the output [B * T, Hq, Dv], a
    view of a wider tensor that held NaN before, and the LSE [B * T, Hq]."""
    num_rows, num_q_heads, _ = inputs.q.shape
    v_head_dim = inputs.v.shape[2]
    wide = torch.full((num_rows, num_q_heads + 1, v_head_dim + 5), float("nan"))
    out = wide.to(inputs.q.dtype)[:, 1:, :v_head_dim]
    lse = torch.full((num_rows, num_q_heads), float("nan"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = plan or inputs.plan()
        decode(*inputs.inputs, made, **inputs.options, out=out, lse=lse, partial_dtype=partial)
    finally:
        torch.set_num_threads(before)
    return out, lse


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference relative to the norm; infinite if any element is NaN."""
    distance = (out.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    return float(distance.nan_to_num(nan=float("inf")))


def check(inputs: Case, plan: Any = None, bound: float = 0.0, **options: Any) -> torch.Tensor:
    """Execute and compare with the definition. Scores are sums of |q| |k| at most, rounded in fp32;
    an error of a score is a relative error of its token's weight."""
    greatest = inputs.q.norm(dim=-1).max() * inputs.k.float().norm(dim=-1).nan_to_num(0.0).max()
    rounding = 2**-23 * inputs.scale * inputs.k_scale * float(greatest)
    truth, truth_lse = inputs.truth()
    out, lse = execute(inputs, plan, **options)
    assert error(out, truth) < (bound or BOUNDS[inputs.q.dtype]) + rounding
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-6, atol=1e-6 + 2 * rounding)
    return out
