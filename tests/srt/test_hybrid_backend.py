# SPDX-License-Identifier: Apache-2.0
"""pat inside SGLang's backend of hybrid models: layers with attention are packed, the others never
come by, and the K/V pool has its own numbers for layers. SGLang's wrapper, pool, base and prefix
cache are the real ones; the linear layers' backend is a stand-in. No server, no GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import HEAD_DIM, HEADS, QUERIES, TARGET, BackendBed, make_layer
from kit.runner import make_layer as make_attention
from kit.runner import make_runner, set_ranks
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmarks.common.reference import attention
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.srt import support
from sglang_pat.srt.backend import PatVerifyMixin
from sglang_pat.srt.layers import survey_layers
from sglang_pat.target import Target

ATTENDS = (1, 3)  # of four layers
SLOTS = 4000


def hybrid_pool(heads: int = HEADS, head_dim: int = HEAD_DIM, size: int = SLOTS) -> Any:
    """SGLang's pool of a model of four layers, of which two have K/V; random ones."""
    pool = HybridLinearKVPool(
        size=size,
        dtype=torch.float32,
        page_size=1,
        head_num=heads,
        head_dim=head_dim,
        full_attention_layer_ids=list(ATTENDS),
        device="cpu",
        mamba_pool=None,
    )
    for layer in ATTENDS:
        k, v = torch.randn(2, size, heads, head_dim, generator=torch.Generator().manual_seed(layer))
        pool.set_kv_buffer(make_layer(layer), torch.arange(size), k, v, None, None)
    return pool


