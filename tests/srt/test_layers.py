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

from kit.runner import DIM, HEADS, make_layer, make_pool, make_runner, set_ranks
from kit.runner import KV_HEADS as RUNNERS_KV_HEADS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_pat import _C
from sglang_pat.srt.layers import (
    SPARSE,
    Heads,
    heads_of,
    ranges,
    reason_against_layer,
    survey_layers,
)

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
KV_HEADS = 2


def _against(
    device: str,
    *,
    group: int = 4,
    dims: tuple[int, int] = (64, 64),
    keys: tuple[int, int] | None = None,
    values: tuple[int, int] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    head_dim: int | None = None,
    mapping: dict[int, tuple[int, bool]] | None = None,
    **changes: Any,
) -> str:
    """The reason against a layer of SGLang's, which is served but for the arguments.

    ``keys``, ``values``: the shape of one slot's; ``head_dim``: what is planned for; ``mapping``:
    of a pool with a part for sliding windows; ``changes``: attributes of the layer.
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
    planned = Heads(heads, KV_HEADS, head_dim or dims[0])
    return reason_against_layer(layer, BF16, pool, planned)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of which one block can have ``limit`` bytes of shared memory, an H200 at first."""
    facts = {"limit": 232_448}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(shared_memory_per_block_optin=facts["limit"]),
    )
    needed = {64: 28_672, 128: 53_248, 256: 102_400}  # as tests/core/test_gpus.py checks
    monkeypatch.setattr(_C, "cuda_min_shared_bytes", needed.__getitem__, raising=False)
    return facts


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type encoder_only"),
        ({"sliding_window_size": None}, ""),
        ({"sliding_window_size": 0}, "a sliding window"),
        ({"use_irope": True}, "chunked attention (use_irope)"),
        ({"mapping": {3: (0, True)}}, "its K/V in the sliding-window pool"),
        ({"mapping": {3: (0, False), 4: (0, True)}}, ""),
        ({"head_dim": 128}, "head dim 64, planned for 128"),
        ({"xai_temperature_len": 1}, "a temperature by position"),
        ({"logit_cap": 30.0}, ""),  # by tanh
        ({"logit_cap": 30.0, "logit_capping_method": "clip"}, "logit capping by clip"),
        ({"tp_q_head_num": 4}, "(4, 2, 2) query, K and V heads, planned for others"),
        ({"tp_k_head_num": 1}, "(8, 1, 2) query, K and V heads, planned for others"),
        ({"tp_v_head_num": 1}, "(8, 2, 1) query, K and V heads, planned for others"),
        ({"dims": (512, 8)}, ""),
        ({"dims": (60, 64)}, "head dim 60, not a multiple of 8 up to 512"),
        ({"dims": (64, 60)}, "head dim 60, not a multiple of 8 up to 512"),
        ({"dims": (520, 64)}, "head dim 520, not a multiple of 8 up to 512"),
        ({"group": 17}, ""),
        ({"keys": (1, 64)}, "a K cache of shape (5, 1, 64)"),
        ({"values": (2, 32)}, "a V cache of shape (5, 2, 32)"),
        ({"dtypes": (FP16, BF16)}, "a torch.float16 cache under torch.bfloat16 queries"),
        ({"dtypes": (BF16, FP16)}, "a torch.float16 cache under torch.bfloat16 queries"),
        ({"dtypes": (E4M3, E4M3)}, ""),
        ({"dtypes": (E4M3, BF16)}, "a torch.float8_e4m3fn cache under torch.bfloat16 queries"),
        ({"dtypes": (BF16, E4M3)}, "a torch.float8_e4m3fn cache under torch.bfloat16 queries"),
        ({"dtypes": (E5M2, E5M2)}, "a torch.float8_e5m2 cache under torch.bfloat16 queries"),
    ],
)
def test_layers(arguments: dict[str, Any], reason: str) -> None:
    assert _against("cpu", **arguments) == reason


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"dims": (128, 128), "group": 16}, ""),
        ({"dims": (256, 256)}, ""),
        ({"dims": (96, 96)}, "head dims 96 and 96, not both one of (64, 128, 256)"),
        ({"dims": (128, 64)}, "head dims 128 and 64, not both one of (64, 128, 256)"),
        ({"group": 17}, "17 query heads per KV head, more than 16"),
        ({"dtypes": (E4M3, E4M3)}, ""),
    ],
)
def test_layers_on_cuda(device: str, arguments: dict[str, Any], reason: str) -> None:
    assert _against(device, **arguments) == reason


def _scaled(k: Any, v: Any, k_float: Any, v_float: Any) -> dict[str, Any]:
    return {"k_scale": k, "v_scale": v, "k_scale_float": k_float, "v_scale_float": v_float}


