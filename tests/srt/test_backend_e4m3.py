# SPDX-License-Identifier: Apache-2.0
"""Decode layers over SGLang's own pool of K/V in fp8_e4m3, with and without scales, on the CPU's
executor: what is written, what is read, and what happens when scales change. No server, no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import HEAD_DIM, HEADS, LAYERS, QUERIES, TARGET, BackendBed, make_layer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from benchmarks.common.reference import attention
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.srt.support import E4M3

SCALES = (0.037, 1.75)


def scaled_layer(layer_id: int = 0, scales: tuple[float, float] | None = SCALES) -> SimpleNamespace:
    """A layer with these scales as SGLang has them, or with none."""
    layer = make_layer(layer_id)
    layer.k_scale = layer.v_scale = layer.k_scale_float = layer.v_scale_float = None
    if scales is not None:
        layer.k_scale, layer.v_scale = map(torch.tensor, scales)
        layer.k_scale_float, layer.v_scale_float = scales
    return layer


class PoolBed(BackendBed):
    """A test bed over a pool of SGLang's that holds random K/V, and over the CPU's executor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Said to be served: a CPU's own base would not apply the scales.
        super().__init__(monkeypatch, dict.fromkeys(range(LAYERS), ""))
        torch.manual_seed(0)
        self.pool = MHATokenToKVPool(
            size=4000,
            page_size=1,
            dtype=E4M3,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.table = self.cache.table.req_to_token
        self.backend.token_to_kv_pool = self.pool
        self.backend._executor = Executor(TARGET, PatConfig(), self.table)
        self.q = torch.randn(QUERIES, HEADS * HEAD_DIM)
        self.k, self.v = torch.randn(2, QUERIES, HEADS, HEAD_DIM)
        self.slots = torch.arange(3990, 3990 + QUERIES)  # where the new tokens go
        self.table[self.live.rows, self.lens - 1] = self.slots.int()
        everything = torch.arange(4000)
        for layer_id in range(LAYERS):
            k, v = torch.randn(2, 4000, HEADS, HEAD_DIM)
            self.pool.set_kv_buffer(scaled_layer(layer_id), everything, k, v, *SCALES)

    def forward(self, layer: SimpleNamespace) -> torch.Tensor:
        batch = SimpleNamespace(out_cache_loc=self.slots, out_cache_loc_is_physical=True)
        k, v = self.k.clone(), self.v.clone()  # the pool divides them in place
        out: torch.Tensor = self.backend.forward_decode(self.q, k, v, layer, batch)
        return out.view(QUERIES, HEADS, HEAD_DIM)

    def truth(self, layer: SimpleNamespace, scales: tuple[float, float]) -> torch.Tensor:
        k_scale, v_scale = scales
        out, _ = attention(
            self.q.view(QUERIES, HEADS, HEAD_DIM),
            self.pool.get_key_buffer(layer.layer_id),
            self.pool.get_value_buffer(layer.layer_id),
            self.table,
            self.live.rows,
            self.lens,
            scale=layer.scaling,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return out


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> PoolBed:
    return PoolBed(monkeypatch)


@pytest.mark.parametrize("scales", [None, (1.0, 1.0), SCALES, (3.0, 0.02)])
def test_kv_are_stored_by_their_scales_and_read_by_them(
    bed: PoolBed, scales: tuple[float, float] | None
) -> None:
    """Exactly the bytes of SGLang's rule; without scales they are 1. Each layer has its own, and
    without a graph they may change."""
    bed.step("eager")
    for layer_id, factor in ((0, 1.0), (1, 1.0), (2, 1.0), (1, 4.0)):
        given = None if scales is None else (scales[0] * factor, scales[1] / factor)
        layer = scaled_layer(layer_id, given)
        k_scale, v_scale = given or (1.0, 1.0)
        out = bed.forward(layer)
        assert bed.backend.calls == [] and bed.stats.packed_steps == 1
        stored = bed.pool.get_key_buffer(layer_id), bed.pool.get_value_buffer(layer_id)
        for cache, new, scale in zip(stored, (bed.k, bed.v), (k_scale, v_scale), strict=True):
            assert cache.dtype == E4M3
            expected = (new / scale).to(E4M3)
            assert torch.equal(cache.view(torch.uint8)[bed.slots], expected.view(torch.uint8))
        torch.testing.assert_close(out, bed.truth(layer, (k_scale, v_scale)), rtol=1e-4, atol=1e-4)
        other = bed.truth(layer, (2 * k_scale, v_scale / 2))
        assert (out - other).norm() > 0.1 * other.norm(), "other scales would be seen"


def test_scales_that_change_after_the_capture_stop_the_server(bed: PoolBed) -> None:
    """A graph holds them as parameters of its launches."""
    layers = [scaled_layer(0), scaled_layer(1, (1.0, 1.0)), scaled_layer(2, None)]
    bed.step("capture")
    for layer in layers:
        bed.forward(layer)
    bed.step()
    layers[1].v_scale_float = 0.5
    changed = r"layer 1 are now \(1.0, 0.5\), but the decode graphs hold \(1.0, 1.0\)"
    with pytest.raises(RuntimeError, match=f"{changed}.* restart the server.*--disable-cuda-graph"):
        bed.step()
    layers[1].v_scale_float = 1.0
    bed.step()
