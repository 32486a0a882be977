# SPDX-License-Identifier: Apache-2.0
"""Options: the ``SGLANG_PAT_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch

from sglang_pat import _C
from sglang_pat.target import BRANCHINGS, POLICIES, SPLITS

PREFIX = "SGLANG_PAT_"
# What `make test-versions` runs on; the last is the one to install.
TESTED_SGLANG = ("0.5.22", "0.5.23")
SUPPORTED_SGLANG = TESTED_SGLANG[-1]
# Not taken from sglang_pat.srt.platform: only SGLang may import that, while it picks its platform.
CPU_PLATFORM = "pat_cpu"

# First value = default.
_ALLOWED = {
    "check": ("0", "1"),
    "policy": POLICIES,
    "split": SPLITS,
    "branching": BRANCHINGS,
    "partial": ("fp32", "bf16"),
    "launch": tuple(_C.LAUNCHES),
}
DEFAULT_MB = 256  # below the 384 MB that FlashInfer takes in the same place
# One request has nobody to share with, so SGLang's attention serves it at its own speed.
DEFAULT_MIN_BATCH = 2
# Options that are whole numbers from 1: the default and what they count.
_NUMBERS = {"workspace_mb": (DEFAULT_MB, "MB"), "min_batch": (DEFAULT_MIN_BATCH, "requests")}


@dataclass(frozen=True)
class PatConfig:
    """Options of one server.

    ``check`` (``SGLANG_PAT_CHECK``): every step, compare the slots of a pack's members.
    ``policy`` (``SGLANG_PAT_POLICY``), ``split`` (``SGLANG_PAT_SPLIT``) and ``branching``
    (``SGLANG_PAT_BRANCHING``): see ``Target``; ``cost`` is ``never`` where branches do not pay or
    were not measured: on the CPU, on GPUs other than Hopper, beyond head dim 128.
    ``partial`` (``SGLANG_PAT_PARTIAL``): dtype of the partial outputs that the merge reads.
    ``launch`` (``SGLANG_PAT_LAUNCH``): how a GPU's forward is launched, see ``Workspace``.
    ``workspace_mb`` (``SGLANG_PAT_WORKSPACE_MB``): MB (2**20 bytes) of GPU memory for the
    workspace; how many requests of a batch fit depends on it, see ``sglang_pat.capacity``.
    ``min_batch`` (``SGLANG_PAT_MIN_BATCH``): requests of the smallest decode batch that pat serves,
    rows of padding included; smaller ones are the base's, in graphs and without.
    """

    check: bool = False
    policy: str = "bytes"
    split: str = "cost"
    branching: str = "cost"
    partial: str = "fp32"
    launch: str = "queue"
    workspace_mb: int = DEFAULT_MB
    min_batch: int = DEFAULT_MIN_BATCH

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> PatConfig:
        """Read the options.

        Raises ValueError that names the variable, its value and what is allowed, for a name or a
        value that is not known: a misspelt option must not be served as the default.
        """
        known = {PREFIX + name.upper(): name for name in (*_ALLOWED, *_NUMBERS)}
        chosen = {name: allowed[0] for name, allowed in _ALLOWED.items()}
        numbers = {name: default for name, (default, _) in _NUMBERS.items()}
        for variable, value in environ.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                raise ValueError(
                    f"{variable}={value} is not an option of sglang_pat; "
                    f"the options are {', '.join(known)}: correct or unset it"
                )
            name = known[variable]
            if name in _NUMBERS:
                numbers[name] = _whole_number(variable, value, *_NUMBERS[name])
                continue
            if value not in _ALLOWED[name]:
                raise ValueError(
                    f"{variable}={value} is not a known value; "
                    f"use one of {', '.join(_ALLOWED[name])} or unset it"
                )
            chosen[name] = value
        return cls(
            check=chosen["check"] == "1",
            policy=chosen["policy"],
            split=chosen["split"],
            branching=chosen["branching"],
            partial=chosen["partial"],
            launch=chosen["launch"],
            **numbers,
        )

    @property
    def partial_dtype(self) -> torch.dtype:
        return torch.float32 if self.partial == "fp32" else torch.bfloat16

    def __str__(self) -> str:
        return " ".join(f"{field.name}={asdict(self)[field.name]}" for field in fields(self))


def _whole_number(variable: str, value: str, default: int, unit: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise ValueError(
            f"{variable}={value} is not a whole number of {unit}, 1 or more: "
            f"give one, such as {default}, or unset it"
        )
    return int(value)
