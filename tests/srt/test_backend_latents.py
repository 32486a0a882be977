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
from kit.drafts import chains, custom_mask
from kit.latents import HEADS as OF_TARGET
from kit.latents import K_DIM, V_DIM
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpecInputType

from benchmarks.common.reference import attention
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.srt.backend import PatDecodeMixin, PatVerifyMixin

HEADS, LAYERS, SLOTS = 16, 4, 4000
ATTENDS = 3  # the layer of a hybrid that does, as a Kimi Linear's fourth
SCALE = 192**-0.5
DRAFT_TOKENS, HEADS_OF_DRAFTS = 4, 2  # so few rows that a CPU gains from packing them, too
VERIFY = ForwardMode.TARGET_VERIFY
# The third draft token is another successor of the first, the fourth is the third's.
TREES = torch.tensor([[0b1, 0b11, 0b101, 0b1101]] * QUERIES)


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
    """A test bed with the heads of DeepSeek-V2-Lite, or of one of eight ranks of it whose steps
    verify drafts. ``events``: what the pool is asked to write and what the executor runs, in turn.

    ``drafts``: draft tokens of each request; ``masked``: whether they may be a tree.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        hybrid: bool = False,
        *,
        drafts: int = 1,
        masked: bool = False,
    ) -> None:
        self.heads = HEADS if drafts == 1 else HEADS_OF_DRAFTS
        self.drafts = drafts
        target = replace(TARGET, num_q_heads=self.heads, draft_tokens=drafts, **OF_TARGET)
        mixin = PatDecodeMixin if drafts == 1 else PatVerifyMixin
        super().__init__(monkeypatch, {ATTENDS: ""}, mixin=mixin, target=target)
        self.pool = self.backend.token_to_kv_pool = pool_of_latents(hybrid)
        self.table = self.cache.table.req_to_token
        executor = Executor(target, PatConfig(), self.table, draft_masks=masked)
        self.backend._executor = executor
        self.events: list[tuple[str, Any, Any]] = []
        for name, of in (
            *(("set_kv_buffer", self.pool), ("set_mla_kv_buffer", self.pool)),
            ("decode", executor),
        ):
            self._note(monkeypatch, of, name)
        self.layer = RadixAttention(self.heads, K_DIM, SCALE, 1, layer_id=ATTENDS, v_head_dim=V_DIM)
        # Where the new tokens go; their rows say so. SGLang's lengths do not count drafts.
        self.ends = self.lens if drafts == 1 else self.lens + drafts
        self.slots = torch.arange(SLOTS - QUERIES * drafts, SLOTS)
        at = self.ends[:, None] - drafts + torch.arange(drafts)
        self.table[self.live.rows[:, None], at] = self.slots.view(-1, drafts).int()
        self.batch = SimpleNamespace(
            out_cache_loc=self.slots, out_cache_loc_is_physical=True, forward_mode=VERIFY
        )

    def _note(self, monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> None:
        call = getattr(of, name)

        def noted(*given: Any, **options: Any) -> None:
            self.events.append((name, given, options))
            call(*given, **options)

        monkeypatch.setattr(of, name, noted)

    def verify(self, how: str = "eager", masks: torch.Tensor | None = None) -> list[str]:
        """Prepare a verify step; what the base was asked. ``masks``: by default chains."""
        masks = chains(QUERIES, self.drafts) if masks is None else masks
        spec_info = SimpleNamespace(
            draft_token_num=self.drafts,
            custom_mask=custom_mask(masks, self.lens),
            spec_input_type=SpecInputType.NGRAM_VERIFY,
        )
        return self.step(how, mode=VERIFY, spec_info=spec_info)

    def expected(self, q: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        keys = self.pool.get_key_buffer(ATTENDS)
        batch = (self.table, self.live.rows, self.ends)
        of_drafts: dict[str, Any] = {"draft_tokens": self.drafts, "draft_masks": masks}
        out, _ = attention(q, keys, keys[..., :V_DIM], *batch, scale=SCALE, **of_drafts)
        return out


def queries(drafts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """As SGLang's DeepSeek has them: q by head, then by row, and the ends of wider rows."""
    rows, heads = QUERIES * drafts, HEADS if drafts == 1 else HEADS_OF_DRAFTS
    q = torch.randn(heads, rows, V_DIM).transpose(0, 1)
    return q, torch.randn(rows, heads, 192)[..., 128:]


