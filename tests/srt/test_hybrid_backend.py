# SPDX-License-Identifier: Apache-2.0
"""pat inside SGLang's backend of hybrid models: layers with attention are packed, the others never
come by, and the K/V pool has its own numbers for layers. SGLang's wrapper, pool, base and prefix
cache are the real ones; the linear layers' backend is a stand-in. No server, no GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import HEAD_DIM, HEADS, QUERIES, TARGET, BackendBed, make_layer
from kit.runner import make_layer as make_attention
from kit.runner import make_runner, set_ranks
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmarks.common.reference import attention
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.srt import support
from sglang_pat.srt.backend import PatVerifyMixin
from sglang_pat.srt.layers import Survey, survey_layers
from sglang_pat.target import Target

ATTENDS = (1, 3)  # of four layers
SLOTS = 4000


class LinearBackend:
    """In place of SGLang's backend of linear attention: notes what it is asked."""

    needs_cpu_seq_lens = False
    extend_dummy_seqs_capped_by_req_pool = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def supports_prefill_graph_extend(self) -> bool:
        return False

    def shared_read_ends(self, _mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.IN_REPLAY

    def init_forward_metadata(self, _batch: Any) -> None:
        self.calls.append("eager")

    def init_forward_metadata_out_graph(self, _batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "out graph")

    def init_forward_metadata_in_graph(self, _batch: Any) -> None:
        self.calls.append("in graph")

    def init_cuda_graph_state(self, *sizes: int) -> None:
        self.calls.append(sizes)

    def forward_decode(self, *, layer: Any, **_: Any) -> str:
        self.calls.append(layer.layer_id)
        return "linear"

    forward_extend = forward_decode


def hybrid_pool(dtype: torch.dtype = torch.float32) -> HybridLinearKVPool:
    """SGLang's pool of a model of four layers, of which two have K/V; random ones."""
    pool = HybridLinearKVPool(
        size=SLOTS,
        dtype=dtype,
        page_size=1,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        full_attention_layer_ids=list(ATTENDS),
        device="cpu",
        mamba_pool=None,
    )
    torch.manual_seed(0)
    everything = torch.arange(SLOTS)
    for layer in ATTENDS:
        k, v = torch.randn(2, SLOTS, HEADS, HEAD_DIM)
        pool.set_kv_buffer(make_layer(layer), everything, k, v, None, None)
    return pool


class HybridBed(BackendBed):
    """A test bed: the backend in SGLang's wrapper, over the CPU's executor."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: Target = TARGET, **options: Any
    ) -> None:
        survey = Survey(dict.fromkeys(ATTENDS, ""))
        super().__init__(monkeypatch, survey, target=target, **options)
        monkeypatch.setattr(
            "sglang.srt.layers.attention.hybrid_linear_attn_backend.check_cuda_graph_backend",
            lambda *_: False,
        )
        base = type(self.backend)
        for name in (
            "needs_cpu_seq_lens",
            "use_captured_forward_metadata_for_breakable_cuda_graph",
        ):
            monkeypatch.setattr(base, name, False, raising=False)
        monkeypatch.setattr(base, "kv_index_translator", None, raising=False)
        self.pool = self.backend.token_to_kv_pool = hybrid_pool()
        self.table = self.cache.table.req_to_token
        self.backend._executor = Executor(target, PatConfig(), self.table)
        self.linear = LinearBackend()
        self.inner = self.backend
        self.hybrid = HybridLinearAttnBackend(self.inner, self.linear, list(ATTENDS))

    def prepare(self, **options: Any) -> None:
        """A forward's metadata, through the wrapper."""
        self.backend = self.hybrid
        self.hybrid.calls = []  # the bed clears and returns them
        try:
            self.step(**options)
        finally:
            self.backend = self.inner

    def forward(
        self,
        layer_id: int,
        *,
        layer: Any = None,
        mode: ForwardMode = ForwardMode.DECODE,
        **arguments: Any,
    ) -> Any:
        self.inner.calls.clear()
        batch = SimpleNamespace(
            forward_mode=mode,
            logical_forward_mode=mode,
            out_cache_loc=self.slots,
            out_cache_loc_is_physical=True,
        )
        return self.hybrid.forward(
            layer=layer or make_layer(layer_id), forward_batch=batch, **arguments
        )

    @property
    def slots(self) -> torch.Tensor:
        """Where the new tokens go; their rows say so too."""
        slots = torch.arange(SLOTS - QUERIES, SLOTS)
        self.table[self.live.rows, self.lens - 1] = slots.int()
        return slots


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> HybridBed:
    return HybridBed(monkeypatch)


@pytest.mark.parametrize("layer_id", ATTENDS)
def test_a_layer_with_attention_is_packed(bed: HybridBed, layer_id: int) -> None:
    _ = bed.slots
    bed.prepare(graph=False)
    assert bed.linear.calls == ["eager"]
    q, k, v = (torch.randn(QUERIES, HEADS * HEAD_DIM) for _ in range(3))
    k, v = (part.view(QUERIES, HEADS, HEAD_DIM) for part in (k, v))
    out = bed.forward(layer_id, q=q, k=k, v=v)
    assert bed.inner.calls == []  # not the base's
    assert bed.inner._stats.packed_steps == 1 and not bed.fallbacks and not bed.base_layers
    keys, values = bed.pool.get_key_buffer(layer_id), bed.pool.get_value_buffer(layer_id)
    assert torch.equal(keys[bed.slots], k) and torch.equal(values[bed.slots], v)
    wanted, _ = attention(
        q.view(QUERIES, HEADS, HEAD_DIM),
        keys,
        values,
        bed.table,
        bed.live.rows,
        bed.lens,
        scale=make_layer(layer_id).scaling,
    )
    torch.testing.assert_close(out.view_as(wanted), wanted, rtol=1e-4, atol=1e-4)
    other = bed.pool.get_key_buffer(next(i for i in ATTENDS if i != layer_id))
    assert not torch.equal(other[bed.slots], k)


def test_a_linear_layer_does_not_come_by(bed: HybridBed) -> None:
    bed.prepare(graph=False)
    layer = SimpleNamespace(layer_id=2)
    mixed = torch.zeros(QUERIES, 8)
    assert bed.forward(2, layer=layer, mixed_qkv=mixed, a=mixed, b=mixed) == "linear"
    assert bed.linear.calls == ["eager", 2] and bed.inner.calls == []


def test_graphs_hold_our_plan_beside_the_linear_layers_metadata(bed: HybridBed) -> None:
    bed.prepare(capture=True)
    assert bed.linear.calls == ["capture", "in graph"]
    bed.forward(1, q=torch.zeros(QUERIES, HEADS * HEAD_DIM))
    bed.linear.calls.clear()
    bed.inner.calls.clear()
    for _ in range(2):
        bed.prepare()
    assert bed.linear.calls == ["out graph"] * 2
    assert bed.inner._stats.packed_steps == 2 and not bed.fallbacks
    # All layers that come by are ours, so the base's metadata are not made.
    assert bed.inner.calls == []


def test_verify_steps_are_packed_where_layers_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, mode = 3, ForwardMode.TARGET_VERIFY
    target = replace(TARGET, draft_tokens=drafts)
    bed = HybridBed(monkeypatch, target, mixin=PatVerifyMixin)
    for offset in range(drafts):  # the drafts' rows
        bed.table[bed.live.rows, bed.lens + offset] = bed.slots.int()
    bed.prepare(graph=False, mode=mode, spec_info=SimpleNamespace(draft_token_num=drafts))
    q = torch.randn(QUERIES * drafts, HEADS * HEAD_DIM)
    out = bed.forward(1, mode=mode, q=q)
    assert out.shape == q.shape and bool(out.any())
    assert bed.inner.calls == []
    stats = bed.inner._stats
    assert (stats.verify_steps, stats.packed_steps) == (1, 1) and not bed.fallbacks
    layer = SimpleNamespace(layer_id=0)
    assert bed.forward(0, layer=layer, mode=mode, mixed_qkv=q, a=q, b=q) == "linear"


def test_a_single_request_is_the_bases(bed: HybridBed) -> None:
    bed.reqs, bed.lens = bed.reqs[:1], bed.lens[:1]
    bed.prepare(graph=False)
    assert bed.inner._stats.packed_steps == 0
    assert bed.base_forwards == {"small_batch": 1}


def test_the_survey_leaves_layers_out_that_have_no_kv(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning attention (Bailing, MiniCPM) has modules like attention's, with other heads, which
    SGLang's wrapper never sends to us."""
    caplog.set_level("INFO", "sglang_pat")
    set_ranks(monkeypatch, 1)
    layers = [make_attention(layer) for layer in range(4)]
    layers[0].tp_k_head_num = layers[2].tp_v_head_num = 1
    pool = SimpleNamespace(device="cpu")
    kept = hybrid_pool_of(layers[1])
    pool.get_key_buffer, pool.get_value_buffer = kept.get_key_buffer, kept.get_value_buffer
    found = survey_layers(make_runner(layers, token_to_kv_pool=pool))
    assert found.reasons == {1: "", 3: ""}
    assert "attention layers 0, 2 have no K/V in the pool" in caplog.text


def hybrid_pool_of(layer: Any) -> HybridLinearKVPool:
    """SGLang's pool for layers like this one."""
    return HybridLinearKVPool(
        size=8,
        dtype=torch.bfloat16,
        page_size=1,
        head_num=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        full_attention_layer_ids=list(ATTENDS),
        device="cpu",
        mamba_pool=None,
    )


def test_what_is_asked_of_the_pool_before_a_server_starts() -> None:
    """The checks of the backend's construction see through the pool of hybrid models."""
    runner = make_runner([], token_to_kv_pool=hybrid_pool())
    found = support.by_runner(runner)
    assert (found.virtual_slots, found.quantized, found.layout) == (False, "", "nhd")
    runner.token_to_kv_pool.full_kv_pool.kv_cache_layout = "hnd"
    assert support.by_runner(runner).layout == "hnd"
