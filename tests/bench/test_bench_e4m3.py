# SPDX-License-Identifier: Apache-2.0
"""The benchmarks with K/V in fp8_e4m3: what the peers are given, which errors and times a row has,
what is said of them, and what servers get. No GPU; peers and device are replaced."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.bench import RATES, fake_sgl_kernel, replace_device, row

from benchmarks.common import reference
from benchmarks.common.trees import PAPER_TREES
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import peers, rows
from benchmarks.kernel.floor import Heads, floor_us, kv_bytes, least_bytes
from benchmarks.kernel.kv import TreeBatch, make_batch, quantised, relative
from benchmarks.kernel.layer import PatOptions, error_of
from benchmarks.kernel.report import TreeRow, complaints, summary
from sglang_pat.explain.tree import Tree

TREE = Tree((1, 6), (40, 9))


def stored(dtype: torch.dtype = torch.bfloat16) -> tuple[TreeBatch, torch.Tensor]:
    """A batch with K/V in fp8 and what fp32 attention of the dequantised K/V gives."""
    made = make_batch(TREE, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype)
    batch = quantised(replace(made, v_cache=3 * made.v_cache))
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    return batch, reference.attention(*batch.inputs, scale=0.125, **scales)[0]


def test_scales_make_the_largest_value_the_dtypes_largest() -> None:
    batch, _ = stored()
    for cache in (batch.k_cache, batch.v_cache):
        assert cache.dtype == torch.float8_e4m3fn
        assert cache.float().abs().max() == torch.finfo(torch.float8_e4m3fn).max
    assert batch.v_scale > 2 * batch.k_scale


@pytest.mark.parametrize("peer", ["fa3", "levels"])
def test_fa3_gets_queries_of_8_bits_and_both_scales(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in refuses q of another dtype than K's, as FA3 does."""
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    batch, expected = stored()
    out = peers.PEERS[peer](batch, TREE, 0.125)()
    error = relative(out, expected)
    assert 0.005 < error < 0.1, "that of the queries, which were cast"


def test_flashinfer_gets_the_dtypes_and_both_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, *_: Any, **options: Any) -> None:
            given.update(options)

        def plan(self, *_: Any, **options: Any) -> None:
            given.update(options)

        def run(self, q: torch.Tensor, pages: Any, **options: Any) -> None:
            given.update(options, q=q, pages=pages)

    module = ModuleType("flashinfer.decode")
    vars(module)["BatchDecodeWithPagedKVCacheWrapper"] = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 16)
    batch, _ = stored()
    peers.flashinfer(batch, TREE, 0.125)()
    assert (given["q_data_type"], given["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)
    assert given["q"] is batch.q and given["pages"][0].dtype == torch.float8_e4m3fn
    assert (given["k_scale"], given["v_scale"]) == (batch.k_scale, batch.v_scale)
    assert given["use_tensor_cores"] is True


def test_the_floor_and_the_plans_count_one_byte() -> None:
    heads = Heads(32, 8)
    for tree in PAPER_TREES:
        saved = least_bytes(tree, heads) - least_bytes(tree, heads, 1)
        assert saved == kv_bytes(tree.unique_tokens, heads, 1)
    assert floor_us(PAPER_TREES[-1], heads, RATES, 1) < 0.51 * floor_us(
        PAPER_TREES[-1], heads, RATES
    )
    options = PatOptions(kv_dtype="fp8_e4m3")
    assert options.target(TREE, heads).kv_bytes == 1
    assert PatOptions().target(TREE, heads).kv_bytes == 2


def test_errors_are_against_the_stored_values() -> None:
    batch, expected = stored()
    assert error_of(expected, batch, 0.125) < 1e-6
    assert error_of(expected, replace(batch, v_scale=2 * batch.v_scale), 0.125) > 0.4


@pytest.mark.parametrize("heads", ["4/2/64", "8/1/64"])
def test_a_run_compares_with_fa3_and_with_bf16(
    heads: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_device(monkeypatch)
    monkeypatch.setattr(rows, "PEERS", {"fa3": peers.fa3})
    monkeypatch.setattr(kernel, "usable", lambda *_, e4m3, **more: {"fa3": ""} if e4m3 else {})
    file = tmp_path / "run.json"
    arguments = ["--heads", heads, "--trees", "1,6_40,9", "5_20", "--kv-dtype", "fp8_e4m3"]
    assert kernel.main([*arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for each in (TreeRow(**found) for found in json.loads(file.read_text())["rows"]):
        assert each.kv_dtype == "fp8_e4m3" and each.is_sound
        assert each.error < 0.01 < each.errors["fa3"] and set(each.errors) == {"fa3"}
        assert each.of_fa3 == each.error / each.errors["fa3"]
        # In the order of their capture.
        assert (each.bf16, each.pat, each.fa3) == (10.0, 11.0, 12.0)
    assert "over pat's time in bf16: 1.100" in printed
    assert kernel.main(["--from", str(file)]) == 0
    assert "pat's error over fa3's: at most 0." in capsys.readouterr().out


def e4m3_row(spec: str = "1,4_64,16", **values: Any) -> TreeRow:
    errors = {"fa3": 0.03, "flashinfer": 0.003, "levels": 0.03}
    return row(spec, kv_dtype="fp8_e4m3", **({"errors": errors, "bf16": 20.0} | values))


def test_the_summary_names_errors_and_times_beside_bf16() -> None:
    rows = [e4m3_row(pat=16.0), e4m3_row("1,8_64,16", pat=9.0), e4m3_row("4_64", pat=22.0)]
    *_, over, error = summary(rows)
    assert over.startswith("over pat's time in bf16: 0.734 (shared 0.600, nothing shared 1.100)")
    assert error == "pat's error over fa3's: at most 0.067"
    assert not any("bf16" in text for text in summary([row()]))


def test_a_row_that_is_less_exact_than_it_may_be_is_named() -> None:
    """FA3 may be further off, pat only by twice as much."""
    assert complaints([e4m3_row()]) == [] and e4m3_row().is_sound
    worse = e4m3_row(error=0.008, errors={"fa3": 0.003})
    assert not worse.is_sound and not worse.wrong
    assert "pat's error is 2.67 times fa3's (at most 2)" in complaints([worse])[0]
    wrong = e4m3_row(errors={"fa3": 0.2, "flashinfer": 0.02})
    assert set(wrong.wrong) == {"fa3", "flashinfer"} and not wrong.is_sound
    assert "output of fa3 is off by 0.2 (at most 0.15" in complaints([wrong])[0]
    assert set(e4m3_row(error=0.06).wrong) == {"pat"}
