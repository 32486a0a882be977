# SPDX-License-Identifier: Apache-2.0
"""How fast a GPU moves and computes, as far as a plan has to know: its profile.

``sglang-pat calibrate`` measures one, and some ship (``sglang_pat/profiles``). A GPU without one
has the vendor's rates, times what our kernels reach of the vendor's rates on an H200, and the
factors of the H200. A plan weighs bytes against products and both against the cost of an item, so a
rate that is off by a fifth hardly changes it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

from sglang_pat import _C, profiles
from sglang_pat.profiles import COSTS, Profile

logger = logging.getLogger("sglang_pat")

# The vendor's TB/s and dense bf16 TFLOP/s with fp32 sums, by a word or words of the device's name;
# the first match counts.
KNOWN: dict[str, tuple[float, float]] = {
    "GB300": (8.0, 2500),
    "B300": (8.0, 2250),
    "GB200": (8.0, 2500),
    "B200": (8.0, 2250),
    "GH200 144G": (4.9, 990),
    "GH200": (4.0, 990),
    "H200": (4.8, 989),
    "H20": (4.0, 148),
    "H100 PCIe": (2.0, 756),
    "H100 NVL": (3.9, 835),
    "H100": (3.35, 989),
    "H800 PCIe": (2.0, 756),
    "H800": (3.35, 989),
    "A100-SXM4-80GB": (2.04, 312),
    "A100 80GB": (1.94, 312),
    "A100": (1.56, 312),
    "A800-SXM4-80GB": (2.04, 312),
    "A800 80GB": (1.94, 312),
    "A800": (1.56, 312),
    "A30": (0.933, 165),
    "A40": (0.696, 150),
    "A10G": (0.6, 70),
    "A10": (0.6, 125),
    "L40S": (0.864, 362),
    "L40": (0.864, 181),
    "L20": (0.864, 119.5),
    "L4": (0.3, 121),
    "RTX PRO 6000 Blackwell": (1.79, 500),
    "RTX 6000 Ada": (0.96, 364),
    "RTX A6000": (0.768, 155),
    "RTX A5000": (0.768, 111),
    "RTX 5090": (1.79, 209),
    "RTX 5080": (0.96, 113),
    "RTX 4090": (1.01, 165),
    "RTX 3090 Ti": (1.01, 80),
    "RTX 3090": (0.936, 71),
}
# Dense bf16 TFLOP/s of one SM by compute capability, of GPUs that are not known: of the H200, A100,
# RTX 3090, RTX 4090, B200 and RTX 5090.
_PER_SM = {
    (9, 0): KNOWN["H200"][1] / 132,
    (8, 0): KNOWN["A100"][1] / 108,
    (8, 6): KNOWN["RTX 3090"][1] / 82,
    (8, 9): KNOWN["RTX 4090"][1] / 128,
    (10, 0): KNOWN["B200"][1] / 148,
    (12, 0): KNOWN["RTX 5090"][1] / 170,
}


_KIB = 1024
# Bytes of shared memory that a block can have, by compute capability: the CUDA C++ programming
# guide's technical specifications.
SHARED_PER_BLOCK = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (11, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
    (12, 1): 99 * _KIB,
}


# Of the GPUs on which our kernels ran (docs/support.md).
_RAN_ON = ((9, 0),)


def code_for(capability: tuple[int, int]) -> str:
    """What a GPU of this compute capability runs of the extension: the name of a cubin (``sm_80``),
    else of PTX that the driver compiles for it (``compute_100``), else "", as in a build without
    CUDA.

    A cubin runs on GPUs of its major number whose minor number is not smaller, or on one compute
    capability alone if its name ends with a letter.
    """
    best = ""
    for name in _C.CUDA_CODE:  # in ascending order, PTX last
        kind, version, exact = _named(name)
        if kind == "compute":
            runs = not best and version <= capability
        elif exact:
            runs = version == capability
        else:
            runs = version[0] == capability[0] and version <= capability
        if runs:
            best = name
    return best


def built_for() -> str:
    """The compute capabilities that have code, in words; "" in a build without CUDA."""
    words = []
    for kind, (major, minor), exact in map(_named, _C.CUDA_CODE):
        if kind == "compute":
            words.append(f"{major}.{minor} and later as PTX")
        else:
            words.append(f"{major}.{minor}" if exact or minor else f"{major}.x")
    return ", ".join(words)


def untried(capability: tuple[int, int]) -> str:
    """What to know of a GPU on which our kernels never ran, or ""."""
    name = code_for(capability)
    if capability in _RAN_ON or not name:
        return ""
    found = f"our kernels for compute capability {capability[0]}.{capability[1]}"
    if _named(name)[0] == "compute":
        return f"{found}, which the driver compiles from PTX ({name}), were not run on such a GPU"
    return f"{found} ({name}) are built, but were not run on such a GPU"


def _named(name: str) -> tuple[str, tuple[int, int], bool]:
    """Kind, compute capability and whether it is for that one alone, of "sm_90a" for one."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
    assert found is not None, name
    return found[1], (int(found[2]), int(found[3])), bool(found[4])


