# SPDX-License-Identifier: Apache-2.0
"""Layers with attention sinks as the backend runs them, on the CPU's executor: against attention by
its definition, and in the GPT-OSS of Transformers, whose tokens must stay the same. No GPU, and no
server: on a CPU SGLang's attention takes no sinks, but for one that needs kernels its wheel lacks.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import QUERIES, TARGET, BackendBed, make_layer
from kit.drafts import chains, custom_mask
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpecInputType

from benchmarks.common.reference import attention
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.srt.backend import PatDecodeMixin, PatVerifyMixin

HEADS, KV_HEADS, HEAD_DIM, LAYERS, SLOTS = 16, 2, 64, 4, 4000
FULL, SLIDING = "full_attention", "sliding_attention"


class SinkBed(BackendBed):
    """A test bed with the heads of GPT-OSS, over a pool of SGLang's and the CPU's executor.
    ``draft_tokens``: more than 1 on a server that verifies so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft_tokens: int = 1) -> None:
        target = replace(
            TARGET,
            num_q_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            draft_tokens=draft_tokens,
        )
        mixin = PatDecodeMixin if draft_tokens == 1 else PatVerifyMixin
        super().__init__(monkeypatch, mixin=mixin, target=target)
        self.draft_tokens = draft_tokens
        self.pool = self.backend.token_to_kv_pool = MHATokenToKVPool(
            size=SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.table = self.cache.table.req_to_token
        self.backend._executor = Executor(target, PatConfig(), self.table)
        self.next_slot = SLOTS

    def slots_for_new_tokens(self) -> torch.Tensor:
        """Slots [B * T] that the rows name at the tokens that attend."""
        count = self.draft_tokens
        new = torch.arange(self.next_slot - QUERIES * count, self.next_slot)
        self.next_slot -= len(new)
        last = self.lens if count > 1 else self.lens - 1  # lengths do not count draft tokens
        for token in range(count):
            self.table[self.live.rows, last + token] = new[token::count].int()
        return new

    def prepare(self) -> torch.Tensor:
        """Prepare a step; the slots of its new tokens."""
        slots = self.slots_for_new_tokens()
        if self.draft_tokens == 1:
            self.step("eager")
            return slots
        spec_info = SimpleNamespace(
            draft_token_num=self.draft_tokens,
            custom_mask=custom_mask(chains(QUERIES, self.draft_tokens), self.lens),
            spec_input_type=SpecInputType.NGRAM_VERIFY,
        )
        self.step("eager", mode=ForwardMode.TARGET_VERIFY, spec_info=spec_info)
        return slots

    def attend(self, slots: torch.Tensor, layer: Any, *qkv: torch.Tensor, **given: Any) -> Any:
        batch = SimpleNamespace(
            out_cache_loc=slots,
            out_cache_loc_is_physical=True,
            forward_mode=ForwardMode.TARGET_VERIFY,
        )
        backend = self.backend
        forward = backend.forward_decode if self.draft_tokens == 1 else backend.forward_extend
        return forward(*qkv, layer, batch, **given)


def layer_of(layer_id: int, window: int = -1) -> SimpleNamespace:
    layer = make_layer(layer_id, window)
    layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num = HEADS, KV_HEADS, KV_HEADS
    layer.qk_head_dim = layer.v_head_dim = HEAD_DIM
    layer.scaling = HEAD_DIM**-0.5
    layer.k_scale = layer.v_scale = None
    return layer


def parameter(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    """A layer's sinks as SGLang's models hold them: some count for all, for little and for none."""
    values = torch.tensor([8.0, -30.0, float("-inf"), 0.5]).repeat(HEADS // 4)
    return torch.nn.Parameter(values.to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_a_layer_with_sinks_is_served(
    monkeypatch: pytest.MonkeyPatch, draft_tokens: int, dtype: torch.dtype
) -> None:
    """In decode and verify steps, in whatever dtype the model has them, beside a layer without; a
    weight update counts at the next step."""
    bed = SinkBed(monkeypatch, draft_tokens)
    torch.manual_seed(0)
    bed.pool.k_buffer[0].normal_()
    bed.pool.v_buffer[0].normal_()
    sinks = parameter(dtype)
    rows = QUERIES * draft_tokens
    q, (k, v) = torch.randn(rows, HEADS * HEAD_DIM), torch.randn(2, rows, KV_HEADS, HEAD_DIM)
    for given in (sinks, None, sinks):
        slots = bed.prepare()
        out = bed.attend(slots, layer_of(0), q, k, v, sinks=given)
        expected, _ = attention(
            q.view(rows, HEADS, HEAD_DIM),
            *(buffer[0] for buffer in (bed.pool.k_buffer, bed.pool.v_buffer)),
            bed.table,
            bed.live.rows,
            bed.lens + draft_tokens * (draft_tokens > 1),
            scale=HEAD_DIM**-0.5,
            draft_tokens=draft_tokens,
            sinks=given,
        )
        torch.testing.assert_close(out.view_as(expected), expected, rtol=1e-5, atol=1e-5)
        sinks.copy_(sinks.roll(1))
    assert bed.stats.packed_steps == 3 and not bed.stats.base_layers and not bed.stats.fallbacks


@pytest.mark.parametrize(
    "sinks", [torch.zeros(1, HEADS), torch.zeros(HEADS + 1), torch.zeros(HEADS).double(), 1]
)
def test_sinks_of_another_form_are_the_bases(monkeypatch: pytest.MonkeyPatch, sinks: Any) -> None:
    bed = SinkBed(monkeypatch)
    q, (k, v) = torch.zeros(QUERIES, HEADS * HEAD_DIM), torch.zeros(2, QUERIES, KV_HEADS, HEAD_DIM)
    bed.attend(bed.prepare(), layer_of(0), q, k, v, sinks=sinks)
    assert bed.backend.calls[-1] == "layer"
    assert bed.stats.base_layers == {"arguments sinks": 1}
