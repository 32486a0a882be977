# SPDX-License-Identifier: Apache-2.0
"""Bytes that ncu counts, beside those of the plan; no GPU needed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import traffic
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import PatOptions

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def ncu_line(*cells: object) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def test_ncu_counts_are_added_up_by_range() -> None:
    def kernel_line(name: str, *counts: object) -> str:
        return ncu_line(0, "forward", f'1 ""<default domain>:{name}:none:none""', *counts)

    lines = [
        "==PROF== Connected to process 7",
        ncu_line("ID", "Kernel Name", RANGE, *traffic.METRICS),
        ncu_line("", "", "", "byte", "byte", "sector"),
        kernel_line(traffic.tag(0, "pat"), "1,000", "24", 5),
        kernel_line(traffic.tag(0, "pat"), 500, 0, "1,000"),
        kernel_line(traffic.tag(0, "fa3"), 9000, 1, 0),
        kernel_line("someone else", 7, 7, 7),
        kernel_line(traffic.tag(12, "pat"), 3, 0, 0),
    ]
    found = traffic.parse(lines)
    assert found.keys() == {(0, "pat"), (0, "fa3"), (12, "pat")}
    assert traffic.bytes_of(found[0, "pat"], traffic.DRAM_METRICS) == 1524
    assert traffic.bytes_of(found[0, "pat"], traffic.L2_METRICS) == 1005 * 32
    assert traffic.bytes_of(found[0, "fa3"], traffic.DRAM_METRICS) == 9001
    assert traffic.bytes_of(None, traffic.DRAM_METRICS) is None
    with pytest.raises(ValueError, match="none in a range of ours"):
        traffic.parse([*lines[:3], lines[6]])
    with pytest.raises(ValueError, match="ncu gave no table"):
        traffic.parse(lines[:1])


def test_traffic_is_printed_in_megabytes() -> None:
    row = traffic.Traffic(
        "32/8", "1,4_64,16", False, 10**6, 2 * 10**6, 3e6, 4e6, 5 * 10**6, 6e6, None
    )
    assert traffic.table([row])[1].split()[2:] == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "-"]


def test_traffic_of_a_file_is_printed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    counts = (10**6, 2 * 10**6, 3e6, 4e6, 5 * 10**6, 6e6, None)
    rows = [
        asdict(traffic.Traffic("32/8", spec, permuted, *counts))
        for permuted in (False, True)
        for spec in ("1,4_64,16", "1,8_64,16")
    ]
    document = {"kind": "traffic", "date": "today", "device": "one", "versions": {}, "settings": {}}
    source, picture = tmp_path / "found.json", tmp_path / "found.png"
    source.write_text(json.dumps(document | {"rows": rows}))
    assert kernel.main(["--from", str(source), "--plot", str(picture)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-4:]] == [
        row["spec"] for row in rows
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_bytes() -> None:
    heads = Heads(32, 8)
    tree = Tree((1, 64), (2048, 128))
    packed, unpacked = traffic.plan_bytes(tree, heads, PatOptions())
    q_and_out = 2 * 64 * 32 * 128 * 2
    assert unpacked == 64 * 2176 * 2 * 8 * 128 * 2 + q_and_out
    unique = (2048 + 64 * 128) * 2 * 8 * 128 * 2 + q_and_out
    # Two partial states a query, fp32 with their LSE, at least; the shared node in few row tiles.
    assert unique + 2 * 2 * 64 * 32 * 4 * 129 <= packed < unpacked / 2
    assert traffic.plan_bytes(tree, heads, PatOptions(partial="bfloat16"))[0] < packed
