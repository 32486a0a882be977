# SPDX-License-Identifier: Apache-2.0
"""Each reason to leave a layer to the base, on its own. No server, no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_pat import refusals

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
KV_HEADS = 2


def _against(
    device: str,
    *,
    group: int = 4,
    dims: tuple[int, int] = (64, 64),
    keys: tuple[int, int] | None = None,
    values: tuple[int, int] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    **changes: Any,
) -> str:
    """The reason against a layer of SGLang's, which is served but for the arguments.

    ``keys``, ``values``: the shape of one slot's; ``changes``: attributes of the layer.
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
    target: Any = SimpleNamespace(num_q_heads=heads, num_kv_heads=KV_HEADS)
    return refusals.reason_against_layer(layer, BF16, pool, target)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type encoder_only"),
        ({"sliding_window_size": None}, ""),
        ({"sliding_window_size": 0}, "a sliding window"),
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
        ({"dtypes": (E4M3, E4M3)}, "a torch.float8_e4m3fn cache under torch.bfloat16 queries"),
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
        ({"dtypes": (E4M3, E4M3)}, "a torch.float8_e4m3fn cache under torch.bfloat16 queries"),
    ],
)
def test_layers_on_cuda(device: str, arguments: dict[str, Any], reason: str) -> None:
    assert _against(device, **arguments) == reason
