# SPDX-License-Identifier: Apache-2.0
"""Decode attention of MLA (one KV head, latents of 576 numbers of which 512 are V, bf16): plans of
this package, FA3 and FlashMLA, called as SGLang calls them, as captured graphs over a cold L2.

    python -m benchmarks.kernel.latents [--ragged] [--peers] [--json FILE]

``ours`` is forward and merge of one layer. The error is that of the output of a few queries,
relative to attention in fp32 over the same inputs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.document import add_row, conditions
from benchmarks.common.forests import Forest, all_forests
from benchmarks.kernel.clock import Clock, capture
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import TreeBatch, slot_table
from benchmarks.kernel.layer import Layer, PatOptions, error_of
from benchmarks.kernel.peers import Run, query_offsets
from benchmarks.kernel.report import geomean
from sglang_pat.target import LATENT_DIMS

K_DIM, V_DIM = LATENT_DIMS
# What DeepSeek scales by: heads of 128 + 64 before absorption.
SCALE = 192**-0.5


def on_prefixes(groups: int, queries: int, shared: int, own: int) -> Forest:
    """``groups`` of ``queries`` requests each, which share ``shared`` tokens and have ``own``."""
    count = groups * queries
    paths = [[(i // queries, 0, shared)] * (queries > 1) for i in range(count)]
    return Forest(f"{groups}x{queries}_{shared}+{own}", paths, [shared + own] * count)


BATCHES = (  # with query heads
    *((heads, on_prefixes(1, 128, 8192, 256)) for heads in (8, 16, 20, 32)),
    (16, on_prefixes(1, 64, 4096, 256)),
    (16, on_prefixes(8, 16, 2048, 256)),
    (16, on_prefixes(1, 16, 8192, 512)),
    (16, on_prefixes(1, 8, 6016, 128)),
    (16, on_prefixes(64, 1, 0, 2048)),
    (16, on_prefixes(1, 1, 0, 8192)),
)


def latent_batch(requests: Forest, heads: int, device: str = "cuda") -> TreeBatch:
    """Random inputs. K and V are latents [slots, 1, 576] and their first 512 columns; q [B, heads,
    512] lies by head and then by query, as SGLang has it, q_rope is [B, heads, 64]."""
    total = requests.num_queries
    table, lens = slot_table(requests)
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    q = random(heads, total, V_DIM).transpose(0, 1)
    q_rope = random(total, heads, K_DIM - V_DIM)
    latents = random(requests.unique_tokens + 1, 1, K_DIM)
    rows = torch.arange(1, total + 1, device=device)
    inputs = (latents, latents[..., :V_DIM], table.to(device), rows, lens.to(device))
    return TreeBatch(q, *inputs, q_rope=q_rope)


def in_pages(batch: TreeBatch, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [pages, ``page``, 1, 576] and the page table, int32 [B, pages]. Pages of more than a
    token hold a copy in order: each prefix has its own in place of the pool's."""
    latents, table = batch.k_cache, batch.req_to_token[batch.rows].contiguous()
    total, tokens = table.shape
    if page > 1:
        whole = -(-tokens // page)
        used = torch.zeros(total, whole * page, dtype=torch.long, device=table.device)
        used[:, :tokens] = table
        firsts, index = torch.unique(used.view(-1, page), dim=0, return_inverse=True)
        latents = latents[firsts.flatten()].contiguous()
        table = index.view(total, whole).int().contiguous()
    return latents.view(-1, page, 1, K_DIM), table


def flash_mla(batch: TreeBatch) -> Run:
    """FlashMLA, with pages of 64 tokens and its schedule made before, once a step as in SGLang."""
    ops = import_module("sglang.kernels.ops.attention.flash_mla_interface")
    pages, table = in_pages(batch, 64)
    q, lens = batch.whole_q.unsqueeze(1), batch.seq_lens.int()  # q [B, 1, heads, 576]
    schedule, splits = ops.get_mla_metadata(lens, q.shape[2], 1)

    call = partial(
        ops.flash_mla_with_kvcache,
        q=q,
        k_cache=pages,
        block_table=table,
        cache_seqlens=lens,
        head_dim_v=V_DIM,
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        softmax_scale=SCALE,
        causal=True,
    )
    return lambda: call()[0]


def fa3(batch: TreeBatch, page: int) -> Run:
    """FA3's form for MLA with pages of ``page`` tokens."""
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    pages, table = in_pages(batch, page)
    return partial(
        attend,
        q=batch.q_rope,
        k_cache=pages[..., V_DIM:],
        v_cache=pages[..., :V_DIM],
        qv=batch.q,
        page_table=table,
        cache_seqlens=batch.seq_lens.int(),
        cu_seqlens_q=query_offsets(batch),
        max_seqlen_q=1,
        softmax_scale=SCALE,
        causal=True,
    )


def measure(heads: int, requests: Forest, clock: Clock, with_peers: bool) -> dict[str, Any]:
    """Microseconds and errors by name."""
    batch = latent_batch(requests, heads)
    layer = Layer(batch, requests, Heads(heads, 1, K_DIM), PatOptions(), SCALE)
    runs: dict[str, Run] = {"ours": layer.attend}
    if with_peers:
        runs |= {"fa3_1": fa3(batch, 1), "fa3_64": fa3(batch, 64), "flashmla": flash_mla(batch)}
    captured = {name: capture(run) for name, run in runs.items()}
    row: dict[str, Any] = {"heads": heads, "batch": str(requests)}
    for name, graph in captured.items():
        graph.replay()
        assert graph.out is not None
        row["error_" + name] = error_of(graph.out.view(batch.q.shape), batch, SCALE)
    medians, row["noise"] = clock.compare({name: c.replay for name, c in captured.items()})
    return row | {"us_" + name: time for name, time in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ragged", action="store_true", help="batches whose requests differ")
    parser.add_argument("--peers", action="store_true", help="FA3 and FlashMLA, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and conditions")
    args = parser.parse_args()
    ragged = ((heads, each) for heads in (8, 16, 20) for each in all_forests())
    clock, ratios = Clock(20.0 if args.ragged else 100.0), defaultdict(list)
    device = torch.cuda.get_device_name()
    document = conditions("latents", "benchmarks.kernel.latents", device, {}) | {"rows": []}
    for heads, requests in ragged if args.ragged else BATCHES:
        row = measure(heads, requests, clock, args.peers)
        add_row(document, row, args.json)
        if args.peers:
            best = min(row[f"us_{name}"] for name in ("fa3_1", "fa3_64", "flashmla"))
            for group in ("all", f"{heads} heads", requests.family):
                ratios[group].append(row["us_ours"] / best)
    for group, found in ratios.items():
        print(f"{group}: {geomean(found):.3f} of the better peer, at most {max(found):.3f}")


if __name__ == "__main__":
    main()