def items_per_sm(capability: tuple[int, int], head_dim: int) -> int:
    """Items that an SM runs side by side: two where its shared memory holds the stages of both
    (``footprint`` in csrc/cuda/forward/launch.cuh), else one. A GPU that is not known counts as one
    with much shared memory."""
    little = SHARED_PER_BLOCK.get(capability, SHARED_PER_BLOCK[9, 0]) < SHARED_PER_BLOCK[8, 0]
    return 2 if head_dim <= (64 if little else 128) else 1


def h200() -> Profile:
    """The profile of the H200 that ships, from which other GPUs take what is not known of them."""
    return profiles.shipped("NVIDIA H200", 132)


def profile_of(properties: Any) -> Profile:
    """The profile of a device of ``torch.cuda.get_device_properties``: the user's own, else one
    that ships, else the vendor's rates.

    A GPU of unknown rates is estimated, from its memory's clock and width where torch tells them,
    and from the number and kind of its SMs; that is logged. Raises ``profiles.ProfileError`` for a
    damaged profile.
    """
    found = profiles.find(properties.name, properties.multi_processor_count)
    found = found or vendor_profile(properties)
    logger.info("sglang_pat: plans for %s; %s", found, found.path or "without a profile of its own")
    return found


def vendor_rates(name: str) -> tuple[float, float] | None:
    """TB/s and dense bf16 TFLOP/s as the vendor states them; None for a GPU that is not known."""
    if "Laptop" in name:  # the name of a desktop GPU with other memory and fewer SMs
        return None
    known = (KNOWN[words] for words in KNOWN if re.search(rf"\b{words}\b", name))
    return next(known, None)


def vendor_profile(properties: Any) -> Profile:
    """The vendor's rates or an estimate of them, times what our kernels reach of them on the H200;
    the rest as there."""
    stated, source = vendor_rates(properties.name), "vendor"
    if stated is None:
        stated, source = _estimate(properties), "estimated"
        logger.warning(
            "sglang_pat: plans for %s, which it does not know, with an estimate of %.2f TB/s and "
            "%.0f TFLOP/s in bf16; sglang-pat calibrate measures it",
            properties.name,
            *stated,
        )
    terabytes, teraflops = stated
    sources = dict.fromkeys(COSTS, "H200") | {"bytes_per_s": source, "flops_per_s": source}
    most = _PER_SM[9, 0] * properties.multi_processor_count
    if properties.major in (10, 11) and teraflops > most:
        # The vendor's rate is that of tcgen05, and our kernels use mma.sync there. How fast that is
        # was not measured; an SM is taken to reach what one of the H200 does with wgmma.
        teraflops, sources["flops_per_s"] = most, "estimated"
    vendors_terabytes, vendors_teraflops = KNOWN["H200"]
    base = h200()
    costs = replace(
        base.costs,
        bytes_per_s=base.costs.bytes_per_s * terabytes / vendors_terabytes,
        flops_per_s=base.costs.flops_per_s * teraflops / vendors_teraflops,
    )
    return Profile(
        gpu=properties.name,
        sms=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
        costs=costs,
        sources=sources,
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
        terabytes = KNOWN["H200"][0] * sms / h200().sms
    return terabytes, per_sm * sms
