# SPDX-License-Identifier: Apache-2.0
"""Layers as the backend runs them over SGLang's own pools and the CPU's executor, against attention
by its definition: K/V in fp8_e4m3, attention sinks, latents (MLA), and hybrid models. No server, no
GPU. ``serving/test_kinds.py`` has SGLang's wrapper of hybrid models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import HEAD_DIM, HEADS, LAYERS, QUERIES, TARGET, BackendBed
from kit.latents import HEADS as OF_LATENTS
from kit.latents import K_DIM, V_DIM
from kit.runner import make_layer as make_attention
from kit.runner import make_runner, set_ranks
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from benchmarks.common.reference import attention
from sglang_pat.ops import Executor
from sglang_pat.srt.layers import survey_layers
from sglang_pat.srt.support import E4M3

SLOTS = 4000
VERIFY = ForwardMode.TARGET_VERIFY
ATTENDS = (1, 3)  # layers of four, of a hybrid


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """What SGLang's pool of latents asks when it writes: whether ranks hold parts of sequences."""
    torch.manual_seed(0)
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        yield


def pool_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """SGLang's pool of a model of that kind, random K/V or latents in it."""
    common = {"size": SLOTS, "page_size": 1, "dtype": dtype, "device": "cpu"}
    latents = {"kv_lora_rank": V_DIM, "qk_rope_head_dim": K_DIM - V_DIM}
    heads = {"head_num": HEADS, "head_dim": HEAD_DIM}
    hybrid = {"full_attention_layer_ids": list(ATTENDS), "mamba_pool": None}
    alone = {"layer_num": LAYERS + 1, "enable_memory_saver": False}
    of_one = {"head_num": 1, "head_dim": 72, "use_mla": True}
    pool = {
        "heads": lambda: MHATokenToKVPool(**common, **heads, **alone),
        "hybrid heads": lambda: HybridLinearKVPool(**common, **heads, **hybrid),
        "latents": lambda: MLATokenToKVPool(**common, **latents, **alone),
        "hybrid latents": lambda: HybridLinearKVPool(**common, **latents, **hybrid, **of_one),
    }[kind]()
    for layer_id in ATTENDS:
        for buffer in (pool.get_value_buffer(layer_id), pool.get_key_buffer(layer_id)):
            buffer.copy_(torch.randn(buffer.shape))
    return pool


def layer_of(
    layer_id: int = 1, heads: int = HEADS, scales: tuple[float, float] | None = None
) -> RadixAttention:
    """A layer with K and V of ``HEADS`` heads, and these scales as SGLang has them, or none."""
    layer = RadixAttention(heads, HEAD_DIM, 0.25, HEADS, layer_id=layer_id)
    if scales is not None:
        layer.k_scale, layer.v_scale = map(torch.tensor, scales)
        layer.k_scale_float, layer.v_scale_float = scales
    return layer


