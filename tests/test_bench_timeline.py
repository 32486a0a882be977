# SPDX-License-Identifier: Apache-2.0
"""Traces of the forward: decoded, summed up, stored and drawn; no GPU needed."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kit.plans import ITEM

from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import timeline
from sglang_pat.bench.kernel.cases import QUICK_TREES
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import PatOptions
from sglang_pat.bench.kernel.timeline import Bar, Kind, Timeline
from sglang_pat.planner import plan

ZERO = 1_763_739_000_123_456_789  # nanoseconds; no float64
Words = npt.NDArray[np.int64]


def items(*given: tuple[int, int]) -> npt.NDArray[Any]:
    """Items of a plan from (queries, row tile)."""
    found = np.zeros(len(given), ITEM)
    found["num_queries"], found["row_tile"] = zip(*given, strict=True)
    return found


def entry(unit: tuple[int, int], place: tuple[int, int, int, int], *times: int) -> list[int]:
    (item, head), (sm, half, warp, rows) = unit, place
    words = [item << 32 | head, sm << 32 | half << 24 | warp << 16 | rows]
    return words + [ZERO + time for time in times]


def words_of(*entries: list[int], spare: int = 2) -> Words:
    return np.array([[len(entries), 0, 0, 0], *entries, *[[0] * 4] * spare], np.int64)


# Of 4 packed rows a query: a wide item of 100 rows, one of 128 on one half, 12 rows, and 4.
ITEMS = items((25, 128), (32, 64), (3, 16), (1, 16))
WIDE = [
    entry((0, 1), (131, half, warp, rows), 100 + warp, 5000 + 10 * half + warp)
    for half, rows in ((0, 64), (1, 36))
    for warp in range(4)
]
# Warp 0 has ended its second part before warp 3 begins its first.
PARTS = [
    entry((1, 0), (7, 0, warp, 64), begin + 900 * warp, begin + 900 * warp + 400)
    for warp in range(4)
    for begin in (1000, 1400)
]
SMALL = [entry((2, 0), (7, 1, warp, 12), 0, 600) for warp in range(4)]
NARROW = [entry((3, head), (7, 1, 2 + head, 4), 700 + head, 900) for head in range(2)]
BARS = [
    Bar(2, 0, 7, 1, None, 12, 16, 0, 600),
    Bar(0, 1, 131, 0, None, 64, 128, 100, 5003),
    Bar(0, 1, 131, 1, None, 36, 128, 100, 5013),
    Bar(3, 0, 7, 1, 2, 4, 16, 700, 900),
    Bar(3, 1, 7, 1, 3, 4, 16, 701, 900),
    Bar(1, 0, 7, 0, None, 64, 64, 1000, 4100),
    Bar(1, 0, 7, 0, None, 64, 64, 1400, 4500),
]


def test_the_warps_of_a_half_make_one_bar() -> None:
    assert timeline.bars_of(words_of(*NARROW, *WIDE, *PARTS, *SMALL), ITEMS) == BARS
    # Each warp notes its parts in order; the warps come in any.
    assert timeline.bars_of(words_of(*PARTS[6:], *PARTS[:6]), ITEMS) == [
        Bar(1, 0, 7, 0, None, 64, 64, 0, 3100),
        Bar(1, 0, 7, 0, None, 64, 64, 400, 3500),
    ]


def test_damaged_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="of 3 rows counts 0 entries, must be 1 to 2"):
        timeline.bars_of(words_of(), ITEMS)
    full = words_of(*SMALL, spare=0)
    assert len(timeline.bars_of(full, ITEMS)) == 1
    with pytest.raises(ValueError, match="of 4 rows counts 4 entries, must be 1 to 3"):
        timeline.bars_of(full[:-1], ITEMS)
    with pytest.raises(ValueError, match=r"item 2, KV head 0, SM 7: entries of warps \[0, 1, 3\]"):
        timeline.bars_of(words_of(*SMALL[:2], SMALL[3]), ITEMS)


def test_there_is_room_for_every_entry() -> None:
    # 100, 128, 12 and 4 rows: 2 + 2 + 1 + 1 parts of 64, by up to 8 warps.
    assert timeline.trace_rows(ITEMS, 4, 1) == 1 + 8 * 6
    assert timeline.trace_rows(ITEMS, 4, 8) == 1 + 8 * 6 * 8
    assert timeline.trace_rows(items((65, 128)), 1, 1) == 1 + 8 * 2
    assert timeline.trace_rows(items((64, 64)), 1, 1) == 1 + 8


def line(**values: Any) -> Timeline:
    given = {"heads": "8/2", "spec": "1,4_64,16", "permuted": False, "sms": 3, "halves": 2}
    return Timeline(**{**given, "call_us": 6.5, "bars": BARS, **values})


def test_durations_by_kind() -> None:
    found = timeline.kinds(BARS)
    assert list(found) == ["16 rows, one warp", "16 rows", "64 rows", "128 rows"]
    # 200 and 199 ns; 3100 ns twice; 4903 and 4913 ns.
    for name, expected in (
        ("16 rows, one warp", Kind(2, 0.1995, 0.1995, 0.1999, 0.2, 0.9)),
        ("64 rows", Kind(2, 3.1, 3.1, 3.1, 3.1, 4.5)),
        ("128 rows", Kind(2, 4.908, 4.908, 4.912, 4.913, 5.013)),
    ):
        assert astuple(found[name]) == pytest.approx(astuple(expected))


def test_idle_time() -> None:
    # SM 7: half 0 from 1000 to 4500, of two bars that overlap; half 1 to 600, and two single warps.
    # SM 131: from 100 on. The third has nothing to do.
    span = 5013
    shares = timeline.idle_shares(line())
    busy = [4 * 3500 + 4 * 600 + 200 + 199, 4 * 4903 + 4 * 4913, 0]
    assert shares == pytest.approx([1 - each / (8 * span) for each in busy])
    # In the last 1013 ns: half 0 of SM 7 for 500 ns, the halves of SM 131 for 1003 and 1013.
    busy = [4 * 500, 4 * 1003 + 4 * 1013, 0]
    assert timeline.idle_shares(line(), 4000) == pytest.approx([1 - t / (8 * 1013) for t in busy])
    whole = [Bar(0, 0, 0, 0, None, 64, 64, 0, 1000)]
    assert timeline.idle_shares(line(sms=1, halves=1, bars=whole)) == [0]


def test_summary() -> None:
    lines = "\n".join(timeline.summary(line(permuted=True)))
    assert "1,4_64,16, 8/2 heads, slots permuted: 5.0 us from first" in lines
    assert "6.5 us with launch and merge; 7 bars on 3 SMs" in lines
    (narrow,) = (text.split() for text in lines.splitlines() if "16 rows, one warp  " in text)
    assert narrow[-6:] == ["2", "0.20", "0.20", "0.20", "0.20", "0.9"]
    # 58.1 %, 2.1 % and 100 %.
    assert "53.4% of the time; by SM 2.1% to 100.0%, median 58.1%" in lines
    # From 4512 ns on only the wide item's halves work, of 491 and 501 of 501 ns, of three SMs.
    assert "last 10%, from 4.5 us: 67.0%; bars that end there: 2 of 128 rows\n" in lines + "\n"


def test_timelines_come_back_from_json() -> None:
    found = line().to_json()
    assert found["bars"]["warp"] == [None, None, None, 2, 3, None, None]
    assert Timeline.from_json(json.loads(json.dumps(found))) == line()


def test_a_layer_is_traced_once_and_no_longer() -> None:
    """Everything of ``trace`` but the device: the kernels write to the address they are given."""
    tree, heads = Tree((1, 3), (64, 16)), Heads(4, 2)
    made = plan(tree.paths, tree.seq_lens, PatOptions().target(tree, heads))
    workspace = SimpleNamespace(device="cpu", trace=None)
    traced = []

    def attend() -> None:
        traced.append(workspace.trace)
        if workspace.trace is not None:
            assert not workspace.trace.any()
            workspace.trace[:5] = torch.from_numpy(words_of(*SMALL, spare=0))

    def times_us(run: Any, repeats: int) -> list[float]:
        for _ in range(repeats):
            run()
        return [6.5] * repeats

    layer: Any = SimpleNamespace(workspace=workspace, plan=made, attend=attend)
    timer: Any = SimpleNamespace(times_us=times_us)
    words, call_us = timeline.trace(layer, timer)
    assert call_us == 6.5 and workspace.trace is None
    assert [each is None for each in traced] == [True] * (len(traced) - 1) + [False]
    assert len(words) == timeline.trace_rows(made.items, 2, 2) and words[0, 0] == 4
    assert len(timeline.bars_of(words, ITEMS)) == 1


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """The benchmark with its GPU replaced, and what it recorded."""
    cases = []

    def record(tree: Tree, heads: Heads, permuted: bool, *_: Any) -> Timeline:
        cases.append((str(tree), str(heads), permuted))
        return line(spec=str(tree), heads=str(heads), permuted=permuted)

    monkeypatch.setattr(timeline, "record", record)
    monkeypatch.setattr(kernel, "Clock", lambda budget_ms: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    return cases


def test_from_arguments_to_json_and_back(
    recorded: list[tuple[str, str, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "timelines.json"
    chosen = ["--trees", "1,6_40,9", "5_20", "--heads", "4/2", "--permuted", "--policy", "naive"]
    assert kernel.main(["--timeline", *chosen, "--json", str(file)]) == 0
    assert recorded == [("1,6_40,9", "4/2", True), ("5_20", "4/2", True)]
    printed = capsys.readouterr().out
    assert "a device" in printed and "policy naive" in printed
    assert "5_20, 4/2 heads, slots permuted: 5.0 us from first begin" in printed
    assert kernel.main(["--from", str(file)]) == 0
    assert capsys.readouterr().out == printed and len(recorded) == 2


def test_what_is_recorded_unless_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    found = kernel.cases(kernel.parser().parse_args(["--timeline"]))
    assert [tree for _, _, tree in found] == list(QUICK_TREES)
    assert {(str(heads), permuted) for heads, permuted, _ in found} == {("32/8", False)}
    with pytest.raises(SystemExit):
        kernel.parser().parse_args(["--timeline", "--traffic"])
    assert "--traffic: not allowed with argument --timeline" in capsys.readouterr().err


def test_pictures(recorded: list[tuple[str, str, bool]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "timelines.json", tmp_path / "timelines.png"
    assert kernel.main(["--timeline", "--trees", "5_20", "6_20", "--json", str(file)]) == 0
    assert kernel.main(["--from", str(file), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_where_bars_are_drawn() -> None:
    # A fourth of a half of an SM for each warp.
    corners = timeline._box(BARS[4], 2)
    assert (min(corners), max(corners)) == ((0.701, 7.875), (0.9, 8.0))
    corners = timeline._box(BARS[1], 2)
    assert (min(corners), max(corners)) == ((0.1, 131.0), (5.003, 131.5))
    assert max(timeline._box(BARS[1], 1))[1] == 132