class HybridBed(BackendBed):
    """A test bed: the backend (``inner``) in SGLang's wrapper, over the CPU's executor.
    ``linear``: the linear layers' backend."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: Target = TARGET, **options: Any
    ) -> None:
        survey = dict.fromkeys(ATTENDS, "")
        super().__init__(monkeypatch, survey, target=target, **options)
        module = hybrid_linear_attn_backend
        monkeypatch.setattr(module, "check_cuda_graph_backend", lambda *_: False)
        self.inner: Any = self.backend
        self.inner.needs_cpu_seq_lens = False
        self.inner.use_captured_forward_metadata_for_breakable_cuda_graph = False
        self.inner.kv_index_translator = None
        self.pool = self.inner.token_to_kv_pool = hybrid_pool()
        self.table = self.cache.table.req_to_token
        self.inner._executor = Executor(target, PatConfig(), self.table)
        # Where the new tokens go, drafts too; their rows say so.
        self.slots = torch.arange(SLOTS - QUERIES, SLOTS)
        for offset in range(-1, target.draft_tokens):
            self.table[self.live.rows, self.lens + offset] = self.slots.int()
        self.linear = MagicMock(
            needs_cpu_seq_lens=False,
            extend_dummy_seqs_capped_by_req_pool=False,
            **{
                "supports_prefill_graph_extend.return_value": False,
                "shared_read_ends.return_value": SharedReadEnds.IN_REPLAY,
                "forward_decode.return_value": "linear",
                "forward_extend.return_value": "linear",
            },
        )
        self.backend = module.HybridLinearAttnBackend(self.inner, self.linear, list(ATTENDS))
        self.backend.calls = []  # the bed clears and returns them

    def prepare(self, *given: Any, **options: Any) -> list[str]:
        """A forward's metadata, through the wrapper; what the linear layers' backend was asked."""
        self.linear.reset_mock()
        self.inner.calls.clear()
        self.step(*given, **options)
        return [name for name, _, _ in self.linear.method_calls if name.startswith("init_")]

    def forward(
        self, layer: Any, *, mode: ForwardMode = ForwardMode.DECODE, **arguments: Any
    ) -> Any:
        self.inner.calls.clear()
        batch = SimpleNamespace(
            forward_mode=mode,
            logical_forward_mode=mode,
            out_cache_loc=self.slots,
            out_cache_loc_is_physical=True,
        )
        return self.backend.forward(layer=layer, forward_batch=batch, **arguments)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> HybridBed:
    return HybridBed(monkeypatch)


@pytest.mark.parametrize("layer_id", ATTENDS)
def test_a_layer_with_attention_is_packed(bed: HybridBed, layer_id: int) -> None:
    assert bed.prepare("eager") == ["init_forward_metadata"]
    q, k, v = torch.randn(3, QUERIES, HEADS, HEAD_DIM)
    out = bed.forward(make_layer(layer_id), q=q.view(QUERIES, -1), k=k, v=v)
    assert bed.inner.calls == []  # not the base's
    assert bed.stats.packed_steps == 1 and not bed.stats.fallbacks and not bed.stats.base_layers
    keys, values = bed.pool.get_key_buffer(layer_id), bed.pool.get_value_buffer(layer_id)
    assert torch.equal(keys[bed.slots], k) and torch.equal(values[bed.slots], v)
    wanted, _ = attention(
        q, keys, values, bed.table, bed.live.rows, bed.lens, scale=make_layer(layer_id).scaling
    )
    torch.testing.assert_close(out.view_as(wanted), wanted, rtol=1e-4, atol=1e-4)
    other = bed.pool.get_key_buffer(next(i for i in ATTENDS if i != layer_id))
    assert not torch.equal(other[bed.slots], k)
    # A linear layer does not come by.
    layer = SimpleNamespace(layer_id=2)
    assert bed.forward(layer, mixed_qkv=q, a=q, b=q) == "linear" and bed.inner.calls == []


def test_graphs_hold_our_plan_beside_the_linear_layers_metadata(bed: HybridBed) -> None:
    in_graph, out_graph = "init_forward_metadata_in_graph", "init_forward_metadata_out_graph"
    assert bed.prepare("capture") == [out_graph, in_graph]
    bed.forward(make_layer(1), q=torch.zeros(QUERIES, HEADS * HEAD_DIM))
    for _ in range(2):
        assert bed.prepare() == [out_graph]
        assert bed.inner.calls == []  # all layers that come by are ours
    assert bed.stats.packed_steps == 2 and not bed.stats.fallbacks
    bed.use(bed.all[:1])
    bed.prepare("eager")
    assert bed.stats.packed_steps == 2 and bed.stats.base_forwards == {"small_batch": 1}


def test_verify_steps_are_packed_where_layers_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, mode = 3, ForwardMode.TARGET_VERIFY
    bed = HybridBed(monkeypatch, replace(TARGET, draft_tokens=drafts), mixin=PatVerifyMixin)
    bed.prepare("eager", mode=mode, spec_info=SimpleNamespace(draft_token_num=drafts))
    q = torch.randn(QUERIES * drafts, HEADS * HEAD_DIM)
    out = bed.forward(make_layer(1), mode=mode, q=q)
    assert out.shape == q.shape and bool(out.any()) and bed.inner.calls == []
    assert (bed.stats.verify_steps, bed.stats.packed_steps) == (1, 1) and not bed.stats.fallbacks
    layer = SimpleNamespace(layer_id=0)
    assert bed.forward(layer, mode=mode, mixed_qkv=q, a=q, b=q) == "linear"


def test_the_survey_leaves_layers_out_that_have_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning attention (Bailing, MiniCPM) has modules like attention's, with other heads, which
    SGLang's wrapper never sends to us."""
    set_ranks(monkeypatch, 1)
    layers = [make_attention(layer) for layer in range(4)]
    layers[0].tp_k_head_num = layers[2].tp_v_head_num = 1
    kept = hybrid_pool(layers[1].tp_k_head_num, layers[1].qk_head_dim, size=8)
    pool = SimpleNamespace(device="cpu")
    pool.get_key_buffer = lambda layer: kept.get_key_buffer(layer).bfloat16()
    pool.get_value_buffer = lambda layer: kept.get_value_buffer(layer).bfloat16()
    assert survey_layers(make_runner(layers, token_to_kv_pool=pool)) == {1: "", 3: ""}


def test_what_is_asked_of_the_pool_before_a_server_starts() -> None:
    """The checks of the backend's construction see through the pool of hybrid models."""
    runner = make_runner([], token_to_kv_pool=hybrid_pool())
    found = support.by_runner(runner)
    assert (found.virtual_slots, found.quantized, found.layout) == (False, "", "nhd")
    runner.token_to_kv_pool.full_kv_pool.kv_cache_layout = "hnd"
    assert support.by_runner(runner).layout == "hnd"