class PoolBed(BackendBed):
    """A test bed over a pool of SGLang's and the CPU's executor. ``drafts``: tokens of a request
    that a step verifies, ``masked``: which may be a tree; ``sizes``: of the target."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        *,
        dtype: torch.dtype = torch.float32,
        drafts: int = 1,
        masked: bool = False,
        **sizes: int,
    ) -> None:
        target = replace(TARGET, draft_tokens=drafts, **sizes)
        # Said to be served: on a CPU the base would not apply scales.
        super().__init__(monkeypatch, dict.fromkeys(ATTENDS, ""), target=target)
        self.drafts = drafts
        self.pool = self.backend.token_to_kv_pool = pool_of(kind, dtype)
        self.table = self.cache.table.req_to_token
        executor = Executor(target, self.table, draft_masks=masked)
        self.backend._executor = executor
        # Where the new tokens go; their rows say so. SGLang's lengths do not count drafts.
        self.ends = self.lens if drafts == 1 else self.lens + drafts
        self.slots = torch.arange(SLOTS - QUERIES * drafts, SLOTS)
        at = self.ends[:, None] - drafts + torch.arange(drafts)
        self.table[self.live.rows[:, None], at] = self.slots.view(-1, drafts).int()
        self.batch = SimpleNamespace(
            out_cache_loc=self.slots,
            out_cache_loc_is_physical=True,
            forward_mode=VERIFY,
        )

    def prepare(self, masks: torch.Tensor | None = None) -> None:
        """Prepare a step without a graph that the base has no part in."""
        asked = self.step("eager") if self.drafts == 1 else self.verify(masks=masks)
        assert asked == []

    def forward(self, layer: Any, *qkv: Any, **given: Any) -> torch.Tensor:
        run = self.backend.forward_decode if self.drafts == 1 else self.backend.forward_extend
        out: torch.Tensor = run(*qkv, layer, self.batch, **given)
        return out

    def truth(self, layer: Any, q: torch.Tensor, **options: Any) -> torch.Tensor:
        keys = self.pool.get_key_buffer(layer.layer_id)
        values = self.pool.get_value_buffer(layer.layer_id)
        batch = (self.table, self.live.rows, self.ends)
        options |= {"scale": layer.scaling, "draft_tokens": self.drafts}
        return attention(q, keys, values, *batch, **options)[0]

    def check(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """The output of the only layer of a step that was packed."""
        torch.testing.assert_close(out.view_as(expected), expected, rtol=1e-4, atol=1e-4)
        stats = self.stats
        assert stats.packed_steps == stats.decode_steps > 0 and self.backend.calls == []
        assert not stats.fallbacks and not stats.base_layers and not stats.base_forwards


# K/V in fp8_e4m3.


@pytest.mark.parametrize("scales", [None, (1.0, 1.0), (0.037, 1.75), (3.0, 0.02)])
def test_kv_are_stored_by_their_scales_and_read_by_them(
    monkeypatch: pytest.MonkeyPatch, scales: tuple[float, float] | None
) -> None:
    """Exactly the bytes of SGLang's rule; without scales they are 1. Each layer has its own, and
    without a graph they may change."""
    bed = PoolBed(monkeypatch, "heads", dtype=E4M3)
    bed.prepare()
    q, k, v = torch.randn(3, QUERIES, HEADS, HEAD_DIM)
    for layer_id, factor in ((1, 1.0), (3, 1.0), (1, 4.0)):
        given = None if scales is None else (scales[0] * factor, scales[1] / factor)
        layer, (k_scale, v_scale) = layer_of(layer_id, scales=given), given or (1.0, 1.0)
        out = bed.forward(layer, q, k.clone(), v.clone())  # the pool divides them in place
        stored = bed.pool.get_key_buffer(layer_id), bed.pool.get_value_buffer(layer_id)
        for cache, new, scale in zip(stored, (k, v), (k_scale, v_scale), strict=True):
            expected = (new / scale).to(E4M3)
            assert torch.equal(cache.view(torch.uint8)[bed.slots], expected.view(torch.uint8))
        bed.check(out, bed.truth(layer, q, k_scale=k_scale, v_scale=v_scale))


def test_scales_that_change_after_the_capture_stop_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph holds them as parameters of its launches."""
    bed = PoolBed(monkeypatch, "heads", dtype=E4M3)
    layers = [layer_of(1, scales=(1.0, 1.0)), layer_of(3)]
    bed.step("capture")
    for layer in layers:
        bed.forward(layer, *torch.randn(3, QUERIES, HEADS, HEAD_DIM))
    bed.step()
    layers[0].v_scale_float = 0.5
    changed = r"layer 1 are now \(1.0, 0.5\), but the decode graphs hold \(1.0, 1.0\)"
    with pytest.raises(RuntimeError, match=f"{changed}.* restart the server.*--disable-cuda-graph"):
        bed.step()
    layers[0].v_scale_float = 1.0
    bed.step()


# Attention sinks, of four query heads a KV head.

SINKING = 4 * HEADS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_layer_with_sinks_is_served(
    monkeypatch: pytest.MonkeyPatch, drafts: int, dtype: torch.dtype
) -> None:
    """In decode and verify steps, in whatever dtype the model has them, beside a layer without; a
    weight update counts at the next step."""
    bed = PoolBed(monkeypatch, "heads", drafts=drafts, num_q_heads=SINKING)
    layer = layer_of(heads=SINKING)
    values = torch.tensor([8.0, -30.0, float("-inf"), 0.5]).repeat(HEADS)
    sinks = torch.nn.Parameter(values.to(dtype), requires_grad=False)
    rows = QUERIES * drafts
    q, (k, v) = torch.randn(rows, SINKING, HEAD_DIM), torch.randn(2, rows, HEADS, HEAD_DIM)
    for given in (sinks, None, sinks):
        bed.prepare()
        out = bed.forward(layer, q.flatten(1), k, v, sinks=given)
        bed.check(out, bed.truth(layer, q, sinks=given))
        sinks.copy_(sinks.roll(1))


