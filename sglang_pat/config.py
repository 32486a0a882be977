# SPDX-License-Identifier: Apache-2.0
"""Options: the ``SGLANG_PAT_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sglang_pat.target import POLICIES

PREFIX = "SGLANG_PAT_"
# What `make test-versions` runs on; the last is the one to install.
TESTED_SGLANG = ("0.5.22", "0.5.23")
SUPPORTED_SGLANG = TESTED_SGLANG[-1]
# Not taken from sglang_pat.srt.platform: only SGLang may import that, while it picks its platform.
CPU_PLATFORM = "pat_cpu"

# The values of an option, or what an option counts, a whole number from 1.
_ALLOWED: dict[str, dict[str, Any]] = {
    "check": {"0": False, "1": True},
    "policy": {policy: policy for policy in POLICIES},
}
_UNITS = {"workspace_mb": "MB", "min_batch": "requests"}
DEFAULT_MB = 256  # below the 384 MB that FlashInfer takes in the same place
# One request has nobody to share with, so SGLang's attention serves it at its own speed.
DEFAULT_MIN_BATCH = 2


@dataclass(frozen=True)
class PatConfig:
    """Options of one server: ``check`` is ``SGLANG_PAT_CHECK``."""

    check: bool = False  # every step, compare the slots of requests that share an item
    # "pat": the paper to the letter: its packs, its splits (see Target) and its launches, a kernel
    # for each row tile on a stream of its own.
    policy: str = "default"
    # MB of 2**20 bytes of GPU memory; how much a batch can share depends on it (capacity.py).
    workspace_mb: int = DEFAULT_MB
    # Requests of the smallest decode batch that pat serves, rows of padding included.
    min_batch: int = DEFAULT_MIN_BATCH
    dump: str = ""  # absolute path of a new file to write the first batches with a new plan to

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> PatConfig:
        """Read the options. Raises ValueError that names the variable, its value and what is
        allowed: a misspelt option must not be served as the default."""
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        chosen: dict[str, Any] = {}
        for variable, value in environ.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                raise ValueError(
                    f"{variable}={value} is not an option of sglang_pat; "
                    f"the options are {', '.join(known)}: correct or unset it"
                )
            field = known[variable]
            chosen[field.name] = _read(variable, value, field.name, field.default)
        return cls(**chosen)

    @property
    def launch(self) -> str:
        """How a GPU's forward is launched, see ``Workspace``."""
        return "streams" if self.policy == "pat" else "queue"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != "")


def _read(variable: str, value: str, name: str, default: Any) -> Any:
    if name in _ALLOWED:
        if value in _ALLOWED[name]:
            return _ALLOWED[name][value]
        wrong, ways = "a known value", f"use one of {', '.join(_ALLOWED[name])}"
    elif name in _UNITS:
        if value.isascii() and value.isdecimal() and int(value) > 0:
            return int(value)
        wrong, ways = f"a whole number of {_UNITS[name]}, 1 or more", f"give one, such as {default}"
    else:
        if os.path.isabs(value):
            return value
        example = os.path.abspath("batches.jsonl")
        wrong, ways = "an absolute path", f"give one, such as {example}"
    raise ValueError(f"{variable}={value} is not {wrong}; {ways}, or unset it")
