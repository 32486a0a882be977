# SPDX-License-Identifier: Apache-2.0
"""Each reason to leave a layer to the base, and what is found out of a model's modules and the K/V
pool before the first forward. No server, no GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import (
    BF16,
    DIM,
    E4M3,
    FP16,
    HEADS,
    KV_HEADS,
    LATENTS,
    make_layer,
    make_pool,
    make_runner,
    set_ranks,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_pat import _C
from sglang_pat.srt.facts import SPARSE, TEMPERATURE
from sglang_pat.srt.layers import (
    Heads,
    describe,
    heads_of,
    ranges,
    reason_against_layer,
    survey_layers,
)

E5M2 = torch.float8_e5m2


def _against(
    device: str,
    *,
    group: int = 4,
    dims: tuple[int, int] = (64, 64),
    keys: tuple[int, int] | None = None,
    values: tuple[int, int] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    head_dim: int | None = None,
    drafts: int = 1,
    mapping: dict[int, tuple[int, bool]] | None = None,
    **changes: Any,
) -> str:
    """The reason against a layer of SGLang's, which is served but for the arguments.

    ``keys``, ``values``: the shape of one slot's; ``head_dim``, ``drafts``: what is planned for;
    ``mapping``: of a pool with a part for sliding windows; ``changes``: attributes of the layer.
    """
    heads = group * KV_HEADS  # the plans' too
    layer = RadixAttention(heads, dims[0], 1.0, KV_HEADS, layer_id=3, v_head_dim=dims[1])
    for name, value in changes.items():
        assert hasattr(layer, name)
        setattr(layer, name, value)
    buffers = [
        torch.zeros(5, *(shape or (KV_HEADS, dim)), dtype=dtype)
        for shape, dim, dtype in zip((keys, values), dims, dtypes, strict=True)
    ]
    pool = SimpleNamespace(
        device=device,
        get_key_buffer={3: buffers[0]}.__getitem__,
        get_value_buffer={3: buffers[1]}.__getitem__,
    )
    if mapping is not None:
        pool.layers_mapping = mapping
    planned = Heads(heads, KV_HEADS, head_dim or dims[0], drafts)
    return reason_against_layer(layer, BF16, pool, planned)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, and as device 2 an RTX 4090: by what one block can have of shared memory."""
    limits = {"cuda": 232_448, "cuda:1": 232_448, "cuda:2": 101_376}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_block_optin=limits[device]),
    )
    needed = {64: 28_672, 128: 53_248, 256: 102_400}  # as tests/core/test_exported_limits.py checks
    monkeypatch.setattr(_C, "cuda_min_shared_bytes", needed.__getitem__, raising=False)
    set_ranks(monkeypatch, 1)


NO_KERNEL = "not both one of (64, 128, 256), nor 576 and 512"
CPU, GPU, CLIP = "cpu", "cuda:1", {"logit_cap": 30.0, "logit_capping_method": "clip"}


