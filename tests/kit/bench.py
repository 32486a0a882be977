# SPDX-License-Identifier: Apache-2.0
"""Rows, and stand-ins for a GPU and for FA3, for the tests of the kernel benchmark."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from sglang_pat import decode, plan, reference
from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import peers, ragged, rows, variants
from sglang_pat.bench.kernel.floor import Heads, Rates
from sglang_pat.bench.kernel.kv import TreeBatch, make_batch
from sglang_pat.bench.kernel.layer import PatOptions
from sglang_pat.bench.kernel.report import PEER_NAMES, TreeRow
from sglang_pat.bench.kernel.studies import consolidated, engine

# Measured on one H200 before this benchmark was written, by other code: floor, FA3, FlashInfer,
# levels and the published PAT at 32/8 heads, microseconds.
MEASURED = {
    "1,10_4096,416": (7.7, 58, 40, 40, 41),
    "1,256_256,32": (8.8, 97, 86, 79, 48),
    "1,1024_2048,32": (48.3, 1291, 1096, 274, 207),
    "1,2,64_1024,256,256": (16.8, 81, 72, 77, 57),
    "1,4,256_32,256,32": (9.5, 97, 88, 94, 51),
    "1,8,512_32,512,256": (127.0, 326, 313, 221, 207),
    "1,8,512_32,2048,256": (138.4, 747, 674, 245, 244),
    "1,8,512_512,512,256": (127.5, 434, 402, 228, 217),
    "1,4,8,256_32,256,256,32": (11.4, 132, 116, 110, 57),
    "1,4,16,512_1024,256,128,32": (20.9, 487, 413, 173, 100),
    "1,4,16,64,256,1024_256,32,256,64,32,256": (261.9, 629, 606, 515, 409),
    "1,16,32,64,128,1024_256,128,64,32,32,32": (43.8, 468, 431, 347, 145),
    "1,16,32,64,256,1024_256,128,64,32,32,32": (47.6, 469, 433, 372, 144),
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32": (42.9, 468, 432, 369, 145),
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32": (46.7, 469, 433, 394, 145),
    "2,8,16,256_256,256,32,32": (11.4, 131, 116, 108, 57),
    "4,16,256,512_512,32,128,32": (49.8, 282, 255, 222, 120),
    "8,16,32,256_512,512,256,32": (27.5, 234, 203, 129, 80),
    "256_1024": (243.6, 276, 273, 278, 273),
    "256_4096": (971.5, 956, 975, 978, 1012),
}
RATES = Rates(bytes_per_s=4.4254e12, flops_per_s=722e12)  # of the run that gave these floors


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


def measured_rows() -> list[TreeRow]:
    return [
        row(spec, floor_us=floor, fa3=float(fa3), flashinfer=float(fi), levels=float(lv), pat=pat)
        for spec, (floor, fa3, fi, lv, pat) in MEASURED.items()
    ]


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
        age: int = 0,
    ) -> None:
        self.batch, self.scale = batch, scale
        lengths = [length - age for length in tree.seq_lens]
        self.plan = plan(tree.paths, lengths, settings.target(tree, heads))

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
        if "page_table" not in call:  # q [B, 1, Hq, D], K and V [B, L, Hkv, D]
            shape = {"scale": call["softmax_scale"], "enable_gqa": True}
            rows = [each.transpose(1, 2) for each in (q, k, v)]
            assert call["cache_seqlens"].tolist() == [k.shape[1]] * len(q)
            return torch.nn.functional.scaled_dot_product_attention(*rows, **shape).transpose(1, 2)
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
    for module in (rows, variants):
        monkeypatch.setattr(module, "Layer", CpuLayer)
        monkeypatch.setattr(module, "capture", CpuGraph)
        monkeypatch.setattr(module, "device_batch", batch)
    monkeypatch.setattr(consolidated, "Layer", CpuLayer)
    monkeypatch.setattr(kernel, "Clock", CpuClock)
    monkeypatch.setattr(kernel, "device_rates", lambda timer: RATES)
    monkeypatch.setattr(kernel, "empty_us", lambda timer: 1.5)
    for module in (rows, engine):
        found = peers.PEERS | {"flashinfer": broken, "levels": wrong}
        monkeypatch.setattr(module, "PEERS", found)
    monkeypatch.setattr(
        kernel, "usable", lambda heads, names=PEER_NAMES, **options: dict.fromkeys(names, "")
    )
    monkeypatch.setattr(ragged, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
