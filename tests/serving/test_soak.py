# SPDX-License-Identifier: Apache-2.0
"""The soak, small, on the CPU; on a GPU it is a program (tests/gpu_serving/soak.py)."""

from __future__ import annotations

from pathlib import Path

from gpu_serving.soak import SCALES, soak


def test_mixed_traffic_loses_nothing(tmp_path: Path) -> None:
    summary = soak("cpu", SCALES["cpu"], tmp_path)
    assert summary["failures"] == [], summary
