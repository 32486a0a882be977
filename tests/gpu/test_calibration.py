# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat calibrate`` on the GPU at hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from sglang_pat import cli, gpus, profiles
from sglang_pat.target import Target

MOST_SECONDS = 120.0


def test_the_gpu_is_measured_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates beside the vendor's. The fit's error is printed, not judged: the GPU may be shared, and
    without an accurate fit the profile has the H200's factors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    began = time.monotonic()
    assert cli.main(["calibrate", "--json", str(tmp_path / "rows.json")]) == 0
    took = time.monotonic() - began
    with capsys.disabled():
        print(capsys.readouterr().out)
    assert took < MOST_SECONDS
    properties = torch.cuda.get_device_properties()
    found = gpus.profile_of(properties)
    assert found.path is not None and found.path.parent == profiles.user_folder()
    data = json.loads((tmp_path / "rows.json").read_text())
    assert sum(row["kind"] == "held out" for row in data["rows"]) >= 10 and data["launch_s"]
    factor = "fitted" if found.fit else "H200"
    assert found.sources["merge_factor"] == factor and found.sources["bytes_per_s"] == "measured"
    assert {"sm", "memory"} >= set(found.clocks_mhz) and found.versions["driver"] != "CUDA 0.0"
    stated = gpus.vendor_rates(properties.name)
    if stated:
        assert 0.5 < found.costs.bytes_per_s / 1e12 / stated[0] < 1.05
        assert 0.3 < found.costs.flops_per_s / 1e12 / stated[1] < 1.05
    target = Target.gpu(properties, num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=64)
    assert target.bytes_per_s == found.costs.bytes_per_s