@pytest.mark.parametrize(
    ("device", "arguments", "reason"),
    [
        (CPU, {}, ""),
        (CPU, {"is_cross_attention": True}, "cross attention"),
        (CPU, {"attn_type": AttentionType.ENCODER_ONLY}, "attention type encoder_only"),
        (CPU, {"sliding_window_size": None}, ""),
        (CPU, {"sliding_window_size": 0}, "a sliding window"),
        (CPU, {"use_irope": True}, "chunked attention (use_irope)"),
        (CPU, {"mapping": {3: (0, True)}}, "its K/V in the sliding-window pool"),
        (CPU, {"mapping": {3: (0, False), 4: (0, True)}}, ""),
        (CPU, {"head_dim": 128}, "head dim 64, planned for 128"),
        (CPU, {"xai_temperature_len": 1}, "a temperature by position"),
        (GPU, {"logit_cap": 30.0}, ""),  # by tanh
        (CPU, CLIP, "logit capping by clip"),
        (CPU, {"logit_cap": 30.0, "drafts": 4}, ""),
        (GPU, {"logit_cap": 30.0, "drafts": 4}, "logit capping, under speculative decoding"),
        (CPU, {"tp_q_head_num": 4}, "(4, 2, 2) query, K and V heads, planned for others"),
        (CPU, {"tp_k_head_num": 1}, "(8, 1, 2) query, K and V heads, planned for others"),
        (CPU, {"tp_v_head_num": 1}, "(8, 2, 1) query, K and V heads, planned for others"),
        (CPU, {"dims": (576, 8)}, ""),
        (CPU, {"dims": (60, 64)}, "head dim 60, not a multiple of 8 up to 576"),
        (CPU, {"dims": (64, 60)}, "head dim 60, not a multiple of 8 up to 576"),
        (CPU, {"dims": (584, 64), "group": 17}, "head dim 584, not a multiple of 8 up to 576"),
        (CPU, {"keys": (1, 64)}, "a K cache of shape (5, 1, 64)"),
        (CPU, {"values": (2, 32)}, "a V cache of shape (5, 2, 32)"),
        (CPU, {"dtypes": (FP16, BF16)}, "a torch.float16 cache under torch.bfloat16 queries"),
        (CPU, {"dtypes": (BF16, FP16)}, "a torch.float16 cache under torch.bfloat16 queries"),
        (CPU, {"dtypes": (E4M3, E4M3)}, ""),
        (GPU, {"dtypes": (E4M3, E4M3)}, ""),
        (CPU, {"dtypes": (E4M3, BF16)}, "a torch.float8_e4m3fn cache under torch.bfloat16 queries"),
        (CPU, {"dtypes": (BF16, E4M3)}, "a torch.float8_e4m3fn cache under torch.bfloat16 queries"),
        (CPU, {"dtypes": (E5M2, E5M2)}, "a torch.float8_e5m2 cache under torch.bfloat16 queries"),
        (GPU, {}, ""),
        (GPU, {"dims": (256, 256), "group": 16}, ""),
        ("cuda:2", {"dims": (128, 128)}, ""),
        ("cuda:2", {"dims": (256, 256)}, "head dim 256, which needs 102400 bytes of shared memory "
         "per block where this GPU has 101376"),
        (GPU, {"dims": (96, 96)}, "head dims 96 and 96, " + NO_KERNEL),
        (GPU, {"dims": (128, 64)}, "head dims 128 and 64, " + NO_KERNEL),
        (GPU, {"dims": (512, 512)}, "head dims 512 and 512, " + NO_KERNEL),  # without a rope part
        (GPU, {"dims": (576, 512), "group": 32}, ""),
        (GPU, {"dims": (576, 512), "group": 33}, "33 query heads on a latent, of which packing "
         "saves nothing"),
        (CPU, {"dims": (576, 512), "group": 33}, ""),
        (GPU, {"dims": (576, 512), "group": 8, "drafts": 4}, ""),
        (GPU, {"dims": (576, 512), "group": 8, "drafts": 5}, "5 draft tokens of 8 query heads on a "
         "latent, of which packing saves nothing"),
        (CPU, {"dims": (576, 512), "group": 8, "drafts": 5}, ""),
        (GPU, {"group": 17}, "17 query heads per KV head, more than 16"),
        (GPU, {"group": 8, "drafts": 8}, ""),
        (GPU, {"group": 8, "drafts": 9}, "9 draft tokens of 8 query heads per KV head: from 65 "
         "packed rows a request on, SGLang's attention serves them"),
    ],
)  # fmt: skip
def test_layers(device: str, arguments: dict[str, Any], reason: str) -> None:
    assert _against(device, **arguments) == reason


APART = "K/V scales that are not both on the device and on the host"
ON_CPU = "K/V scales, which SGLang's attention on a CPU does not apply"
HALF, ONE = torch.tensor(0.5), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("scales", "on_gpu", "on_cpu"),
    [
        ((ONE, ONE, 1.0, 1.0), "", ""),
        ((HALF, ONE, 0.5, 1.0), "", ON_CPU),
        ((ONE, HALF, 1.0, 0.5), "", ON_CPU),
        ((ONE, None, 1.0, None), "", ""),
        ((0.5, 0.5, None, None), APART, APART),  # as --quantization-param-path does it
        ((None, None, 0.5, 0.5), APART, APART),
        ((ONE, HALF, 1.0, None), APART, APART),
        ((torch.ones(2), ONE, torch.ones(2), 1.0), APART, APART),
        ((torch.ones(2), ONE, 1.0, 1.0), "2 K/V scales", "2 K/V scales"),
        ((ONE, HALF, 1.0, 0.0), "a K/V scale of 0.0", "a K/V scale of 0.0"),
        ((ONE, HALF, 1.0, float("inf")), "a K/V scale of inf", "a K/V scale of inf"),
    ],
)
def test_kv_scales(scales: tuple[Any, ...], on_gpu: str, on_cpu: str) -> None:
    """They count where K/V are in fp8_e4m3 only."""
    names = ("k_scale", "v_scale", "k_scale_float", "v_scale_float")
    given = dict(zip(names, scales, strict=True))
    for device, reason in (("cuda", on_gpu), ("cpu", on_cpu)):
        assert _against(device, dtypes=(E4M3, E4M3), **given) == reason
        assert _against(device, **given) == ""


