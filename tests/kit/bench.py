# SPDX-License-Identifier: Apache-2.0
"""Rows, and stand-ins for a GPU and for the peers, for the tests of the kernel benchmark."""

from __future__ import annotations

import math
import sys
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.common import reference
from benchmarks.common.forests import Tree
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import peers
from benchmarks.kernel.floor import Heads, Rates
from benchmarks.kernel.kv import TreeBatch, make_batch
from benchmarks.kernel.layer import PatOptions
from benchmarks.kernel.report import TreeRow
from sglang_pat import decode, plan

RATES = Rates(bytes_per_s=4.4254e12, flops_per_s=722e12)
Calls = list[dict[str, Any]]


def row(spec: str = "1,4_64,16", **values: Any) -> TreeRow:
    times = {"floor_us": 10.0, "pat": 15.0, "fa3": 40.0, "flashinfer": 30.0, "levels": 50.0}
    given = times | {"kv_read_over_unique": 1.0}
    errors = {"differences": {"fa3": 0.003, "flashinfer": 0.003, "levels": 0.004}, "error": 0.002}
    about = {"heads": "32/8", "permuted": False, "noise": 0.01, "degraded": ""}
    return TreeRow(**({"spec": spec} | given | errors | about | values))


def chain_batch(
    tree: Tree, draft_tokens: int = 1, permuted: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[TreeBatch, torch.Tensor]:
    """A verify step on the CPU and what attention over it gives, with a scale of 0.25."""
    batch = make_batch(tree, Heads(4, 2, 16), permuted, draft_tokens, dtype=dtype)
    return batch, reference.attention(*batch.inputs, scale=0.25, draft_tokens=draft_tokens)[0]


def fake_peers(patch: pytest.MonkeyPatch) -> Calls:
    """FA3 and FlashInfer as modules with their interfaces over attention by definition. Returns
    what each call is given, the name of the function or method under ``call``."""
    calls: Calls = []

    def attend(q: Any, k: Any, v: Any, **call: Any) -> Any:
        """FA3's LSE is a natural logarithm, its causal mask ends with a sequence's last row."""
        calls.append({"call": "attend", **call})
        descales = [call.get(f"{name}_descale", torch.ones(())).flatten()[0] for name in "kv"]
        assert q.dtype == k.dtype == v.dtype and k.shape[1] == 1
        out = torch.empty_like(q, dtype=torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0])
        bounds = call["cu_seqlens_q"].tolist()
        assert call["max_seqlen_q"] == max(b - a for a, b in pairwise(bounds))
        for node, (first, end) in enumerate(pairwise(bounds)):
            before = torch.arange(first + 1 - end, 1) * call["causal"]  # tokens that a row sees not
            out[first:end], base2 = reference.attention(
                q[first:end],
                *(k.squeeze(1), v.squeeze(1), call["page_table"]),
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

    def metadata(**call: Any) -> Any:
        calls.append({"call": "metadata", **call})
        return call["cache_seqlens"].clone()

    class Paged:
        """FlashInfer's wrappers; ``plan`` of a decode step lacks the rows of each query."""

        def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
            assert layout == "NHD"
            calls.append({"call": "made", **options})

        def plan(self, *given: Any, **options: Any) -> None:
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            begins, slots, last = tensors[-3:]
            firsts = tensors[0] if len(tensors) == 4 else torch.arange(len(begins))
            assert {each.dtype for each in tensors} == {torch.int32}
            assert last.tolist() == [1] * (len(begins) - 1) and len(slots) == begins[-1]
            assert options.get("causal", False) is (len(tensors) == 4)
            calls.append({"call": "plan", "shape": given[len(tensors) :], **options})
            self.sequences = list(zip(*map(pairwise, (firsts.tolist(), begins.tolist()))))  # noqa: B905
            self.slots, self.scale = slots, options["sm_scale"]

        def run(self, q: Any, pages: Any, *, out: Any, **scales: float) -> None:
            calls.append({"call": "run", **scales})
            k, v = (cache.squeeze(1) for cache in pages)
            for (first, end), (begin, stop) in self.sequences:
                table, drafts = self.slots[None, begin:stop], end - first
                of_one = (torch.zeros(1, dtype=torch.int64), torch.tensor([stop - begin]))
                how: dict[str, Any] = {"scale": self.scale, "draft_tokens": drafts, **scales}
                out[first:end] = reference.attention(q[first:end], k, v, table, *of_one, **how)[0]

    for name, found in {
        "sgl_kernel": {"merge_state_v2": merge},
        "sgl_kernel.flash_attn": {
            "flash_attn_with_kvcache": attend,
            "get_scheduler_metadata": metadata,
        },
        "flashinfer": {},
        "flashinfer.decode": {"BatchDecodeWithPagedKVCacheWrapper": Paged},
        "flashinfer.prefill": {"BatchPrefillWithPagedKVCacheWrapper": Paged},
    }.items():
        module = ModuleType(name)
        vars(module).update(found)
        patch.setitem(sys.modules, name, module)
    patch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 16)
    return calls


class CpuLayer:
    """``Layer`` on the CPU executor."""

    def __init__(
        self,
        batch: TreeBatch,
        tree: Any,
        heads: Heads,
        settings: PatOptions,
        scale: float,
        made: Any = None,
    ) -> None:
        self.batch, self.scale, self.out = batch, scale, batch.q.new_empty(batch.q.shape)
        self.plan = made or plan(tree.paths, tree.seq_lens, settings.target(tree, heads))

    def attend(self) -> torch.Tensor:
        more: dict[str, Any] = {"q_rope": self.batch.q_rope, "out": self.out}
        more |= {"k_scale": self.batch.k_scale, "v_scale": self.batch.v_scale}
        return decode(*self.batch.inputs, self.plan, scale=self.scale, **more)


class CpuGraph:
    """``Captured`` that keeps its inputs only as a graph would: through ``run``."""

    def __init__(self, run: Any) -> None:
        self.run, self.out = run, run()

    def replay(self) -> None:
        if self.out is not None:
            self.out.copy_(self.run())


class CpuClock:
    """Every run takes a microsecond more than the one before it."""

    def __init__(self, budget_ms: float) -> None:
        self.budget_ms = budget_ms

    def compare(self, runs: dict[str, Any]) -> tuple[dict[str, float], float]:
        return {name: 10.0 + place for place, name in enumerate(runs)}, 0.01


def replace_device(patch: pytest.MonkeyPatch, module: Any = kernel) -> None:
    """The kernel benchmark with GPU and peers replaced: everything but CUDA calls is its own."""
    fake_peers(patch)
    patch.setattr(module, "Layer", CpuLayer)
    patch.setattr(module, "capture", CpuGraph)
    patch.setattr(module, "device_batch", partial(make_batch, dtype=torch.bfloat16))
    patch.setattr(kernel, "Clock", CpuClock)
    patch.setattr(kernel, "device_rates", lambda timer: RATES)
    patch.setattr(kernel, "missing", lambda *_: {})
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda: "none")