def run_layer(
    bed: LatentBed, forward: Any, q: torch.Tensor, q_rope: torch.Tensor, *, whole: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The output of a layer for these queries and new latents, given ``whole`` or in two parts; and
    the whole queries and latents."""
    k, k_rope = torch.randn(len(q), 1, V_DIM), torch.randn(len(q), 1, K_DIM - V_DIM)
    both = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
    if whole:
        return forward(*both, k, bed.layer, bed.batch), both
    return forward(q, k, k, bed.layer, bed.batch, q_rope=q_rope, k_rope=k_rope), both


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_writes_its_latents_and_attends(
    monkeypatch: pytest.MonkeyPatch, whole: bool, hybrid: bool
) -> None:
    """In two parts, as fa3 gets them, and ``whole``, as SGLang's Triton and torch_native do."""
    bed = LatentBed(monkeypatch, hybrid)
    torch.manual_seed(1)
    q, q_rope = queries()
    assert bed.step("eager") == []
    out, both = run_layer(bed, bed.backend.forward_decode, q, q_rope, whole=whole)
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


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("masks", [None, TREES], ids=["chains", "trees"])
def test_drafts_are_written_and_verified(
    monkeypatch: pytest.MonkeyPatch, masks: torch.Tensor | None, whole: bool, hybrid: bool
) -> None:
    """SGLang gives the draft tokens of a request as neighbouring rows, with strides of all rows."""
    bed = LatentBed(monkeypatch, hybrid, drafts=DRAFT_TOKENS, masked=masks is not None)
    torch.manual_seed(2)
    q, q_rope = queries(DRAFT_TOKENS)
    assert bed.verify(masks=masks) == []
    out, both = run_layer(bed, bed.backend.forward_extend, q, q_rope, whole=whole)
    (write, _, _), (_, ran, options) = bed.events
    assert write == ("set_kv_buffer" if whole else "set_mla_kv_buffer")
    assert torch.equal(bed.pool.get_key_buffer(ATTENDS)[bed.slots], both[1])
    given = (both[0], both[0][..., V_DIM:]) if whole else (q, q_rope)
    for found, wanted in zip((ran[0], options["q_rope"]), given, strict=True):
        assert found.data_ptr() == wanted.data_ptr() and found.stride() == wanted.stride()
    assert (options["k_scale"], options["v_scale"], options["sinks"]) == (1.0, 1.0, None)
    assert out.shape == (QUERIES * DRAFT_TOKENS, HEADS_OF_DRAFTS * V_DIM) and out.is_contiguous()
    wanted = bed.expected(both[0], masks)
    torch.testing.assert_close(out.view_as(wanted), wanted, rtol=1e-5, atol=1e-5)
    stats = bed.stats
    assert (stats.verify_steps, stats.packed_steps) == (1, 1)
    assert not stats.base_layers and not stats.fallbacks and not bed.backend.calls


def test_a_graph_of_drafts_is_replayed_with_a_plan_for_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = LatentBed(monkeypatch, drafts=DRAFT_TOKENS)
    q, q_rope = queries(DRAFT_TOKENS)
    k, k_rope = (torch.randn(QUERIES * DRAFT_TOKENS, 1, dim) for dim in (V_DIM, K_DIM - V_DIM))
    bed.verify("capture")
    bed.backend.forward_extend(q, k, k, bed.layer, bed.batch, q_rope=q_rope, k_rope=k_rope)
    assert [name for name, _, _ in bed.events] == ["set_mla_kv_buffer", "decode"]
    assert bed.verify("replay") == []  # all layers are ours
    assert bed.stats.packed_steps == 1 and not bed.stats.fallbacks and not bed.stats.base_layers


def test_prefills_and_what_expands_latents_are_the_bases_on_a_server_that_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefill reads latents where it finds part of its prompt in the cache. SGLang 0.5.23 expands
    none in a verify step, and a layer that did would be its own."""
    bed = LatentBed(monkeypatch, drafts=DRAFT_TOKENS)
    bed.pool.device = "cuda"  # on a CPU there is no other attention for a verify step
    q, q_rope = queries(DRAFT_TOKENS)
    expanding = RadixAttention(
        HEADS_OF_DRAFTS, 192, SCALE, HEADS_OF_DRAFTS, layer_id=ATTENDS, v_head_dim=128
    )
    wide = torch.zeros(len(q), HEADS_OF_DRAFTS * 192)
    for layer, given, parts in ((bed.layer, q, {"q_rope": q_rope}), (expanding, wide, {})):
        bed.step("eager", mode=ForwardMode.EXTEND)
        bed.backend.forward_extend(given, None, None, layer, bed.batch, **parts)
        assert bed.backend.calls[-1] == "layer" and not bed.events
    assert bed.stats.base_forwards == {"extend": 2} and bed.backend._layers.all_are_ours
    bed.verify()
    bed.backend.forward_extend(wide, None, None, expanding, bed.batch)
    assert bed.backend.calls[-1] == "layer" and not bed.events
    (reason,) = bed.stats.base_layers
    assert reason == "(2, 2, 2) query, K and V heads, planned for others"
