# SPDX-License-Identifier: Apache-2.0
"""CPU attention of one decode step and layer, pat beside SGLang's ``torch_native``:
``python -m benchmarks.kernel.attention [--json]``. Needs SGLang, no server.

The speedup is torch_native's time over pat's, as in docs/results.md."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernel.kv import TreeBatch, make_batch, relative
from sglang_pat import Target, decode, plan
from sglang_pat.explain.tree import Tree

# The demo's shared phase (a system prompt, eight agents, three turns each), others, and none.
TREES = (
    Tree((1, 8, 24), (1100, 500, 300)),
    Tree((1, 16), (512, 64)),
    Tree((1, 64), (2048, 128)),
    Tree((24,), (1900,)),
    Tree((64,), (256,)),
    Tree((1,), (8192,)),
)
HEADS = ((8, 2, 64), (32, 8, 128))  # query heads, KV heads, head dim


def torch_native(batch: TreeBatch, scale: float) -> Callable[[], torch.Tensor]:
    """The decode of SGLang's backend, called as the backend calls it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend: Any = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    out = torch.empty_like(batch.q)

    def run() -> torch.Tensor:
        backend._run_sdpa_forward_decode(
            batch.q,
            out,
            batch.k_cache,
            batch.v_cache,
            batch.req_to_token,
            batch.rows,
            batch.seq_lens,
            scaling=scale,
            enable_gqa=batch.q.shape[1] != batch.k_cache.shape[1],
        )
        return out

    return run


def median_us(run: Callable[[], torch.Tensor], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def measure(
    tree: Tree, heads: tuple[int, int, int], dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    num_q_heads, num_kv_heads, head_dim = heads
    batch = make_batch(
        tree, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
    scale = head_dim**-0.5
    target = Target.cpu(
        threads=torch.get_num_threads(),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_queries=tree.num_queries,
        kv_bytes=dtype.itemsize,
    )
    made = plan(tree.paths, tree.seq_lens, target)
    out = torch.empty_like(batch.q)

    def pat() -> torch.Tensor:
        return decode(*batch.inputs, made, scale=scale, out=out)

    stock = torch_native(batch, scale)
    difference = relative(pat(), stock())
    pat_us, stock_us = median_us(pat, repeats), median_us(stock, repeats)
    return {
        "tree": str(tree),
        "heads": "/".join(map(str, heads)),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "shared_items": made.num_shared_items,
        "pat_us": pat_us,
        "torch_native_us": stock_us,
        "speedup": stock_us / pat_us,
        "relative_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of queries, K and V (default: float32)",
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="runs of which the median counts (default: 9)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if not options.json:
        print(f"{'tree':24} {'heads':9} shared   pat us  native us  speedup  difference")
    for heads in HEADS:
        for tree in TREES:
            row = measure(tree, heads, getattr(torch, options.dtype), options.repeats)
            if options.json:
                print(json.dumps(row))
            else:
                print(
                    f"{row['tree']:24} {row['heads']:9} {row['shared_items']:6} "
                    f"{row['pat_us']:8.0f} {row['torch_native_us']:10.0f} {row['speedup']:7.1f}x "
                    f"{row['relative_difference']:11.1e}"
                )


if __name__ == "__main__":
    main()
