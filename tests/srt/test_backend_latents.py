# SPDX-License-Identifier: Apache-2.0
"""Layers that read latents (MLA) as the backend runs them, over SGLang's pool of latents and the
CPU's executor: against attention by its definition. No server, no GPU: SGLang's attention on a CPU
does not run such models (serving/test_latents.py has one in which it does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import QUERIES, TARGET, BackendBed
from kit.latents import HEADS as OF_TARGET
from kit.latents import K_DIM, V_DIM
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from benchmarks.common.reference import attention
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.srt.layers import Survey

HEADS, LAYERS, SLOTS = 16, 4, 4000
ATTENDS = 3  # the layer of a hybrid that does, as a Kimi Linear's fourth
SCALE = 192**-0.5
TARGET_OF_LATENTS = replace(TARGET, num_q_heads=HEADS, **OF_TARGET)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """What SGLang's pool asks when it writes: whether a rank holds a part of each sequence."""
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        yield


def pool_of_latents(hybrid: bool) -> Any:
    """SGLang's pool, random latents in it."""
    dims = {"kv_lora_rank": V_DIM, "qk_rope_head_dim": K_DIM - V_DIM}
    common = {"size": SLOTS, "page_size": 1, "dtype": torch.float32, "device": "cpu"}
    if not hybrid:
        pool = MLATokenToKVPool(**common, **dims, layer_num=LAYERS, enable_memory_saver=False)
    else:
        pool = HybridLinearKVPool(
            **common,
            **dims,
            **{"head_num": 1, "head_dim": 72, "mamba_pool": None, "use_mla": True},
            full_attention_layer_ids=[ATTENDS],
        )
    pool.get_key_buffer(ATTENDS).normal_()
    return pool


class LatentBed(BackendBed):
    """A test bed with the heads of DeepSeek-V2-Lite. ``events``: what the pool is asked to write
    and what the executor runs, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hybrid: bool = False) -> None:
        super().__init__(monkeypatch, Survey({ATTENDS: ""}), target=TARGET_OF_LATENTS)
        self.pool = self.backend.token_to_kv_pool = pool_of_latents(hybrid)
        self.table = self.cache.table.req_to_token
        executor = Executor(TARGET_OF_LATENTS, PatConfig(), self.table)
        self.backend._executor = executor
        self.events: list[tuple[str, Any, Any]] = []
        for name, of in (
            *(("set_kv_buffer", self.pool), ("set_mla_kv_buffer", self.pool)),
            ("decode", executor),
        ):
            self._note(monkeypatch, of, name)
        self.layer = RadixAttention(HEADS, K_DIM, SCALE, 1, layer_id=ATTENDS, v_head_dim=V_DIM)
        # Where the new tokens go; their rows say so.
        self.slots = torch.arange(SLOTS - QUERIES, SLOTS)
        self.table[self.live.rows, self.lens - 1] = self.slots.int()
        self.batch = SimpleNamespace(out_cache_loc=self.slots, out_cache_loc_is_physical=True)

    def _note(self, monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> None:
        call = getattr(of, name)

        def noted(*given: Any, **options: Any) -> None:
            self.events.append((name, given, options))
            call(*given, **options)

        monkeypatch.setattr(of, name, noted)

    def expected(self, q: torch.Tensor) -> torch.Tensor:
        keys = self.pool.get_key_buffer(ATTENDS)
        batch = (self.table, self.live.rows, self.lens)
        out, _ = attention(q, keys, keys[..., :V_DIM], *batch, scale=SCALE)
        return out


def queries() -> tuple[torch.Tensor, torch.Tensor]:
    """As SGLang's DeepSeek has them: q by head, then by row, and the ends of wider rows."""
    q = torch.randn(HEADS, QUERIES, V_DIM).transpose(0, 1)
    return q, torch.randn(QUERIES, HEADS, 192)[..., 128:]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_writes_its_latents_and_attends(
    monkeypatch: pytest.MonkeyPatch, whole: bool, hybrid: bool
) -> None:
    """In two parts, as fa3 gets them, and ``whole``, as SGLang's Triton and torch_native do."""
    bed = LatentBed(monkeypatch, hybrid)
    torch.manual_seed(1)
    q, q_rope = queries()
    k, k_rope = torch.randn(QUERIES, 1, V_DIM), torch.randn(QUERIES, 1, K_DIM - V_DIM)
    both = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
    assert bed.step("eager") == []
    if whole:
        out = bed.backend.forward_decode(*both, k, bed.layer, bed.batch)
    else:
        parts = {"q_rope": q_rope, "k_rope": k_rope}
        out = bed.backend.forward_decode(q, k, k, bed.layer, bed.batch, **parts)
    (write, written, _), (_, ran, options) = bed.events
    assert write == ("set_kv_buffer" if whole else "set_mla_kv_buffer")
    assert written[0] is bed.layer and written[1].loc is bed.slots and written[1].physical
    assert torch.equal(bed.pool.get_key_buffer(ATTENDS)[bed.slots], both[1])
    # Views of what came, whatever its strides.
    given = (both[0], both[0][..., V_DIM:]) if whole else (q, q_rope)
    for found, wanted in zip((ran[0], options["q_rope"]), given, strict=True):
        assert found.data_ptr() == wanted.data_ptr() and found.stride() == wanted.stride()
    assert ran[0].shape == (QUERIES, HEADS, V_DIM) and out.shape == (QUERIES, HEADS * V_DIM)
    wanted = bed.expected(both[0])
    torch.testing.assert_close(out.view_as(wanted), wanted, rtol=1e-5, atol=1e-5)
    assert bed.stats.packed_steps == 1 and not bed.stats.base_layers and not bed.stats.fallbacks


