# SPDX-License-Identifier: Apache-2.0
"""Prefix-aware decode attention for SGLang: pack, forward, merge.

``plan`` turns radix paths into a plan, ``decode`` runs it, ``check_slots`` proves that the paths
are true; a CUDA graph captures it in a ``Workspace``. Importing this package touches neither CUDA
nor SGLang.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_pat.ops import decode
    from sglang_pat.planner import Node, Plan, plan
    from sglang_pat.slots import SlotMismatch, check_slots
    from sglang_pat.target import Target
    from sglang_pat.workspace import Workspace

__all__ = [
    "Node",
    "Plan",
    "SlotMismatch",
    "Target",
    "Workspace",
    "__version__",
    "check_slots",
    "decode",
    "plan",
]

_HOMES = {
    "Node": "sglang_pat.planner",
    "Plan": "sglang_pat.planner",
    "SlotMismatch": "sglang_pat.slots",
    "Target": "sglang_pat.target",
    "check_slots": "sglang_pat.slots",
    "decode": "sglang_pat.ops",
    "plan": "sglang_pat.planner",
    "Workspace": "sglang_pat.workspace",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("sglang-pat")
    from importlib import import_module

    if name == "_C":  # asked for once, where it is not loaded yet
        try:
            return import_module("sglang_pat._C")
        except ModuleNotFoundError:
            raise ImportError(
                f"sglang_pat has no native module in {__path__[0]}: pip install the checkout or "
                "its wheel, and run Python outside of the checkout's folder"
            ) from None
    if name not in _HOMES:
        raise AttributeError(f"module 'sglang_pat' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