@pytest.mark.parametrize(
    "sinks", [torch.zeros(1, SINKING), torch.zeros(SINKING + 1), torch.zeros(SINKING).double(), 1]
)
def test_sinks_of_another_form_are_the_bases(monkeypatch: pytest.MonkeyPatch, sinks: Any) -> None:
    bed = PoolBed(monkeypatch, "heads", num_q_heads=SINKING)
    bed.prepare()
    q, (k, v) = torch.zeros(QUERIES, SINKING * HEAD_DIM), torch.zeros(2, QUERIES, HEADS, HEAD_DIM)
    bed.forward(layer_of(heads=SINKING), q, k, v, sinks=sinks)
    assert bed.backend.calls[-1] == "layer"
    assert bed.stats.base_layers == {"arguments sinks": 1}


# Latents, with the heads of DeepSeek-V2-Lite; of one of eight ranks of it where steps verify
# drafts: so few rows that a CPU gains from packing them, too.

SCALE, DRAFT_TOKENS = 192**-0.5, 4
# The third draft token is another successor of the first, the fourth is the third's.
TREES = torch.tensor([[0b1, 0b11, 0b101, 0b1101]] * QUERIES)


class LatentBed(PoolBed):
    """``ran``: the queries and options that the executor ran."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: str = "latents", drafts: int = 1, **how: Any
    ) -> None:
        self.heads = heads = 16 if drafts == 1 else 2
        super().__init__(monkeypatch, kind, drafts=drafts, num_q_heads=heads, **OF_LATENTS, **how)
        self.ran: list[tuple[torch.Tensor, dict[str, Any]]] = []
        run = self.backend._executor.decode

        def noted(q: torch.Tensor, *given: Any, **options: Any) -> None:
            self.ran.append((q, options))
            run(q, *given, **options)

        monkeypatch.setattr(self.backend._executor, "decode", noted)
        self.layer = RadixAttention(heads, K_DIM, SCALE, 1, layer_id=ATTENDS[1], v_head_dim=V_DIM)
        # The module of the same layer that expands latents; SGLang 0.5.23 prefills with it alone.
        of_it = {"layer_id": ATTENDS[1], "v_head_dim": 128}
        self.expanding = RadixAttention(heads, 192, SCALE, heads, **of_it)
        # As SGLang's DeepSeek has them: q by head, then by row, and the ends of wider rows.
        rows = QUERIES * drafts
        self.q = torch.randn(heads, rows, V_DIM).transpose(0, 1)
        self.q_rope = torch.randn(rows, heads, 192)[..., 128:]
        self.k, self.k_rope = torch.randn(rows, 1, V_DIM), torch.randn(rows, 1, K_DIM - V_DIM)


@pytest.mark.parametrize("kind", ["latents", "hybrid latents"])
@pytest.mark.parametrize("form", ["parts", "whole", "flat"])
@pytest.mark.parametrize("masks", ["none", "chains", "trees"])
def test_a_layer_writes_its_latents_and_attends(
    monkeypatch: pytest.MonkeyPatch, masks: str, form: str, kind: str
) -> None:
    """In two parts, as fa3 gets them, ``whole``, as SGLang's Triton and torch_native do, or flat
    and without latents to write. The draft tokens of a request are neighbouring rows."""
    drafts = 1 if masks == "none" else DRAFT_TOKENS
    bed = LatentBed(monkeypatch, kind, drafts, masked=masks == "trees")
    trees = TREES if masks == "trees" else None
    bed.prepare(trees)
    q, k = torch.cat([bed.q, bed.q_rope], -1), torch.cat([bed.k, bed.k_rope], -1)
    written, given = k, (bed.q, bed.q_rope)
    if form == "whole":
        given = (q, q[..., V_DIM:])
        out = bed.forward(bed.layer, q, k, bed.k)
    elif form == "parts":
        out = bed.forward(bed.layer, bed.q, bed.k, bed.k, q_rope=bed.q_rope, k_rope=bed.k_rope)
    else:
        written = bed.pool.get_key_buffer(ATTENDS[1])[bed.slots]
        given = tuple(part.flatten(1) for part in given)
        out = bed.forward(bed.layer, given[0], None, None, q_rope=given[1], k_rope=None)
    assert torch.equal(bed.pool.get_key_buffer(ATTENDS[1])[bed.slots], written)
    ((ran, options),) = bed.ran
    # Views of what came, whatever its strides.
    assert [part.data_ptr() for part in (ran, options["q_rope"])] == [
        part.data_ptr() for part in given
    ]
    assert (options["k_scale"], options["v_scale"], options["sinks"]) == (1.0, 1.0, None)
    assert ran.shape == bed.q.shape and out.shape == (len(q), bed.heads * V_DIM)
    bed.check(out, bed.truth(bed.layer, q, draft_masks=trees))
    assert bed.stats.verify_steps == (drafts > 1)


@pytest.mark.parametrize("drafts", [1, DRAFT_TOKENS])
def test_what_expands_latents_or_gives_more_and_prefills_on_them_are_the_bases(
    monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """A prefill reads latents where it finds part of its prompt in the cache. None are expanded in
    a verify step, and a layer that did would be the base's."""
    bed = LatentBed(monkeypatch, drafts=drafts)
    bed.pool.device = "cuda"  # on a CPU there is no other attention for a verify step

    def leave(layer: Any, q: torch.Tensor, **given: Any) -> None:
        bed.forward(layer, q, None, None, **given)
        assert bed.backend.calls[-1] == "layer" and not bed.ran

    wide, parts = torch.zeros(len(bed.q), bed.heads * 192), {"q_rope": bed.q_rope}
    if drafts > 1:
        for layer, q, given in ((bed.layer, bed.q, parts), (bed.expanding, wide, {})):
            bed.step("eager", mode=ForwardMode.EXTEND)
            leave(layer, q, **given)
        assert bed.stats.base_forwards == {"extend": 2} and bed.backend._layers.all_are_ours
    bed.prepare()
    leave(bed.expanding, wide)
    heads = (bed.heads,) * 3
    assert bed.stats.base_layers == {f"{heads} query, K and V heads, planned for others": 1}
    for name in ("topk_indices", "sinks"):
        bed = LatentBed(monkeypatch, drafts=drafts)
        bed.pool.device = "cuda"
        bed.prepare()
        leave(bed.layer, bed.q, q_rope=bed.q_rope, **{name: torch.zeros(bed.heads)})
        assert bed.stats.base_layers == {f"arguments {name}": 1}


