# SPDX-License-Identifier: Apache-2.0
"""One decode step and layer of pat on a CUDA device, ready to be captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.common import reference
from benchmarks.common.forests import Forest
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import TreeBatch, make_batch, relative
from sglang_pat import Target, decode
from sglang_pat.config import PatConfig
from sglang_pat.planner import Plan, Planner
from sglang_pat.target import LATENT_DIMS
from sglang_pat.workspace import Workspace

CHECKED_QUERIES = 6

# Dtypes of K and V, as ``--kv-cache-dtype`` of a server names them.
KV_DTYPES = ("bfloat16", E4M3 := "fp8_e4m3")

device_batch = partial(make_batch, dtype=torch.bfloat16, device="cuda")


@dataclass(frozen=True, slots=True)
class PatOptions:
    """What can be chosen about pat: see ``Target`` and ``Workspace``. ``kv_dtype``: of K and V, of
    ``KV_DTYPES``. ``draft_tokens``: of a query, 1 in a decode step."""

    policy: str = "default"
    cuts: tuple[str, ...] | None = None  # None: the GPU's
    kv_dtype: str = "bfloat16"
    draft_tokens: int = 1

    @property
    def e4m3(self) -> bool:
        """Whether K and V are in float8_e4m3fn, with scales."""
        return self.kv_dtype == E4M3

    @property
    def kv_bytes(self) -> int:
        """Of an element of K or V."""
        return 1 if self.e4m3 else 2

    def target(self, tree: Forest, heads: Heads) -> Target:
        """As a server makes its own: for the GPU at hand, an H200 if there is none. The paper's
        split makes up to 17 partial results a query, so there is more room, lest plans are made
        without it."""
        values: dict[str, Any] = {
            "num_q_heads": heads.q,
            "num_kv_heads": heads.kv,
            "head_dim": heads.dim,
            "v_head_dim": LATENT_DIMS[1] if heads.dim == LATENT_DIMS[0] else heads.dim,
            "max_queries": tree.num_queries,
            "draft_tokens": self.draft_tokens,
            "kv_bytes": self.kv_bytes,
            "policy": self.policy,
        }
        if self.cuts is not None:
            values["cuts"] = self.cuts
        if self.policy == "pat":
            values["max_items"] = 16 * tree.num_queries + 1024
            values["max_partials"] = 32 * tree.num_queries + 2048
        if torch.cuda.device_count() == 0:
            return Target.h200(**values)
        return Target.gpu(torch.cuda.get_device_properties(), **values)


class Layer:
    """What pat does for a batch: a plan, the snapshot of its slots, the attention of a layer."""

    def __init__(
        self,
        batch: TreeBatch,
        tree: Forest,
        heads: Heads,
        settings: PatOptions,
        scale: float,
        plan: Plan | None = None,
    ) -> None:
        """``plan``: one of other rules, which gets the room that it needs."""
        target = settings.target(tree, heads)
        self.batch, self.scale = batch, scale
        self.plan = plan or Planner(target).plan(tree.paths, tree.seq_lens)
        self.workspace = Workspace(
            replace(
                target,
                max_items=max(target.max_items, self.plan.num_items),
                max_partials=max(target.max_partials, self.plan.num_partials),
            ),
            batch.req_to_token.shape[1],
            batch.q.device,
            launch=PatConfig(policy=settings.policy).launch,
        )
        self.workspace.load(self.plan)
        self.workspace.snapshot(batch.req_to_token, batch.rows, batch.seq_lens)
        self._out = batch.q.new_empty(batch.q.shape)

    def attend(self) -> torch.Tensor:
        """Forward and merge, [B * T, Hq, D] with T draft tokens a query."""
        return decode(
            *self.batch.inputs,
            self.plan,
            scale=self.scale,
            k_scale=self.batch.k_scale,
            v_scale=self.batch.v_scale,
            q_rope=self.batch.q_rope,
            sinks=self.batch.sinks,
            out=self._out,
            workspace=self.workspace,
        )


def error_of(out: torch.Tensor, batch: TreeBatch, scale: float) -> float:
    """Relative norm of the difference of ``out`` [B * T, Hq, D] from fp32 attention of K and V as
    they are stored, over a few queries from the first to the last, with all of their draft tokens.
    """
    queries, draft_tokens = len(batch.rows), batch.draft_tokens
    count = min(CHECKED_QUERIES, queries)
    some = torch.linspace(0, queries - 1, count, device=batch.q.device).round().long()
    of_query = torch.arange(draft_tokens, device=batch.q.device)
    rows = (some[:, None] * draft_tokens + of_query).flatten()
    q = batch.whole_q[rows]
    chosen = replace(batch, q=q, rows=batch.rows[some], seq_lens=batch.seq_lens[some])
    how: dict[str, Any] = {"k_scale": batch.k_scale, "v_scale": batch.v_scale, "sinks": batch.sinks}
    how |= {"scale": scale, "draft_tokens": draft_tokens}
    expected, _ = reference.attention(*chosen.inputs, **how)
    return relative(out[rows], expected)
