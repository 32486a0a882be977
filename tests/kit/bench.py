# SPDX-License-Identifier: Apache-2.0
"""Rows, and stand-ins for a GPU and for FA3, for the tests of the kernel benchmark."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from benchmarks.common import reference
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import cases, peers, rows
from benchmarks.kernel.floor import Heads, Rates
from benchmarks.kernel.kv import TreeBatch, make_batch
from benchmarks.kernel.layer import PatOptions
from benchmarks.kernel.report import PEER_NAMES, TreeRow
from sglang_pat import decode, plan
from sglang_pat.explain.tree import Tree

RATES = Rates(bytes_per_s=4.4254e12, flops_per_s=722e12)


def row(spec: str = "1,4_64,16", **values: Any) -> TreeRow:
    given = {
        "heads": "32/8",
        "permuted": False,
        "floor_us": 10.0,
        "bound": "memory",
        "pat": 15.0,
        "fa3": 40.0,
        "flashinfer": 30.0,
        "levels": 50.0,
        "noise": 0.01,
        "snapshot_us": 3.0,
        "plan_us": 20.0,
        "items": 4,
        "shared_items": 1,
        "partials": 8,
        "kv_read_over_unique": 1.0,
        "degraded": "",
        "error": 0.002,
        "differences": {"fa3": 0.003, "flashinfer": 0.003, "levels": 0.004},
    }
    return TreeRow(spec=spec, **(given | values))


def chain_batch(tree: Tree, draft_tokens: int, permuted: bool) -> tuple[TreeBatch, torch.Tensor]:
    """A verify step on the CPU and what attention over it gives, with a scale of 0.25."""
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    options = {"permuted": permuted, "draft_tokens": draft_tokens}
    batch = make_batch(tree, **shape, dtype=torch.float32, **options)
    return batch, reference.attention(*batch.inputs, scale=0.25, draft_tokens=draft_tokens)[0]


class CpuLayer:
    """``Layer`` on the CPU executor."""

    def __init__(
        self,
        batch: TreeBatch,
        tree: Tree,
        heads: Heads,
        settings: PatOptions,
        scale: float,
    ) -> None:
        self.batch, self.scale = batch, scale
        self.plan = plan(tree.paths, tree.seq_lens, settings.target(tree, heads))

    def attend(self) -> torch.Tensor:
        b = self.batch
        scales = {"k_scale": b.k_scale, "v_scale": b.v_scale}
        return decode(*b.inputs, self.plan, scale=self.scale, **scales)

    def snapshot(self) -> None:
        pass

    def plan_us(self) -> float:
        return 20.0


class CpuGraph:
    """``Captured`` that keeps its inputs only as a graph would: through ``run``."""

    def __init__(self, run: Any) -> None:
        self.run, self.out = run, run()

    def replay(self) -> None:
        if self.out is not None:
            self.out.copy_(self.run())


class CpuClock:
    def __init__(self, budget_ms: float) -> None:
        pass

    def median_us(self, run: Any) -> float:
        run()
        return 2.5

    def compare(self, runs: dict[str, Any]) -> tuple[dict[str, float], float]:
        return {name: 10.0 + place for place, name in enumerate(runs)}, 0.01


def fake_sgl_kernel() -> dict[str, ModuleType]:
    """Modules with FA3's interface over attention by definition, its LSE a natural logarithm. The
    causal mask ends with the last row of a sequence."""

    def attend(q: Any, k: Any, v: Any, **call: Any) -> Any:
        descales = [call.get(f"{name}_descale", torch.ones(())).flatten()[0] for name in "kv"]
        assert q.dtype == k.dtype == v.dtype
        out = torch.empty_like(q, dtype=torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0])
        bounds = call["cu_seqlens_q"].tolist()
        assert call["max_seqlen_q"] == max(b - a for a, b in pairwise(bounds))
        if (metadata := call.get("scheduler_metadata")) is not None:
            assert metadata.tolist() == call["cache_seqlens"].tolist()
        for node, (first, end) in enumerate(pairwise(bounds)):
            before = torch.arange(first + 1 - end, 1) * call["causal"]  # tokens that a row sees not
            out[first:end], base2 = reference.attention(
                q[first:end],
                k.squeeze(1),
                v.squeeze(1),
                call["page_table"],
                torch.full((end - first,), node),
                call["cache_seqlens"][node] + before,
                scale=call["softmax_scale"],
                k_scale=float(descales[0]),
                v_scale=float(descales[1]),
            )
            lse[:, first:end] = base2.T * math.log(2)
        return (out, lse) if call.get("return_softmax_lse") else out

    def merge(a: Any, lse_a: Any, b: Any, lse_b: Any) -> Any:
        lse = torch.logaddexp(lse_a, lse_b)
        share = torch.exp(lse_a - lse)[..., None]
        return a * share + b * (1 - share), lse

    def scheduler_metadata(**call: Any) -> Any:
        assert call["batch_size"] == len(call["cache_seqlens"])
        return call["cache_seqlens"].clone()

    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    vars(package)["merge_state_v2"], vars(module)["flash_attn_with_kvcache"] = merge, attend
    vars(module)["get_scheduler_metadata"] = scheduler_metadata
    return {"sgl_kernel": package, "sgl_kernel.flash_attn": module}


def replace_device(monkeypatch: Any) -> None:
    """The kernel benchmark with its GPU replaced: everything but CUDA calls is its own. FlashInfer
    fails, and the cascade by levels gives a wrong output."""

    def batch(tree: Tree, heads: Heads, permuted: bool, draft_tokens: int = 1) -> TreeBatch:
        shape = {"num_q_heads": heads.q, "num_kv_heads": heads.kv, "head_dim": heads.dim}
        given = {"permuted": permuted, "draft_tokens": draft_tokens}
        return make_batch(tree, **shape, dtype=torch.bfloat16, **given)

    def wrong(batch: TreeBatch, tree: Tree, scale: float) -> peers.Run:
        return lambda: torch.ones_like(batch.q)

    def broken(batch: TreeBatch, tree: Tree, scale: float) -> peers.Run:
        raise RuntimeError("workspace too small")

    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(rows, "Layer", CpuLayer)
    monkeypatch.setattr(rows, "capture", CpuGraph)
    monkeypatch.setattr(cases, "device_batch", batch)
    monkeypatch.setattr(kernel, "Clock", CpuClock)
    monkeypatch.setattr(kernel, "device_rates", lambda timer: RATES)
    monkeypatch.setattr(kernel, "empty_us", lambda timer: 1.5)
    monkeypatch.setattr(rows, "PEERS", peers.PEERS | {"flashinfer": broken, "levels": wrong})
    monkeypatch.setattr(
        kernel, "usable", lambda heads, names=PEER_NAMES, **options: dict.fromkeys(names, "")
    )
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
