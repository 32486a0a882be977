# SPDX-License-Identifier: Apache-2.0
"""CPU attention of one decode step and layer, pat beside SGLang's ``torch_native``:
``python -m benchmarks.kernel.attention``. Needs SGLang, no server.

The speedup is torch_native's time over pat's, as in docs/results.md."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernel.floor import Heads
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
HEADS = (Heads(8, 2, 64), Heads(32, 8))


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


def measure(tree: Tree, heads: Heads, dtype: torch.dtype, repeats: int) -> str:
    """The line of a row."""
    shape: dict[str, Any] = {
        "num_q_heads": heads.q,
        "num_kv_heads": heads.kv,
        "head_dim": heads.dim,
    }
    batch = make_batch(tree, **shape, dtype=dtype)
    limits = {"max_queries": tree.num_queries, "kv_bytes": dtype.itemsize}
    target = Target.cpu(threads=torch.get_num_threads(), **shape, **limits)
    made = plan(tree.paths, tree.seq_lens, target)
    scale, out = heads.dim**-0.5, torch.empty_like(batch.q)

    def pat() -> torch.Tensor:
        return decode(*batch.inputs, made, scale=scale, out=out)

    stock = torch_native(batch, scale)
    difference = relative(pat(), stock())
    pat_us, stock_us = median_us(pat, repeats), median_us(stock, repeats)
    return (
        f"{tree!s:24} {heads!s:9} {made.num_shared_items:6} {pat_us:8.0f} {stock_us:10.0f} "
        f"{stock_us / pat_us:7.1f}x {difference:11.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    dtypes = ["float32", "bfloat16", "float16"]
    how = "of queries, K and V (default: float32)"
    parser.add_argument("--dtype", default="float32", choices=dtypes, help=how)
    how = "runs of which the median counts (default: 9)"
    parser.add_argument("--repeats", type=int, default=9, help=how)
    options = parser.parse_args()
    print(f"{options.dtype}, {torch.get_num_threads()} threads")
    print(f"{'tree':24} {'heads':9} shared   pat us  native us  speedup  difference")
    for heads in HEADS:
        for tree in TREES:
            print(measure(tree, heads, getattr(torch, options.dtype), options.repeats), flush=True)


if __name__ == "__main__":
    main()
