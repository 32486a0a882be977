# SPDX-License-Identifier: Apache-2.0
"""The factors of K/V in fp8_e4m3: a layer's, as SGLang loads them from the checkpoint.

SGLang stores K / k_scale and V / v_scale, and every attention multiplies by them again. A layer has
each as a tensor on the device (``k_scale``), with which the pool writes, and as a float on the host
(``k_scale_float``), which our kernels take; both are None for a checkpoint without scales, which
means 1 (S layers/quantization/kv_cache.py, layers/radix_attention.py:94).
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch

E4M3 = torch.float8_e4m3fn


class Scales(NamedTuple):
    """What the values of a layer's K and V are multiplied by."""

    k: float
    v: float


ONES = Scales(1.0, 1.0)


def scales_of(layer: Any) -> Scales:
    """The scales of a layer against which ``reason_against_scales`` has nothing; reads no device
    memory."""
    k, v = layer.k_scale_float, layer.v_scale_float
    return Scales(1.0 if k is None else k, 1.0 if v is None else v)


def reason_against_scales(layer: Any, device: str) -> str:
    """Why the base must serve a layer of an fp8_e4m3 pool on ``device``, or ""."""
    for scale, known in (
        (layer.k_scale, layer.k_scale_float),
        (layer.v_scale, layer.v_scale_float),
    ):
        if scale is None and known is None:
            continue
        # --quantization-param-path sets the first alone, to a float.
        if scale is None or not isinstance(known, float):
            return "K/V scales that are not both on the device and on the host"
        if isinstance(scale, torch.Tensor) and scale.numel() != 1:
            return f"{scale.numel()} K/V scales"
        if not 0 < known < inf:
            return f"a K/V scale of {known}"
        if known != 1 and torch.device(device).type == "cpu":
            return "K/V scales, which SGLang's attention on a CPU does not apply"
    return ""


class CapturedScales:
    """The scales that are in decode graphs, where they are parameters of launches: what SGLang
    loads later does not reach them."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Any, Scales]] = {}

    def add(self, layer: Any, scales: Scales) -> None:
        """Note a layer of a graph that is being captured. One without scales cannot get any."""
        if layer.k_scale is not None or layer.v_scale is not None:
            self._layers[id(layer)] = layer, scales

    def check(self) -> None:
        """Raise RuntimeError if a weight update has changed a scale since the capture."""
        for layer, scales in self._layers.values():
            if layer.k_scale_float != scales.k or layer.v_scale_float != scales.v:
                raise RuntimeError(
                    f"sglang_pat: the K/V scales of layer {layer.layer_id} are now "
                    f"{tuple(scales_of(layer))}, but the decode graphs hold {tuple(scales)}: after "
                    f"a weight update that changes them, restart the server, or run it with "
                    f"--disable-cuda-graph"
                )
