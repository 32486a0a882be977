# SPDX-License-Identifier: Apache-2.0
"""GPU tests run where there is a CUDA device and an extension with CUDA kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from sglang_pat import _C

sys.path.insert(0, str(Path(__file__).parents[1]))  # the kits of the other tests

# Workers that each take all cores for their inputs wait for one another: 14 of them on 16 cores
# were 4 times slower than 10.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not hasattr(_C, "decode_cuda"):
        reason = "sglang_pat was built without CUDA kernels (PAT_CUDA=OFF)"
    elif not torch.cuda.is_available():
        reason = "no CUDA device on this machine"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
