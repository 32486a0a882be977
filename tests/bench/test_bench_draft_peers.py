# SPDX-License-Identifier: Apache-2.0
"""What FA3, FlashInfer and the cascade are given in verify steps, and that they attend as a chain
of draft tokens does. No GPU; the peers are replaced by attention by definition."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.bench import chain_batch, fake_sgl_kernel

from benchmarks.common import reference
from benchmarks.kernel import peers
from benchmarks.kernel.kv import quantised, relative
from sglang_pat.explain.tree import Tree

SPECS = ["1,3_9,5", "2,4,12_6,3,5", "5_7", "1,1_4,4"]


class PagedPrefill:
    """FlashInfer's paged prefill wrapper over attention by definition. ``calls`` has what each was
    made, planned and run with."""

    calls: list[dict[str, Any]]

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        self.given = {"layout": layout, **options}
        self.calls.append(self.given)

    def plan(
        self, rows: Any, begins: Any, slots: Any, last: Any, *shape: int, **options: Any
    ) -> None:
        self.given.update(options, shape=shape)
        assert {each.dtype for each in (rows, begins, slots, last)} == {torch.int32}
        assert last.tolist() == [1] * (len(rows) - 1) and len(slots) == begins[-1]
        self.sequences = list(zip(pairwise(rows.tolist()), pairwise(begins.tolist()), strict=True))
        self.slots = slots

    def run(self, q: torch.Tensor, pages: Any, *, out: torch.Tensor, **scales: float) -> None:
        self.given.update(scales)
        assert self.given["causal"] and q.shape == out.shape == (self.sequences[-1][0][1], 4, 16)
        k, v = (cache.squeeze(1) for cache in pages)
        for (first, end), (begin, stop) in self.sequences:
            out[first:end] = reference.attention(
                q[first:end],
                k,
                v,
                self.slots[None, begin:stop],
                torch.zeros(1, dtype=torch.int64),
                torch.tensor([stop - begin]),
                scale=self.given["sm_scale"],
                k_scale=scales.get("k_scale", 1.0),
                v_scale=scales.get("v_scale", 1.0),
                draft_tokens=end - first,
            )[0]


@pytest.fixture
def paged_prefill(monkeypatch: pytest.MonkeyPatch) -> type[PagedPrefill]:
    module = ModuleType("flashinfer.prefill")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = PagedPrefill
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(PagedPrefill, "calls", [], raising=False)
    return PagedPrefill


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("draft_tokens", [2, 4])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("peer", ["fa3", "levels", "flashinfer"])
def test_peers_attend_as_a_chain_does(
    peer: str,
    spec: str,
    draft_tokens: int,
    permuted: bool,
    paged_prefill: type[PagedPrefill],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree.parse(spec)
    batch, expected = chain_batch(tree, draft_tokens, permuted)
    out = peers.PEERS[peer](batch, tree, 0.25)()
    assert out.shape == (tree.num_queries * draft_tokens, 4, 16)
    torch.testing.assert_close(out, expected)


def test_what_fa3_is_given_is_what_sglang_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def attend(q: Any, k: Any, v: Any, **call: Any) -> Any:
        given.update(call, q=q, k=k)
        return q

    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    vars(module)["flash_attn_with_kvcache"] = attend
    vars(module)["get_scheduler_metadata"] = lambda **call: call["cache_seqlens"]
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    tree = Tree((1, 3), (9, 5))
    batch, _ = chain_batch(tree, 4, permuted=True)
    peers.fa3(batch, tree, 0.25)()
    assert given["q"].shape == (12, 4, 16) and given["k"].shape[1] == 1  # pages of one token
    assert given["cu_seqlens_q"].tolist() == [0, 4, 8, 12] and given["max_seqlen_q"] == 4
    assert given["cache_seqlens"].tolist() == [14, 14, 14], "draft tokens included"
    assert given["cu_seqlens_k_new"].tolist() == [0, 14, 28, 42]
    assert given["page_table"].tolist() == batch.req_to_token[1:].tolist()
    assert given["causal"] is True and given["softmax_scale"] == 0.25
    for name in ("cu_seqlens_q", "cu_seqlens_k_new", "cache_seqlens", "page_table"):
        assert given[name].dtype == torch.int32 and given[name].is_contiguous()
    given.clear()
    decode, _ = chain_batch(tree, 1, permuted=True)
    peers.fa3(decode, tree, 0.25)()
    assert given["cu_seqlens_q"].tolist() == [0, 1, 2, 3] and "cu_seqlens_k_new" not in given


def test_what_flashinfer_is_given(paged_prefill: type[PagedPrefill]) -> None:
    tree = Tree((1, 3), (9, 5))
    batch, _ = chain_batch(tree, 4, permuted=True)
    peers.flashinfer(batch, tree, 0.25)()
    (given,) = paged_prefill.calls
    assert (given["layout"], given["backend"], given["shape"]) == ("NHD", "fa2", (4, 2, 16, 1))
    assert given["causal"] is True and given["sm_scale"] == 0.25 and "k_scale" not in given
    assert (given["q_data_type"], given["kv_data_type"]) == (torch.float32, torch.float32)


@pytest.mark.parametrize("peer", ["fa3", "levels", "flashinfer"])
def test_peers_take_kv_of_8_bits(
    peer: str, paged_prefill: type[PagedPrefill], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree((1, 6), (40, 9))
    batch = quantised(chain_batch(tree, 4, permuted=True)[0])
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    expected = reference.attention(*batch.inputs, scale=0.25, draft_tokens=4, **scales)[0]
    out = peers.PEERS[peer](batch, tree, 0.25)()
    assert relative(out, expected) < (1e-6 if peer == "flashinfer" else 0.1)


def parameters_of(package: str, file: str, *path: str) -> list[str]:
    """Names of the parameters of a function of an installed package, which is not imported: on a
    machine without a GPU that may fail."""
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package}")
    tree: Any = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    for name in path:
        found = [each for each in tree.body if getattr(each, "name", "") == name]
        tree = found[-1]  # after overloads
    return [each.arg for each in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]


def test_calls_fit_the_installed_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    known = parameters_of("sgl_kernel", "flash_attn.py", "flash_attn_with_kvcache")
    assert known[:3] == ["q", "k_cache", "v_cache"]
    given: set[str] = set()
    modules = fake_sgl_kernel()
    attend = vars(modules["sgl_kernel.flash_attn"])["flash_attn_with_kvcache"]

    def noting(*tensors: torch.Tensor, **call: Any) -> Any:
        given.update(call)
        return attend(*tensors, **call)

    vars(modules["sgl_kernel.flash_attn"])["flash_attn_with_kvcache"] = noting
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree((1, 3), (9, 5))
    batch = quantised(chain_batch(tree, 4, permuted=True)[0])
    peers.fa3(batch, tree, 0.25)()
    peers.levels(batch, tree, 0.25)()
    assert {"cu_seqlens_k_new", "k_descale", "return_softmax_lse"} <= given <= set(known)
    assert "scheduler_metadata" not in given, "SGLang has it in decode steps alone"


def test_fa3_s_scheduler_metadata_is_made_once_a_decode_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As SGLang does it (``_compute_scheduler_metadata``), by the installed function's names."""
    known = parameters_of("sgl_kernel", "flash_attn.py", "get_scheduler_metadata")
    asked: list[dict[str, Any]] = []
    layers: list[torch.Tensor] = []
    modules = fake_sgl_kernel()
    fa3 = vars(modules["sgl_kernel.flash_attn"])
    compute, attend = fa3["get_scheduler_metadata"], fa3["flash_attn_with_kvcache"]

    def asking(**call: Any) -> Any:
        asked.append(call)
        return compute(**call)

    def noting(*tensors: torch.Tensor, **call: Any) -> Any:
        layers.append(call["scheduler_metadata"])
        return attend(*tensors, **call)

    fa3 |= {"get_scheduler_metadata": asking, "flash_attn_with_kvcache": noting}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree((1, 3), (9, 5))
    batch = quantised(chain_batch(tree, 1, permuted=True)[0])
    layer = peers.fa3(batch, tree, 0.25)
    layer()
    layer()
    (call,) = asked
    assert layers[0] is layers[1]
    assert set(call) <= set(known)
    expected = {
        "batch_size": 3,
        "max_seqlen_q": 1,
        "max_seqlen_k": 14,
        "num_heads": batch.q.shape[1],
        "num_heads_k": batch.k_cache.shape[1],
        "headdim": batch.q.shape[2],
        "qkv_dtype": peers.E4M3,
        "page_size": 1,
        "causal": True,
    }
    assert {name: call[name] for name in expected} == expected


def test_calls_fit_the_installed_flashinfer(paged_prefill: type[PagedPrefill]) -> None:
    wrapper = ("flashinfer", "prefill.py", "BatchPrefillWithPagedKVCacheWrapper")
    made, planned, run = (parameters_of(*wrapper, name) for name in ("__init__", "plan", "run"))
    assert made[1:3] == ["float_workspace_buffer", "kv_layout"] and "backend" in made
    assert planned[1:9] == [
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
    ]
    assert run[1:3] == ["q", "paged_kv_cache"] and {"out", "k_scale", "v_scale"} <= set(run)
    tree = Tree((1, 3), (9, 5))
    peers.flashinfer(chain_batch(tree, 4, permuted=True)[0], tree, 0.25)()
    (given,) = paged_prefill.calls
    assert set(given) - {"layout", "backend", "shape"} <= set(planned)