APART = "K/V scales that are not both on the device and on the host"
HALF, ONE = torch.tensor(0.5), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("scales", "on_gpu", "on_cpu"),
    [
        (_scaled(ONE, ONE, 1.0, 1.0), "", ""),
        (_scaled(HALF, ONE, 0.5, 1.0), "", "K/V scales, which SGLang's attention on a CPU"),
        (_scaled(ONE, HALF, 1.0, 0.5), "", "K/V scales, which SGLang's attention on a CPU"),
        (_scaled(ONE, None, 1.0, None), "", ""),
        (_scaled(0.5, 0.5, None, None), APART, APART),  # as --quantization-param-path does it
        (_scaled(None, None, 0.5, 0.5), APART, APART),
        (_scaled(ONE, HALF, 1.0, None), APART, APART),
        (_scaled(torch.ones(2), ONE, torch.ones(2), 1.0), APART, APART),
        (_scaled(torch.ones(2), ONE, 1.0, 1.0), "2 K/V scales", "2 K/V scales"),
        (_scaled(ONE, HALF, 1.0, -1.0), "a K/V scale of -1.0", "a K/V scale of -1.0"),
        (_scaled(ONE, HALF, 1.0, float("inf")), "a K/V scale of inf", "a K/V scale of inf"),
    ],
)
def test_kv_scales(scales: dict[str, Any], on_gpu: str, on_cpu: str) -> None:
    """They count where K/V are in fp8_e4m3 only."""
    for device, reason in (("cuda", on_gpu), ("cpu", on_cpu)):
        found = _against(device, dtypes=(E4M3, E4M3), **scales)
        assert found.startswith(reason) and bool(found) == bool(reason), found
        assert _against(device, **scales) == ""


@pytest.mark.parametrize("limit", [101_376, 102_399])
def test_head_dim_256_needs_more_shared_memory_than_some_gpus_have(
    limit: int, gpu: dict[str, int]
) -> None:
    gpu["limit"] = limit  # the first is that of an RTX 4090, 3090, L40S or 5090
    reason = (
        "head dim 256, which needs 102400 bytes of shared memory per block where this GPU has "
        f"{limit}"
    )
    assert _against("cuda", dims=(256, 256)) == reason
    assert _against("cuda", dims=(128, 128)) == ""
    assert _against("cpu", dims=(256, 256)) == ""


def test_a_layer_that_the_pool_does_not_have_is_no_answer() -> None:
    with pytest.raises(KeyError):
        _against("cpu", mapping={4: (0, False)})


def test_a_build_without_kernels_serves_no_layer_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_C, "cuda_min_shared_bytes")
    assert "PAT_CUDA=OFF" in _against("cuda")
    assert _against("cpu") == ""


# Of a loaded model.


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 1)


def test_plain_layers_are_all_served() -> None:
    found = survey_layers(make_runner([make_layer(0), make_layer(1)]))
    assert found.reasons == {0: "", 1: ""} and not found.serves_none
    assert str(found) == "all 2 attention layers"


def test_a_sliding_window_leaves_a_layer_to_the_base() -> None:
    found = survey_layers(make_runner([make_layer(0), make_layer(1, sliding_window_size=128)]))
    assert found.reasons == {0: "", 1: "a sliding window"}
    assert str(found) == "1 of 2 attention layers (1 with a sliding window)"
    assert not found.serves_none


def test_llama_4_attends_in_chunks_where_it_has_rope() -> None:
    # As in SGLang's models/llama4.py: every fourth layer has no rope, and only that tells it apart.
    layers = [make_layer(i, use_irope=(i + 1) % 4 != 0) for i in range(8)]
    found = survey_layers(make_runner(layers))
    ours = [layer for layer, reason in found.reasons.items() if not reason]
    assert ours == [3, 7]
    assert found.reasons[0] == "chunked attention (use_irope)"


def test_a_layer_in_the_pool_of_sliding_windows_is_left_to_the_base() -> None:
    found = survey_layers(make_runner([make_layer(0), make_layer(1)], sliding=(0,)))
    assert found.reasons == {0: "its K/V in the sliding-window pool", 1: ""}


def test_a_layer_without_kv_in_the_pool_is_not_decided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    runner = make_runner([make_layer(0), make_layer(1)], token_to_kv_pool=make_pool(1))
    assert survey_layers(runner).reasons == {0: ""}
    assert "attention layers 1 have no K/V in the pool" in caplog.text


def test_of_two_modules_with_one_layer_id_the_one_with_a_reason_counts() -> None:
    windowed = make_layer(0, sliding_window_size=128)
    for layers in ([windowed, make_layer(0)], [make_layer(0), windowed]):
        assert survey_layers(make_runner(layers)).reasons == {0: "a sliding window"}


def test_layers_of_sparse_attention_are_sglangs_though_they_look_like_others() -> None:
    """MiniMax M3: SGLang's wrapper sends them to a backend of its own."""
    config = {
        "architecture": "MiniMaxM3SparseForCausalLM",
        "hf_config": {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1]}},
    }
    found = survey_layers(make_runner([make_layer(layer) for layer in range(3)], config=config))
    assert found.reasons == {0: "", 1: SPARSE, 2: SPARSE}
    assert str(found).startswith("1 of 3 attention layers (2 with sparse attention")


def test_a_rank_has_its_share_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 2)
    assert heads_of(make_runner([])) == (HEADS // 2, RUNNERS_KV_HEADS // 2, DIM, 1)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0], "0"),
        ([0, 1, 2, 7], "0-2, 7"),
        (list(range(0, 26, 2)), "0, 2, 4, ... 24 (13 layers)"),
    ],
)
def test_layers_in_words(ids: list[int], words: str) -> None:
    assert ranges(ids) == words
