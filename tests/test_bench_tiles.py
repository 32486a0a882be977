# SPDX-License-Identifier: Apache-2.0
"""Bandwidth by row tile: cases, arithmetic, tables and pictures; no GPU needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.bench import RATES, CpuClock, CpuGraph, CpuLayer

from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import tiles
from sglang_pat.bench.kernel.floor import Heads, kv_bytes
from sglang_pat.bench.kernel.kv import TreeBatch, make_batch
from sglang_pat.bench.kernel.layer import PatOptions
from sglang_pat.bench.kernel.tiles import Bandwidth, TileCase, Whole
from sglang_pat.planner import plan

WHOLE = Whole(split="mean")


def row(**values: Any) -> Bandwidth:
    given = {"heads": "32/8", "permuted": False, "row_tile": 64, "rows": 64, "kv_len": 1024}
    given |= {"items": 264, "kv_bytes": 10**9, "pat": 250.0, "noise": 0.01, "gb_per_s": 4000.0}
    given |= {"share": 0.9039, "floor_us": 200.0, "error": 0.002}
    return Bandwidth(**(given | values))


@pytest.mark.parametrize("heads", ["32/8", "64/8", "16/8", "32/32", "28/4", "40/1/64"])
@pytest.mark.parametrize("sms", [108, 132])
def test_batches_fill_the_device_and_the_tile(heads: str, sms: int) -> None:
    each = Heads.parse(heads)
    group = each.q // each.kv
    for _, _, row_tile, tree in tiles.cases([each], tiles.LENGTHS, sms):
        units = tree.nodes[0] * each.kv
        read = kv_bytes(tree.unique_tokens, each)
        assert units % (2 * sms) == 0 and read >= tiles.LEAST_BYTES
        # No more than it takes, and as many queries as fit.
        assert units == 2 * sms or read - read * 2 * sms * each.kv / units < tiles.LEAST_BYTES
        rows = tree.num_queries // tree.nodes[0] * group
        assert rows <= row_tile < rows + group
        assert tree.seq_lens[0] == tree.tokens[0]


def test_all_tiles_that_a_query_fits() -> None:
    def row_tiles(heads: Heads) -> list[int]:
        found = tiles.cases([heads], [8192, 16384], 132)
        assert [case.permuted for case in found] == sorted(case.permuted for case in found)
        return [case.row_tile for case in found if case.permuted and case.tree.tokens[0] == 8192]

    assert row_tiles(Heads(32, 8)) == [16, 64, 128]
    assert row_tiles(Heads(40, 1)) == [64, 128]
    assert row_tiles(Heads(32, 8, 256)) == [16, 64]


@pytest.mark.parametrize("heads", [Heads(32, 8), Heads(28, 4), Heads(16, 1)], ids=str)
@pytest.mark.parametrize("kv_len", [1024, 16384])
def test_the_plan_of_an_h200_has_whole_items_of_the_tile(heads: Heads, kv_len: int) -> None:
    """A plan that splits or packs otherwise would be refused only on the GPU."""
    for _, permuted, row_tile, tree in tiles.cases([heads], [kv_len], 132):
        if permuted:
            continue
        made = plan(tree.paths, tree.seq_lens, WHOLE.target(tree, heads))
        assert made.num_items == tree.nodes[0] and made.num_partials == 0 and not made.degraded
        assert set(made.items["row_tile"].tolist()) == {row_tile}
        assert made.num_wide_items == (made.num_items if row_tile == 128 else 0)


def test_the_usual_room_for_partials_would_take_gigabytes() -> None:
    """Which is why these plans have none, though the usual ones would not be split either."""
    heads = Heads(32, 8)
    tree = tiles.tree_of(heads, 64, 64, 132)
    usual, whole = (options.target(tree, heads) for options in (PatOptions(), tiles.Whole()))
    partial = heads.q * (heads.dim * 4 + 4)
    assert usual.max_partials * partial > 1 << 30 and whole.max_partials * partial < 1 << 20


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmark with its GPU replaced, by one of 66 SMs: 66 items of 2 KV heads are a wave."""

    def batch(tree: Tree, heads: Heads, permuted: bool) -> TreeBatch:
        shape = {"num_q_heads": heads.q, "num_kv_heads": heads.kv, "head_dim": heads.dim}
        return make_batch(tree, **shape, dtype=torch.bfloat16, permuted=permuted)

    for name, fake in (("Layer", CpuLayer), ("capture", CpuGraph), ("device_batch", batch)):
        monkeypatch.setattr(tiles, name, fake)
    monkeypatch.setattr(tiles, "LEAST_BYTES", 1)
    monkeypatch.setattr(tiles, "QUICK_LENGTHS", (16, 40))
    monkeypatch.setattr(kernel, "Clock", CpuClock)
    monkeypatch.setattr(kernel, "device_rates", lambda timer: RATES)
    monkeypatch.setattr(kernel, "empty_us", lambda timer: 1.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    properties = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    yield


@pytest.mark.usefixtures("no_device")
def test_from_arguments_to_json_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiles.json"
    arguments = ["--tiles", "--quick", "--heads", "4/2/64", "--json", str(file)]
    assert kernel.main(arguments) == 0
    assert "a device" in (printed := capsys.readouterr().out) and "split mean" in printed
    document = json.loads(file.read_text())
    rows = [Bandwidth(**each) for each in document["rows"]]
    assert [(r.permuted, r.kv_len, r.row_tile) for r in rows] == [
        (permuted, length, tile)
        for permuted in (False, True)
        for length in (16, 40)
        for tile in (16, 64, 128)
    ]
    for each in rows:
        assert each.rows == each.row_tile and each.items == 66 and each.error < 0.01
        # K and V of 2 heads and 64 bf16 values; the clock says 10 us.
        assert each.kv_bytes == 66 * each.kv_len * 2 * 2 * 64 * 2
        assert each.gb_per_s == pytest.approx(each.kv_bytes / 1e4)
        assert each.share == pytest.approx(each.gb_per_s * 1e9 / RATES.bytes_per_s)
    assert kernel.main(["--from", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        line for line in printed.splitlines() if not line.startswith("4/2/64 ") or "slots" in line
    ]


@pytest.mark.usefixtures("no_device")
def test_a_plan_of_other_items_is_refused() -> None:
    heads, timer = Heads(4, 2, 64), CpuClock(1.0)
    tree = tiles.tree_of(heads, 64, 16, 66)
    with pytest.raises(RuntimeError, match=r"66 items of \[64\] rows and 0 .* must have 66 of 16"):
        tiles.measure(TileCase(heads, False, 16, tree), timer, RATES, WHOLE)  # type: ignore[arg-type]
    tails = Tree(tree.nodes, (512, 16))
    packed = PatOptions(branching="never")
    with pytest.raises(RuntimeError, match=r"and \d{4,} partials"):
        tiles.measure(TileCase(heads, False, 64, tails), timer, RATES, packed)  # type: ignore[arg-type]


def test_table_and_complaints() -> None:
    rows = [row(row_tile=16, kv_len=64, gb_per_s=1999.6, share=0.452), row(), row(permuted=True)]
    lines = tiles.table(rows)
    assert [line.split(";")[0] for line in lines if "heads" in line] == [
        "32/8 heads, slots contiguous",
        "32/8 heads, slots permuted",
    ]
    assert lines[2].split() == ["tokens", "16", "rows", "64", "rows"]
    assert lines[3].split() == ["64", "2000", "45%", "1.25", "-"]
    assert lines[4].split() == ["1024", "-", "4000", "90%", "1.25"]
    assert tiles.complaints(rows) == []
    for bad in (0.02, math.nan):
        (line,) = tiles.complaints([row(error=bad)])
        assert "32/8 64 rows, 1024 tokens: output is off" in line


def test_a_wrong_output_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiles.json"
    document = {"kind": "tiles", "date": "2026-11-21", "device": "a device", "settings": {}}
    document |= {"versions": {}, "bytes_per_s": 4.4e12, "flops_per_s": 7e14, "empty_us": 4.5}
    kernel.write(document | {"rows": [asdict(row(error=0.5))]}, file)
    assert kernel.main(["--from", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "4.40 TB/s read" in printed and "output is off by 0.5" in printed


def test_two_kinds_of_measurement_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernel.parser().parse_args(["--tiles", "--timeline"])
    assert "--timeline: not allowed with argument --tiles" in capsys.readouterr().err


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(permuted=permuted, row_tile=tile, kv_len=length, gb_per_s=4400.0 - 9e4 / length - tile)
        for permuted in (False, True)
        for tile in (16, 128)
        for length in (64, 1024, 16384)
    ]
    tiles.draw(rows, 4.4e12, tmp_path / "tiles.png")
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")
