# SPDX-License-Identifier: Apache-2.0
"""How fast a GPU moves and computes, as far as a plan has to know, and what runs on it.

A plan weighs bytes against products and both against the cost of an item, so a rate that is off by
a fifth hardly changes it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_pat import _C

logger = logging.getLogger("sglang_pat")

# Bytes/s and FLOP/s that plans are made for, by torch's name of the device and its SMs: a slice of
# a GPU is another GPU. The bandwidths were measured; 600 TFLOP/s was chosen early and stays, as
# plans by the measured 416 were no faster (docs/lessons.md).
MEASURED = {
    ("NVIDIA H200", 132): (4.3e12, 600e12),
    ("NVIDIA H100 80GB HBM3", 132): (3.068e12, 600e12),
}
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
    "L40S": (0.864, 362),
    "L40": (0.864, 181),
    "L4": (0.3, 121),
    "RTX PRO 6000 Blackwell": (1.79, 500),
    "RTX 5090": (1.79, 209),
    "RTX 4090": (1.01, 165),
    "RTX 3090 Ti": (1.01, 80),
    "RTX 3090": (0.936, 71),
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


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU that need not be here: what ``torch.cuda.get_device_properties`` would say of it as far
    as a plan asks, and its MiB of memory as nvidia-smi shows them."""

    name: str
    multi_processor_count: int
    major: int
    minor: int
    memory_mib: int


GPUS = {
    "h200": Machine("NVIDIA H200", 132, 9, 0, 143_771),
    "h100": Machine("NVIDIA H100 80GB HBM3", 132, 9, 0, 81_559),
    "a100": Machine("NVIDIA A100-SXM4-80GB", 108, 8, 0, 81_920),
    "a100-40gb": Machine("NVIDIA A100-SXM4-40GB", 108, 8, 0, 40_960),
    "l40s": Machine("NVIDIA L40S", 142, 8, 9, 46_068),
    "l4": Machine("NVIDIA L4", 58, 8, 9, 23_034),
    "rtx4090": Machine("NVIDIA GeForce RTX 4090", 128, 8, 9, 24_564),
    "rtx3090": Machine("NVIDIA GeForce RTX 3090", 82, 8, 6, 24_576),
    "b200": Machine("NVIDIA B200", 148, 10, 0, 183_359),
    "b300": Machine("NVIDIA B300", 148, 10, 3, 275_040),
    "rtx5090": Machine("NVIDIA GeForce RTX 5090", 170, 12, 0, 32_607),
    "rtxpro6000": Machine("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 12, 0, 97_887),
}


def machine_of(name: str) -> Machine:
    """The GPU of that name, whatever its case; "4090" and "rtx 4090" are "rtx4090". Raises
    ValueError, listing the names, for one that is not known."""
    wanted = name.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia")
    for known, machine in GPUS.items():
        if wanted.removeprefix("rtx") == known.removeprefix("rtx"):
            return machine
    raise ValueError(f"{name!r} is not known; the GPUs are {', '.join(GPUS)}")


# Of the GPUs on which our kernels ran (docs/support.md).
_RAN_ON = ((9, 0),)


def code_for(capability: tuple[int, int]) -> str:
    """What a GPU of this compute capability runs of the extension: the name of a cubin (``sm_80``),
    which runs on GPUs of its major number whose minor number is not smaller, or on one capability
    alone if its name ends with a letter; else of PTX that the driver compiles for it
    (``compute_100``); else ""."""
    best = ""
    for name in _C.CUDA_CODE:  # in ascending order, PTX last
        kind, version, exact = _named(name)
        may_run = not best if kind == "compute" else version[0] == capability[0]
        if may_run and (version == capability or (not exact and version < capability)):
            best = name
    return best


def built_for() -> str:
    """The compute capabilities that have code, in words, and how to build for later ones if they
    have none; "" in a build without CUDA."""
    words = []
    for kind, (major, minor), exact in map(_named, _C.CUDA_CODE):
        if kind == "compute":
            words.append(f"{major}.{minor} and later as PTX")
        else:
            words.append(f"{major}.{minor}" if exact or minor else f"{major}.x")
    if not words or _C.CUDA_CODE[-1].startswith("compute"):
        return ", ".join(words)
    return ", ".join(words) + " (with PAT_ARCHS=all for later ones too)"


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
    (csrc/cuda/forward/footprint.cuh), else one. A GPU that is not known counts as one with much
    shared memory."""
    little = SHARED_PER_BLOCK.get(capability, SHARED_PER_BLOCK[9, 0]) < SHARED_PER_BLOCK[8, 0]
    return 2 if head_dim <= (64 if little else 128) else 1


class Rates(NamedTuple):
    """What a GPU moves and computes, all SMs together: bytes/s of memory, bf16 FLOP/s. ``source``:
    "measured", the "vendor"'s figures scaled to our kernels, or "estimated" of them."""

    bytes_per_s: float
    flops_per_s: float
    source: str


def rates_of(properties: Any) -> Rates:
    """Of a device of ``torch.cuda.get_device_properties``: measured, else the vendor's, else
    estimated, these times what our kernels reach of them on an H200; logged."""
    name, sms = properties.name, properties.multi_processor_count
    if measured := MEASURED.get((name, sms)):
        found = Rates(*measured, "measured")
    else:
        # A laptop's GPU has the name of a desktop's with other memory and more SMs.
        words = (w for w in KNOWN if re.search(rf"\b{w}\b", name) and "Laptop" not in name)
        known = next(words, None)
        terabytes, teraflops = _estimate(properties) if known is None else KNOWN[known]
        of_h200, most = MEASURED["NVIDIA H200", 132], KNOWN["H200"][1] / 132 * sms
        if properties.major in (10, 11):
            # The vendor's rate is that of tcgen05, and our kernels use mma.sync there. How fast
            # that is was not measured; an SM is taken to reach what one of the H200 does.
            teraflops = min(teraflops, most)
        found = Rates(
            of_h200[0] * terabytes / KNOWN["H200"][0],
            of_h200[1] * teraflops / KNOWN["H200"][1],
            "estimated" if known is None else "vendor",
        )
    logger.log(
        logging.WARNING if found.source == "estimated" else logging.INFO,
        "sglang_pat: plans for %s, %d SMs: %.2f TB/s, %.0f TFLOP/s (%s)",
        *(name, sms, found.bytes_per_s / 1e12, found.flops_per_s / 1e12, found.source),
    )
    return found


def _estimate(properties: Any) -> tuple[float, float]:
    """TB/s and TFLOP/s as the vendor would state them: from the memory's clock and width where
    torch tells them, else as many as an H200's SMs have; products as of an H200's or an A100's."""
    sms = properties.multi_processor_count
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    terabytes = 2 * kilohertz * 1e3 * bits / 8 / 1e12  # two transfers a clock
    per_sm = KNOWN["H200"][1] / 132 if properties.major == 9 else KNOWN["A100"][1] / 108
    return terabytes or KNOWN["H200"][0] / 132 * sms, per_sm * sms
