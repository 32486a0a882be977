# SPDX-License-Identifier: Apache-2.0
"""What the backend does for a layer that it serves: the K/V of the new tokens are written to
SGLang's pool, then the executor attends to the pool. No server, no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import HEAD_DIM, HEADS, LAYERS, QUERIES, BackendBed, make_layer

SLOTS = torch.tensor([7, 3, 5, 1])  # where the new tokens go


class LayerBed(BackendBed):
    """A test bed of one forward, with ``events``: what its layers did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.events: list[tuple[Any, ...]] = []
        pool, decode = self.backend.token_to_kv_pool, self.executor.decode
        pool.set_kv_buffer = lambda *given: self.events.append(("write", *given))

        def attend(*tensors: torch.Tensor, **options: float) -> None:
            self.events.append(("attend", *tensors, options))
            decode(*tensors, **options)

        monkeypatch.setattr(self.executor, "decode", attend)
        self.step(graph=False)
        self.q = torch.randn(QUERIES, HEADS * HEAD_DIM)
        self.k, self.v = torch.randn(2, QUERIES, HEADS, HEAD_DIM)

    def forward(self, layer: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        batch = SimpleNamespace(out_cache_loc=SLOTS, out_cache_loc_is_physical=True)
        out: torch.Tensor = self.backend.forward_decode(self.q, k, v, layer, batch, **options)
        return out


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> LayerBed:
    return LayerBed(monkeypatch)


@pytest.mark.parametrize("layer_id", range(LAYERS))
def test_a_layer_writes_its_kv_and_then_attends(bed: LayerBed, layer_id: int) -> None:
    layer = make_layer(layer_id)
    out = bed.forward(layer, bed.k, bed.v)
    (write, *written), (attend, q, k_cache, v_cache, _, options) = bed.events
    assert (write, attend) == ("write", "attend")
    assert written[0] is layer and written[1].loc is SLOTS and written[1].physical
    assert written[2] is bed.k and written[3] is bed.v
    assert written[4:] == [layer.k_scale, layer.v_scale]
    pool = bed.backend.token_to_kv_pool
    assert k_cache.data_ptr() == pool.get_key_buffer(layer_id).data_ptr()
    assert v_cache.data_ptr() == pool.get_value_buffer(layer_id).data_ptr()
    assert torch.equal(q, bed.q.view(QUERIES, HEADS, HEAD_DIM))
    rest = {"k_scale": 1.0, "v_scale": 1.0}  # those of the layer count in fp8_e4m3 only
    assert options == {"scale": layer.scaling, "logit_cap": layer.logit_cap} | rest
    assert torch.equal(out, bed.q), "what the executor wrote, one row a query"


def test_kv_that_is_in_the_pool_is_not_written_again(bed: LayerBed) -> None:
    """As in layers that share their K/V with another one, or that write it themselves."""
    bed.forward(make_layer(0), bed.k, bed.v, save_kv_cache=False)
    bed.forward(make_layer(1), None, None)
    assert [event[0] for event in bed.events] == ["attend", "attend"]


def test_a_layer_of_the_base_does_neither(bed: LayerBed) -> None:
    assert bed.forward(make_layer(0, window=8), bed.k, bed.v) is bed.q
    assert bed.events == []
