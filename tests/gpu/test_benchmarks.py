# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark on a GPU: every variant and family gives right outputs and a document."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.forests import Forest, forest, samples, skew
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import clock
from benchmarks.kernel.clock import Clock, layer_products
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
    chosen = ["--only", "bucketed-2", "skew-1", "fork-4k", "--heads", "32/8", "8/1"]
    assert kernel.main(["--ragged", *chosen, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = [TreeRow(**row) for row in document["rows"]]
    assert len(rows) == 6 and document["left_out"] == []
    assert all(row.pat > 0 and not row.wrong for row in rows)


def check_peers(document: dict[str, Any], *peers: str) -> None:
    """All of ``peers`` give pat's outputs in all rows; then skips if FA3 has no kernels for some of
    them, which are left out."""
    absent = document["absent"]
    assert document["left_out"] == [] and set(absent.values()) <= {NO_KERNEL}
    for row in (TreeRow(**row) for row in document["rows"]):
        assert not row.wrong and row.differences.keys() == set(peers) - absent.keys(), row
    if absent:
        pytest.skip(f"no {', '.join(absent)} to compare with: {NO_KERNEL}")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_verify_steps(kv_dtype: str, tmp_path: Path) -> None:
    """All peers give pat's outputs, the causal mask of the draft tokens included."""
    file = tmp_path / "drafts.json"
    chosen = ["--draft-tokens", "1,2,4,8", "--heads", "32/8", "8/1", "--kv-dtype", kv_dtype]
    trees = ["--trees", "1,16_4096,300", "1,4,16_300,60,8", "16_500"]
    assert kernel.main([*chosen, *trees, "--permuted", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 4 * 2 * 3
    check_peers(document, "fa3", "flashinfer", "levels")


@pytest.mark.parametrize(("draft_tokens", "kv_dtype"), [(1, "bfloat16"), (4, "float8_e4m3fn")])
def test_batches_of_a_server(draft_tokens: int, kv_dtype: str, tmp_path: Path) -> None:
    header = {
        "sglang_pat_dump": 1,
        "date": "today",
        "device": "none",
        "versions": {},
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "draft_tokens": draft_tokens,
        "kv_dtype": kv_dtype,
    }
    lines: list[dict[str, Any]] = [header]
    for kind in ("bimodal", "skew", "samples"):
        found = {"skew": skew, "samples": samples}.get(kind, partial(forest, kind))(1)
        lens = [length + draft_tokens for length in found.seq_lens]
        lines.append({"paths": found.paths, "seq_lens": lens})
    source, file = tmp_path / "dump.jsonl", tmp_path / "rows.json"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert kernel.main(["--batches", str(source), "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 3
    assert all(row["draft_tokens"] == draft_tokens for row in document["rows"])
    check_peers(document, "fa3", "flashinfer")


def test_cold_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option a layer's products run before each repeat, without it none do. The batch need
    not take longer after them: a launch fetches most of the code, and a write of 256 MB leaves
    lines in the L2 that have to be written back (on an H200 15.0 us, 15.2 after the write).

    It counts replays itself: CUPTI, which a profiler attaches to the process for good, can make
    replays of CUDA graphs end in an illegal memory access (github.com/pytorch/pytorch/issues/75504,
    github.com/pytorch/kineto/issues/1165).
    """
    counts = {"products": 0}

    def counted() -> Callable[[], object]:
        replay = layer_products()
        out = replay.__self__.out  # type: ignore[attr-defined]  # of the captured products
        out.fill_(float("nan"))

        def run() -> None:
            counts["products"] += 1
            replay()
            assert out.isfinite().all()

        return run

    one = torch.zeros(1, device="cuda")
    times = {}
    for options in ([], ["--cold-code"]):
        with monkeypatch.context() as patched:
            patched.setattr(clock, "layer_products", counted)
            Clock(1.0, cold_code=bool(options)).times_us(lambda: one.add_(1), 4)
        assert counts["products"] == 4 * bool(options)
        file = tmp_path / "rows.json"
        arguments = ["--heads", "32/8", "--trees", "2_2000", *options, "--json", str(file)]
        assert kernel.main(arguments) == 0
        document = json.loads(file.read_text())
        assert document["settings"].get("cold_code", False) == bool(options)
        times[bool(options)] = document["rows"][0]["pat"]
    assert 0 < times[True] < times[False] + 20.0
