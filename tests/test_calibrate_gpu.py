# SPDX-License-Identifier: Apache-2.0
"""What of calibration's CUDA machine needs no GPU: its properties and the tensors of a batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pat import gpus
from sglang_pat.calibrate import batches, gpu
from sglang_pat.target import Target


def test_a_device_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"name": "NVIDIA L4", "multi_processor_count": 58, "major": 8, "minor": 9}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for clocks, expected in (
        ({}, {}),
        ({"clock_rate": 2_040_000, "memory_clock_rate": 6_251_000}, {"sm": 2040, "memory": 6251}),
    ):
        properties = SimpleNamespace(**found, **clocks)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _i, p=properties: p)
        device = gpu._device()
        assert (device.name, device.multi_processor_count) == ("NVIDIA L4", 58)
        assert device.clocks_mhz == expected
        assert set(device.versions) == {"sglang-pat", "torch", "cuda", "driver"}
        assert gpus.vendor_profile(device).sources["bytes_per_s"] == "vendor"


def test_the_tensors_of_a_batch_share_the_slots_of_a_node() -> None:
    """Made on the CPU here: every node's slots once, and no slot twice."""
    batch = batches.forest(3)
    target = Target.h200(num_q_heads=2, num_kv_heads=1, head_dim=64, max_queries=512)
    q, k_cache, v_cache, table, rows, seq_lens = gpu._tensors(batch, target, "cpu")
    assert k_cache.shape == v_cache.shape == (batch.unique_tokens + 1, 1, 64)
    assert q.shape == (batch.num_queries, 2, 64) and seq_lens.tolist() == list(batch.seq_lens)
    owners: dict[int, tuple[int, int]] = {}
    for query, (path, length) in enumerate(zip(batch.paths, batch.seq_lens, strict=True)):
        slots = table[rows[query], :length].tolist()
        ends = [(node, start, end) for node, start, end in path]
        ends.append((-1 - query, path[-1][2] if path else 0, length))
        for node, start, end in ends:
            for position in range(start, end):
                assert owners.setdefault(slots[position], (node, position)) == (node, position)
    assert set(owners) == set(range(1, batch.unique_tokens + 1))
