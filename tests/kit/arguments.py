# SPDX-License-Identifier: Apache-2.0
"""Arguments with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Changes = dict[str, tuple[str, Callable[[Any], Any], str]]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    """On the only other device that every machine has."""
    return tensor.to("meta")
