# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark on a GPU: every variant and family gives right outputs and a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.common.forests import Forest, forest
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import Layer, PatOptions, device_batch, error_of
from benchmarks.kernel.peers import NO_KERNEL
from benchmarks.kernel.report import TreeRow
from sglang_pat.target import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", ["32/8", "8/1", "5/1", "24/8"])
def test_policies_give_right_outputs(policy: str, heads: str) -> None:
    """The split of the paper makes pieces of any length from any token on."""
    shape = Heads.parse(heads)
    batches: list[Forest] = [forest(kind, 1) for kind in ("uniform", "bimodal", "zipf")]
    for batch in batches:
        inputs = device_batch(batch, shape, permuted=True)
        layer = Layer(inputs, batch, shape, PatOptions(policy), shape.dim**-0.5)
        assert error_of(layer.attend(), inputs, shape.dim**-0.5) < 0.01, (batch, layer.plan)
        torch.cuda.synchronize()


def test_ragged_rows(tmp_path: Path) -> None:
    file = tmp_path / "ragged.json"
    chosen = ["--only", "turns-2", "skew-1", "fork-4k", "--heads", "32/8", "8/1"]
    assert kernel.main(["--ragged", *chosen, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = [TreeRow(**row) for row in document["rows"]]
    assert len(rows) == 6 and document["left_out"] == []
    assert all(row.pat > 0 and not row.wrong for row in rows)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_verify_steps(kv_dtype: str, tmp_path: Path) -> None:
    """All peers give pat's outputs, the causal mask of the draft tokens included; then skips if FA3
    has no kernels for some of the rows, which are left out."""
    file = tmp_path / "drafts.json"
    chosen = ["--draft-tokens", "1,2,4,8", "--heads", "32/8", "8/1", "--kv-dtype", kv_dtype]
    trees = ["--trees", "1,16_4096,300", "1,4,16_300,60,8", "16_500"]
    assert kernel.main([*chosen, *trees, "--permuted", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    absent = document["absent"]
    assert document["left_out"] == [] and set(absent.values()) <= {NO_KERNEL}
    rows = [TreeRow(**row) for row in document["rows"]]
    assert len(rows) == 4 * 2 * 3
    for row in rows:
        wanted = {"fa3", "flashinfer", "levels"} - absent.keys()
        assert not row.wrong and row.differences.keys() == wanted, row
    if absent:
        pytest.skip(f"no {', '.join(absent)} to compare with: {NO_KERNEL}")
