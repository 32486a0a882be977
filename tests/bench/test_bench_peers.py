# SPDX-License-Identifier: Apache-2.0
"""How the kernel benchmark calls its peers and takes times; no GPU needed, both are replaced."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kit.bench import fake_sgl_kernel

from benchmarks.common import reference
from benchmarks.kernel import clock, peers
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import TreeBatch, make_batch
from sglang_pat.explain.tree import Tree


def test_slots_lie_as_asked() -> None:
    heads = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    tree = Tree((1, 2), (40, 9))
    for permuted in (False, True):
        table = make_batch(tree, **heads, dtype=torch.float32, permuted=permuted).req_to_token
        shared, own = table[1, :40], table[1:, 40:]
        assert torch.equal(shared, table[2, :40])
        used = torch.cat([shared, own.flatten()])
        assert sorted(used.tolist()) == list(range(1, 59))  # each once; slot 0 belongs to nobody
        assert bool((shared.diff() == 1).all()) is not permuted


def small_batch(tree: Tree, permuted: bool) -> tuple[TreeBatch, torch.Tensor]:
    """A batch on the CPU and what attention over it gives."""
    batch = make_batch(
        tree, num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, permuted=permuted
    )
    inputs = (batch.q, batch.k_cache, batch.v_cache, batch.req_to_token, batch.rows, batch.seq_lens)
    return batch, reference.attention(*inputs, scale=0.25)[0]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("spec", ["1,3_9,5", "2,4,12_6,3,2", "5_7", "1,1_4,4"])
@pytest.mark.parametrize("peer", ["fa3", "levels"])
def test_peers_attend_to_the_whole_batch(
    peer: str, spec: str, permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree.parse(spec)
    batch, expected = small_batch(tree, permuted)
    torch.testing.assert_close(peers.PEERS[peer](batch, tree, 0.25)(), expected)


def test_flashinfer_is_given_every_slot_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
            planned.update(options, layout=layout)

        def plan(self, offsets: Any, indices: Any, last: Any, *shape: int, **options: Any) -> None:
            planned.update(options, offsets=offsets, indices=indices, last=last, shape=shape)

    module = ModuleType("flashinfer.decode")
    vars(module)["BatchDecodeWithPagedKVCacheWrapper"] = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 16)
    tree = Tree((1, 3), (9, 5))
    batch, _ = small_batch(tree, permuted=True)
    lens = [14, 10, 3]
    peers.flashinfer(replace(batch, seq_lens=torch.tensor(lens)), tree, 0.25)
    assert planned["offsets"].tolist() == [0, 14, 24, 27]
    slots = [batch.req_to_token[i + 1, :length].tolist() for i, length in enumerate(lens)]
    assert planned["indices"].tolist() == [slot for each in slots for slot in each]
    assert planned["last"].tolist() == [1, 1, 1]
    assert planned["shape"] == (4, 2, 16, 1)
    assert planned["sm_scale"] == 0.25 and planned["use_tensor_cores"] is False


def test_tensor_cores_from_four_queries_a_kv_head() -> None:
    few, many = [Heads(q, 8) for q in (8, 16, 24)], [Heads(q, 8) for q in (32, 64)]
    for heads in few + many:
        assert peers.uses_tensor_cores(heads, torch.bfloat16) is (heads in many)
        assert peers.uses_tensor_cores(heads, peers.E4M3), "as SGLang has it for fp8"


def test_peers_that_cannot_run_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(batch: TreeBatch, tree: Tree, scale: float) -> peers.Run:
        raise ImportError("No module named 'nothing'\nand more\nthe last")

    monkeypatch.setattr(peers, "device_batch", lambda *_, draft_tokens: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    works: peers.Maker = lambda batch, tree, scale: lambda: torch.zeros(1)  # noqa: E731
    monkeypatch.setattr(peers, "PEERS", {"a": works, "b": missing})
    assert peers.usable([Heads(32, 8), Heads(16, 8)], ["a", "b"]) == {
        "a": "",
        "b": "ImportError: No module named 'nothing' ... the last",
    }


def test_fa3_is_not_launched_where_its_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launch would end the process."""
    assert peers.ends_process(os._exit, 1) and not peers.ends_process(abs, 1)
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(peers, "fa3_lacks", lambda *kernel: asked.append(kernel) or True)
    found = peers.usable([Heads(32, 8, 64)], ["fa3", "levels"], e4m3=True)
    assert found == dict.fromkeys(["fa3", "levels"], peers.NO_KERNEL)
    assert set(asked) == {(64, True)}


def test_a_graph_keeps_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed inputs are memory that others get, which replays would read."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", nullcontext),
        ("CUDAGraph", lambda: None),
        ("graph", nullcontext),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    table = torch.zeros(3)
    alive = weakref.ref(table)
    captured = clock.capture(partial(torch.add, table, 1))
    del table
    assert alive() is not None and captured.out is not None
    assert captured.out.tolist() == [1, 1, 1]


class Scripted(clock.Clock):
    """Runs return their own times."""

    def __init__(self) -> None:
        pass

    def repeats(self, run: Any) -> int:
        return 3

    def times_us(self, run: Any, repeats: int) -> list[float]:
        return [run() for _ in range(repeats)]


def test_times_are_medians_and_noise_is_what_the_turns_differ_by() -> None:
    steady, drifting = [5.0] * 4, [10.0, 10.0, 20.0, 20.0]
    runs = {name: iter(times).__next__ for name, times in (("a", steady), ("b", drifting))}
    assert Scripted().compare(runs) == ({"a": 5.0, "b": 15.0}, 0.5)
