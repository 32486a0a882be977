# SPDX-License-Identifier: Apache-2.0
"""How fast a GPU moves and computes, as far as a plan has to know.

A plan weighs bytes against products and both against the cost of an item, so a rate that is off by
a fifth hardly changes it. Only the H200 has been measured; the rates of others are the vendor's,
times what our kernels reach of the vendor's rates there.
"""

from __future__ import annotations

import logging
import re
from typing import Any

logger = logging.getLogger("sglang_pat")

H200_SMS = 132
H200_BYTES_PER_S, H200_FLOPS_PER_S = 4.3e12, 600e12  # as measured (docs/experiments/README.md)

# The vendor's TB/s and dense bf16 TFLOP/s with fp32 sums, by a word or words of the device's name;
# the first match counts.
KNOWN: dict[str, tuple[float, float]] = {
    "H200": (4.8, 989),
    "H100 PCIe": (2.0, 756),
    "H100 NVL": (3.9, 835),
    "H100": (3.35, 989),
    "A100-SXM4-80GB": (2.04, 312),
    "A100 80GB": (1.94, 312),
    "A100": (1.56, 312),
    "L40S": (0.864, 362),
    "L4": (0.3, 121),
    "RTX 4090": (1.01, 165),
    "RTX 3090": (0.936, 71),
}
# Dense bf16 TFLOP/s of one SM by compute capability, of GPUs that are not known: of the H200, A100,
# RTX 3090, RTX 4090, B200 and RTX 5090.
_PER_SM = {
    (9, 0): KNOWN["H200"][1] / H200_SMS,
    (8, 0): KNOWN["A100"][1] / 108,
    (8, 6): KNOWN["RTX 3090"][1] / 82,
    (8, 9): KNOWN["RTX 4090"][1] / 128,
    (10, 0): 2250 / 148,
    (12, 0): 209 / 170,
}


def rates(properties: Any) -> tuple[float, float]:
    """Bytes and FLOPs per second of a device of ``torch.cuda.get_device_properties``.

    A GPU that is not known is estimated, from its memory's clock and width where torch tells them,
    and from the number and kind of its SMs; that is logged.
    """
    known = (KNOWN[words] for words in KNOWN if re.search(rf"\b{words}\b", properties.name))
    stated = next(known, None)
    if stated is None:
        stated = _estimate(properties)
        logger.warning(
            "sglang_pat: plans for %s, which it does not know, with an estimate of %.2f TB/s and "
            "%.0f TFLOP/s in bf16",
            properties.name,
            *stated,
        )
    terabytes, teraflops = stated
    vendors_terabytes, vendors_teraflops = KNOWN["H200"]
    return (
        H200_BYTES_PER_S * terabytes / vendors_terabytes,
        H200_FLOPS_PER_S * teraflops / vendors_teraflops,
    )


def _estimate(properties: Any) -> tuple[float, float]:
    """TB/s and TFLOP/s, as the vendor would state them."""
    sms = properties.multi_processor_count
    capability = (properties.major, properties.minor)
    per_sm = _PER_SM.get(capability, _PER_SM[8, 0])
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    if kilohertz and bits:
        terabytes = 2 * kilohertz * 1e3 * bits / 8 / 1e12  # two transfers a clock
    else:
        terabytes = KNOWN["H200"][0] * sms / H200_SMS
    return terabytes, per_sm * sms