# Layers of plain attention, also of hybrid models, whose pool has its own numbers for layers.


@pytest.mark.parametrize("kind", ["heads", "hybrid heads"])
@pytest.mark.parametrize(("layer_id", "drafts"), [(1, 1), (3, 1), (1, 3)])
def test_a_layer_writes_its_kv_and_attends(
    monkeypatch: pytest.MonkeyPatch, layer_id: int, drafts: int, kind: str
) -> None:
    """Its scales count in fp8_e4m3 only."""
    bed = PoolBed(monkeypatch, kind, drafts=drafts)
    bed.prepare()
    q, k, v = torch.randn(3, QUERIES * drafts, HEADS, HEAD_DIM)
    layer = layer_of(layer_id, scales=(0.5, 2.0))
    layer.logit_cap = 2.0
    keys, values = bed.pool.get_key_buffer(layer_id), bed.pool.get_value_buffer(layer_id)
    before = keys.clone()
    # As in layers that share their K/V with another one, or that write it themselves.
    for given, options in (((k, v), {"save_kv_cache": False}), ((None, None), {})):
        out = bed.forward(layer, q.flatten(1), *given, **options)
        bed.check(out, bed.truth(layer, q, logit_cap=2.0))
        assert torch.equal(keys, before)
    out = bed.forward(layer, q.flatten(1), k, v)
    assert torch.equal(keys[bed.slots], k) and torch.equal(values[bed.slots], v)
    bed.check(out, bed.truth(layer, q, logit_cap=2.0))


def test_the_survey_leaves_layers_out_that_have_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning attention (Bailing, MiniCPM) has modules like attention's, with other heads, which
    SGLang's wrapper never sends to us."""
    set_ranks(monkeypatch, 1)
    layers = [make_attention(layer) for layer in range(4)]
    layers[0].tp_k_head_num = layers[2].tp_v_head_num = 1
    pool = pool_of("hybrid heads", torch.bfloat16)
    assert list(survey_layers(make_runner(layers, token_to_kv_pool=pool))) == [1, 3]
