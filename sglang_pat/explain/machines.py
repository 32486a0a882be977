# SPDX-License-Identifier: Apache-2.0
"""GPUs that plans are made for by name, without one at hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """What ``torch.cuda.get_device_properties`` would say of a GPU, as far as a plan asks."""

    name: str
    multi_processor_count: int
    major: int
    minor: int


GPUS = {
    "h200": Machine("NVIDIA H200", 132, 9, 0),
    "h100": Machine("NVIDIA H100 80GB HBM3", 132, 9, 0),
    "a100": Machine("NVIDIA A100-SXM4-80GB", 108, 8, 0),
    "a100-40gb": Machine("NVIDIA A100-SXM4-40GB", 108, 8, 0),
    "l40s": Machine("NVIDIA L40S", 142, 8, 9),
    "l4": Machine("NVIDIA L4", 58, 8, 9),
    "rtx4090": Machine("NVIDIA GeForce RTX 4090", 128, 8, 9),
    "rtx3090": Machine("NVIDIA GeForce RTX 3090", 82, 8, 6),
    "b200": Machine("NVIDIA B200", 148, 10, 0),
    "b300": Machine("NVIDIA B300", 148, 10, 3),
    "rtx5090": Machine("NVIDIA GeForce RTX 5090", 170, 12, 0),
    "rtxpro6000": Machine("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 12, 0),
}


def machine_of(name: str) -> Machine:
    """The GPU of that name, whatever its case; "4090" and "rtx 4090" are "rtx4090".

    Raises ValueError, listing the names, for one that is not known.
    """
    wanted = name.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia")
    for known, machine in GPUS.items():
        if wanted.removeprefix("rtx") == known.removeprefix("rtx"):
            return machine
    raise ValueError(f"{name!r} is not known; the GPUs are {', '.join(GPUS)}")