def test_a_graph_of_latents_is_replayed_with_a_plan_for_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = LatentBed(monkeypatch)
    q, q_rope = queries()
    parts = {"q_rope": q_rope, "k_rope": torch.randn(QUERIES, 1, K_DIM - V_DIM)}
    k = torch.randn(QUERIES, 1, V_DIM)
    bed.step("capture")
    bed.backend.forward_decode(q, k, k, bed.layer, bed.batch, **parts)
    assert [name for name, _, _ in bed.events] == ["set_mla_kv_buffer", "decode"]
    for _ in range(2):
        assert bed.step() == []  # all layers are ours
    assert bed.stats.packed_steps == 2 and not bed.stats.fallbacks and not bed.stats.base_layers


def test_rows_may_come_flat_and_without_latents_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = LatentBed(monkeypatch)
    q, q_rope = (part.contiguous() for part in queries())
    bed.step("eager")
    out = bed.backend.forward_decode(
        *(q.flatten(1), None, None, bed.layer, bed.batch), q_rope=q_rope.flatten(1), k_rope=None
    )
    assert [name for name, _, _ in bed.events] == ["decode"]
    wanted = bed.expected(torch.cat([q, q_rope], -1))
    torch.testing.assert_close(out.view_as(wanted), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["cos_sin_cache", "topk_indices", "attn_sink", "llama_4_scaling", "sinks"]
)
def test_what_else_a_layer_with_latents_gives_is_the_bases(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bed = LatentBed(monkeypatch)
    q, q_rope = queries()
    k, k_rope = torch.zeros(QUERIES, 1, V_DIM), torch.zeros(QUERIES, 1, K_DIM - V_DIM)
    parts = {"q_rope": q_rope, "k_rope": k_rope}
    bed.step("eager")
    bed.backend.forward_decode(
        *(q, k, k, bed.layer, bed.batch), **parts, **{name: torch.zeros(HEADS)}
    )
    assert bed.backend.calls[-1] == "layer" and not bed.events
    assert bed.stats.base_layers == {f"arguments {name}": 1}


def test_parts_of_queries_are_for_latents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = BackendBed(monkeypatch)
    bed.step("eager")
    assert bed.layer(0, q_rope=torch.zeros(1), k_rope=torch.zeros(1))[-1] == "layer"
    assert bed.stats.base_layers == {"arguments k_rope, q_rope": 1}


def test_the_module_that_expands_latents_is_the_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the id of a layer of ours; SGLang 0.5.23 prefills with it alone."""
    bed = LatentBed(monkeypatch)
    expanding = RadixAttention(HEADS, 192, SCALE, HEADS, layer_id=ATTENDS, v_head_dim=128)
    bed.step("eager")
    bed.backend.forward_decode(
        torch.zeros(QUERIES, HEADS * 192), None, None, expanding, bed.batch, save_kv_cache=False
    )
    assert bed.backend.calls[-1] == "layer" and not bed.events
    (reason,) = bed.stats.base_layers
    assert reason == "(16, 16, 16) query, K and V heads, planned for others"
    assert not bed.backend._layers.all_are_ours