# Of a loaded model.

WINDOW = {"sliding_window_size": 128}
# MiniMax M3: SGLang's wrapper sends such layers to a backend of its own, to look at they are others
M3 = {
    "architecture": "MiniMaxM3SparseForCausalLM",
    "hf_config": {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1]}},
}
GROK = {"architecture": "Grok1ForCausalLM", "hf_config": {"attn_temperature_len": 1024}}


@pytest.mark.parametrize(
    ("layers", "runner", "reasons", "words"),
    [
        ([{}, {}], {}, {0: "", 1: ""}, "all 2 attention layers"),
        ([{}, {}], {"sliding": (0,)}, {0: "its K/V in the sliding-window pool", 1: ""},
         "1 of 2 attention layers (1 with its K/V in the sliding-window pool)"),
        ([{}, {}, {}], {"config": M3}, {0: "", 1: SPARSE, 2: SPARSE},
         f"1 of 3 attention layers (2 with {SPARSE})"),
        # What stands in the models' code alone, as doctor has it.
        ([{}, WINDOW], {"config": GROK}, {0: TEMPERATURE, 1: TEMPERATURE},
         f"none of 2 attention layers (2 with {TEMPERATURE})"),
        # Of two modules with one layer id, the one with a reason counts.
        ([WINDOW | {"layer_id": 0}, {"layer_id": 0}], {}, {0: "a sliding window"},
         "none of 1 attention layers (1 with a sliding window)"),
    ],
)  # fmt: skip
def test_a_survey_of_a_loaded_model(
    layers: list[dict[str, Any]], runner: dict[str, Any], reasons: dict[int, str], words: str
) -> None:
    made = [make_layer(**{"layer_id": index} | each) for index, each in enumerate(layers)]
    found = survey_layers(make_runner(made, **runner))
    assert (found, describe(found)) == (reasons, words)


def test_layers_without_kv_and_those_out_of_a_dict(caplog: pytest.LogCaptureFixture) -> None:
    """Of the first nothing is decided. Transformers' code has its layers in a dict."""
    caplog.set_level(logging.INFO, "sglang_pat")
    runner = make_runner([make_layer(2)], token_to_kv_pool=make_pool(2))
    runner.model.attention_instances = {0: make_layer(0), 1: make_layer(1, **WINDOW)}
    assert survey_layers(runner) == {0: "", 1: "a sliding window"}
    assert "attention layers 2 have no K/V in the pool" in caplog.text


@pytest.mark.parametrize("first", [0, 1])
def test_of_a_layer_with_latents_the_module_that_decodes_counts(first: int) -> None:
    """As SGLang's DeepSeek has it; the other expands latents and prefills."""
    capped = {"logit_cap": 30.0, "logit_capping_method": "clip"}
    latents = torch.zeros(1, 1, 576, dtype=BF16)
    pool = make_pool(0)
    pool.get_key_buffer = {0: latents}.__getitem__
    pool.get_value_buffer = {0: latents[..., :512]}.__getitem__
    for decodes, prefills, reason in (({}, capped, ""), (capped, {}, "logit capping by clip")):
        modules = [
            RadixAttention(HEADS, 576, 1.0, 1, layer_id=0, v_head_dim=512, **decodes),
            RadixAttention(HEADS, 192, 1.0, HEADS, layer_id=0, v_head_dim=128, **prefills),
        ]
        layers = [modules[first], modules[1 - first]]
        assert survey_layers(make_runner(layers, config=LATENTS, token_to_kv_pool=pool)) == {
            0: reason
        }


def test_a_rank_has_its_share_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 2)
    assert heads_of(make_runner([])) == (HEADS // 2, KV_HEADS // 2, DIM, 1, 0)
    latents = heads_of(make_runner([], config=LATENTS))
    assert latents == (HEADS // 2, 1, 576, 1, 512)
    # In words.
    assert ranges([0, 1, 2, 7]) == "0-2, 7"
    assert ranges(list(range(0, 26, 2))) == "0, 2, 4, ... 24 (13 layers)"
