# SPDX-License-Identifier: Apache-2.0
"""Decode attention of MLA (one KV head, latents of 576 numbers of which 512 are V, bf16): plans of
this package, FA3 and FlashMLA, called as SGLang calls them, as captured graphs over a cold L2.

    python -m benchmarks.kernel.latents [--only NAME] [--ragged] [--peers]

``ours`` is forward and merge of one layer. The error is that of the output of the first queries,
relative to attention in fp32 over the same inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from benchmarks.common.forests import Forest, all_forests
from benchmarks.common.reference import attention
from benchmarks.kernel.clock import Clock, capture
from benchmarks.kernel.kv import relative, slot_table
from sglang_pat.ops import decode
from sglang_pat.planner import Planner
from sglang_pat.target import LATENT_DIMS, Target
from sglang_pat.workspace import Workspace

K_DIM, V_DIM = LATENT_DIMS
BF16 = torch.bfloat16
# What DeepSeek scales by: heads of 128 + 64 before absorption.
SCALE = 192**-0.5
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    heads: int
    requests: Forest

    @property
    def name(self) -> str:
        return f"{self.heads}h_{self.requests}"


def on_prefixes(groups: int, queries: int, shared: int, own: int) -> Forest:
    """``groups`` of ``queries`` requests each, which share ``shared`` tokens and have ``own``."""
    count = groups * queries
    paths = [[(i // queries, 0, shared)] * (queries > 1) for i in range(count)]
    return Forest(f"{groups}x{queries}_{shared}+{own}", paths, [shared + own] * count)


BATCHES = (
    *(Batch(heads, on_prefixes(1, 128, 8192, 256)) for heads in (8, 16, 20, 32)),
    Batch(16, on_prefixes(1, 64, 4096, 256)),
    Batch(16, on_prefixes(8, 16, 2048, 256)),
    Batch(16, on_prefixes(1, 16, 8192, 512)),
    Batch(16, on_prefixes(1, 8, 6016, 128)),
    Batch(16, on_prefixes(64, 1, 0, 2048)),
    Batch(16, on_prefixes(1, 1, 0, 8192)),
)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor  # [B, heads, 512], by head and then by query, as SGLang has it
    q_rope: torch.Tensor  # [B, heads, 64]
    latents: torch.Tensor  # [slots, 1, 576]
    table: torch.Tensor  # int32 [B, tokens]
    lens: torch.Tensor  # int32 [B]
    paths: list[list[tuple[int, int, int]]]


def inputs_of(batch: Batch) -> Inputs:
    requests, total = batch.requests, batch.requests.num_queries
    table, lens = slot_table(requests)
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16)

    return Inputs(
        q=random(batch.heads, total, V_DIM).transpose(0, 1),
        q_rope=random(total, batch.heads, 64),
        latents=random(requests.unique_tokens + 1, 1, K_DIM),
        table=table[1:].contiguous().cuda(),
        lens=lens.int().cuda(),
        paths=requests.paths,
    )


def ours(inputs: Inputs) -> tuple[Run, str]:
    """What a layer runs, and the plan in short."""
    total, heads, _ = inputs.q.shape
    target = Target.h200(
        num_q_heads=heads,
        num_kv_heads=1,
        head_dim=K_DIM,
        v_head_dim=V_DIM,
        max_queries=total,
    )
    plan = Planner(target).plan(inputs.paths, inputs.lens.tolist())
    workspace = Workspace(target, inputs.table.shape[1])
    rows = torch.arange(total, device="cuda")
    workspace.load(plan)
    workspace.snapshot(inputs.table, rows, inputs.lens)
    out = torch.empty(total, heads, V_DIM, device="cuda", dtype=BF16)
    latents = inputs.latents

    def run() -> torch.Tensor:
        return decode(
            inputs.q,
            latents,
            latents[..., :V_DIM],
            inputs.table,
            rows,
            inputs.lens,
            plan,
            scale=SCALE,
            q_rope=inputs.q_rope,
            out=out,
            workspace=workspace,
        )

    return run, f"{plan.num_items} items, {plan.num_partials} partials"


def in_pages(inputs: Inputs, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [pages, ``page``, 1, 576] and the page table, int32 [B, pages]. Pages of more than a
    token hold a copy in order: each prefix has its own in place of the pool's."""
    latents, table = inputs.latents, inputs.table
    total, tokens = table.shape
    if page > 1:
        whole = -(-tokens // page)
        used = torch.zeros(total, whole * page, dtype=torch.long, device="cuda")
        used[:, :tokens] = table
        firsts, index = torch.unique(used.view(-1, page), dim=0, return_inverse=True)
        latents = latents[firsts.flatten()].contiguous()
        table = index.view(total, whole).int().contiguous()
    return latents.view(-1, page, 1, K_DIM), table


def flash_mla(inputs: Inputs) -> Run:
    """FlashMLA, with pages of 64 tokens and its schedule made before, once a step as in SGLang."""
    ops = import_module("sglang.kernels.ops.attention.flash_mla_interface")
    pages, table = in_pages(inputs, 64)
    q = torch.cat([inputs.q, inputs.q_rope], -1).unsqueeze(1)  # [B, 1, heads, 576]
    schedule, splits = ops.get_mla_metadata(inputs.lens, q.shape[2], 1)

    def run() -> torch.Tensor:
        out: torch.Tensor = ops.flash_mla_with_kvcache(
            q=q,
            k_cache=pages,
            block_table=table,
            cache_seqlens=inputs.lens,
            head_dim_v=V_DIM,
            tile_scheduler_metadata=schedule,
            num_splits=splits,
            softmax_scale=SCALE,
            causal=True,
        )[0]
        return out

    return run


def fa3(inputs: Inputs, page: int) -> Run:
    """FA3's form for MLA with pages of ``page`` tokens."""
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    pages, table = in_pages(inputs, page)
    total = len(table)
    q, rope = inputs.q, inputs.q_rope
    offsets = torch.arange(total + 1, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        out: torch.Tensor = attend(
            q=rope,
            k_cache=pages[..., V_DIM:],
            v_cache=pages[..., :V_DIM],
            qv=q,
            page_table=table,
            cache_seqlens=inputs.lens,
            cu_seqlens_q=offsets,
            max_seqlen_q=1,
            softmax_scale=SCALE,
            causal=True,
        )
        return out

    return run


def error(out: torch.Tensor, inputs: Inputs, queries: int = 4) -> float:
    """Of the first queries' output, the norm of the difference over the norm."""
    q = torch.cat([inputs.q, inputs.q_rope], -1)[:queries]
    rows = torch.arange(len(q), device=q.device)
    k, lens = inputs.latents, inputs.lens[:queries]
    want, _ = attention(q, k, k[..., :V_DIM], inputs.table, rows, lens, scale=SCALE)
    return relative(out[:queries].view_as(want), want)


def measure(batch: Batch, clock: Clock, with_peers: bool) -> dict[str, Any]:
    inputs = inputs_of(batch)
    run, plan = ours(inputs)
    runs = {"ours": run}
    row: dict[str, Any] = {"batch": batch.name, "plan": plan}
    if with_peers:
        runs |= {"fa3_1": fa3(inputs, 1), "fa3_64": fa3(inputs, 64), "flashmla": flash_mla(inputs)}
    captured = {name: capture(run) for name, run in runs.items()}
    for name, graph in captured.items():
        graph.replay()
        assert graph.out is not None
        row["error_" + name] = error(graph.out, inputs)
    medians, row["noise"] = clock.compare({name: c.replay for name, c in captured.items()})
    return row | {"us_" + name: time for name, time in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="batches whose names have this")
    parser.add_argument("--ragged", action="store_true", help="batches whose requests differ")
    parser.add_argument("--peers", action="store_true", help="FA3 and FlashMLA, too")
    args = parser.parse_args()
    ragged = (Batch(heads, each) for heads in (8, 16, 20) for each in all_forests())
    clock, ratios = Clock(20.0 if args.ragged else 100.0), []
    for batch in ragged if args.ragged else BATCHES:
        if args.only in batch.name:
            row = measure(batch, clock, args.peers)
            print(json.dumps(row), flush=True)
            if args.peers:
                peers = (us for name, us in row.items() if name.startswith(("us_fa3", "us_flash")))
                ratios.append(row["us_ours"] / min(peers))
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"over the best peer: {mean:.3f} in the geometric mean, {max(ratios):.3f} at worst")


if __name__ == "__main__":
    main()
