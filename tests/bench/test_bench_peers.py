# SPDX-License-Identifier: Apache-2.0
"""How the kernel benchmark calls its peers and takes times. No GPU: peers are replaced by attention
by definition."""

from __future__ import annotations

import ast
import weakref
from contextlib import nullcontext
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.bench import Calls, CpuClock, CpuGraph, CpuLayer, chain_batch, fake_peers

from benchmarks.common import reference
from benchmarks.common.forests import Tree
from benchmarks.kernel import clock, latents, peers
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import quantised, relative

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TREE = Tree((1, 3), (9, 5))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return fake_peers(monkeypatch)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("spec", ["1,3_9,5", "2,4,12_6,3,5", "5_7", "1,1_4,4"])
@pytest.mark.parametrize("peer", peers.PEERS)
def test_peers_attend_to_the_whole_batch_and_drafts_as_a_chain(
    peer: str, spec: str, drafts: int
) -> None:
    """K and V of 8 bits come with both scales; then FA3 takes queries of 8 bits only."""
    tree = Tree.parse(spec)
    batch, expected = chain_batch(tree, drafts)
    torch.testing.assert_close(peers.PEERS[peer](batch, tree, 0.25)(), expected)
    batch = quantised(chain_batch(tree, drafts, dtype=torch.bfloat16)[0])
    for cache in (batch.k_cache, batch.v_cache):
        assert cache.float().abs().max() == torch.finfo(peers.E4M3).max
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    expected, _ = reference.attention(*batch.inputs, scale=0.25, draft_tokens=drafts, **scales)
    error = relative(peers.PEERS[peer](batch, tree, 0.25)(), expected)
    assert error < 0.005 if peer == "flashinfer" else 0.005 < error < 0.1


def parameters_of(package: str, file: str, *path: str) -> list[str]:
    """Names of the parameters of a function of an installed package, "**" for any others. The
    package is not imported: on a machine without a GPU that may fail."""
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package}")
    tree: Any = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    for name in path:
        found = [each for each in tree.body if getattr(each, "name", "") == name]
        tree = found[-1]  # after overloads
    named = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
    return [*(each.arg for each in named), *["**"] * bool(tree.args.kwarg)]


@pytest.mark.parametrize("drafts", [1, 4])
def test_fa3_is_called_as_sglang_calls_it(drafts: int, calls: Calls) -> None:
    """Its scheduler's metadata are made once for all layers, in decode steps alone; the lengths of
    K are given in verify steps alone."""
    layer = peers.fa3(quantised(chain_batch(TREE, drafts)[0]), TREE, 0.25)
    layer()
    layer()
    first, given = (each for each in calls if each["call"] == "attend")
    assert given["causal"] is True
    known = parameters_of("sgl_kernel", "flash_attn.py", "flash_attn_with_kvcache")
    assert known[:3] == ["q", "k_cache", "v_cache"]
    assert given.keys() - {"call"} <= set(known)
    assert ("scheduler_metadata" in given) is (drafts == 1)
    if drafts > 1:
        assert given["cu_seqlens_k_new"].tolist() == [0, 14, 28, 42]
        return
    assert "cu_seqlens_k_new" not in given
    (asked,) = [each for each in calls if each["call"] == "metadata"]
    assert first["scheduler_metadata"] is given["scheduler_metadata"]
    known = parameters_of("sgl_kernel", "flash_attn.py", "get_scheduler_metadata")
    assert asked.keys() - {"call"} <= set(known)
    shape = {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 14, "num_heads": 4}
    shape |= {"num_heads_k": 2, "headdim": 16, "page_size": 1, "causal": True}
    assert asked.items() >= (shape | {"qkv_dtype": peers.E4M3}).items()


@pytest.mark.parametrize("drafts", [1, 4])
def test_flashinfer_is_called_as_sglang_calls_it(drafts: int, calls: Calls) -> None:
    batch, _ = chain_batch(TREE, drafts)
    peers.flashinfer(quantised(batch), TREE, 0.25)()
    made, plan, run = calls
    assert (made["backend"], plan["shape"]) == ("fa2", (4, 2, 16, 1))
    assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.float32, peers.E4M3)
    kind, file = ("Prefill", "prefill.py") if drafts > 1 else ("Decode", "decode.py")
    where = ("flashinfer", file, f"Batch{kind}WithPagedKVCacheWrapper")
    for found, method in ((made, "__init__"), (plan, "plan"), (run, "run")):
        known = parameters_of(*where, method)
        assert "**" in known or found.keys() - {"call", "shape"} <= set(known)


def test_latents_are_attended_to_as_a_whole_and_copied_into_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLA: pat's output is right, and a page of 64 tokens holds those of each request in order."""
    requests = latents.on_prefixes(2, 3, 70, 9)
    batch = latents.latent_batch(requests, 8, "cpu")
    for name, stand_in in (("Layer", CpuLayer), ("capture", CpuGraph)):
        monkeypatch.setattr(latents, name, stand_in)
    monkeypatch.setattr(latents, "latent_batch", lambda *_: batch)
    timer: Any = CpuClock(1.0)
    row = latents.measure(8, requests, timer, with_peers=False)
    assert row["error_ours"] < 0.01 and (row["heads"], row["us_ours"]) == (8, 10.0)
    expected = batch.k_cache[batch.req_to_token[batch.rows]]
    for page, held in ((1, 1 + 2 * (70 + 3 * 9)), (64, 2 * (1 + 3))):
        pages, table = latents.in_pages(batch, page)
        assert pages.shape == (held, page, 1, 576) and table.dtype == torch.int32
        assert torch.equal(pages[table].flatten(1, 2)[:, :79], expected)


def test_peers_that_cannot_run_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA3 is not even launched where its kernels are missing: that would end the process."""

    def missing(*_: Any) -> peers.Run:
        raise ImportError("No module named 'nothing'")

    monkeypatch.setattr(peers, "device_batch", lambda *_, draft_tokens: None)
    monkeypatch.setattr(peers, "quantised", lambda batch: batch)
    monkeypatch.setattr(peers, "fa3_lacks", lambda dim, e4m3: (dim, e4m3) == (64, True))
    monkeypatch.setattr(peers, "PEERS", {"fa3": missing, "flashinfer": missing})
    assert peers.missing([Heads(32, 8, 64)], True, 1) == {
        "fa3": peers.NO_KERNEL,
        "flashinfer": "ImportError: No module named 'nothing'",
    }


def test_a_graph_keeps_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed inputs are memory that others get, which replays would read."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    table = torch.zeros(3)
    alive = weakref.ref(table)
    captured = clock.capture(partial(torch.add, table, 1))
    del table
    assert alive() is not None and captured.out is not None
    assert captured.out.tolist() == [1, 1, 1]


def test_times_are_medians_and_noise_is_what_the_turns_differ_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = object.__new__(clock.Clock)
    monkeypatch.setattr(timer, "repeats", lambda run: 3, raising=False)
    monkeypatch.setattr(
        timer, "times_us", lambda run, count: [run() for _ in range(count)], raising=False
    )
    steady, drifting = iter([5.0] * 4), iter([10.0, 10.0, 20.0, 20.0])
    runs = {"a": steady.__next__, "b": drifting.__next__}
    assert timer.compare(runs) == ({"a": 5.0, "b": 15.0}, 0.5)
