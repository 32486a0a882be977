# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests differ: what is drawn, what is run, and what is left out."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path

import pytest
from kit.bench import replace_device

from benchmarks.common import forests
from benchmarks.common.budget import Budget
from benchmarks.common.forests import GENERATOR, Forest, all_forests
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel.cases import RAGGED_HEADS, drawn
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import slot_table
from benchmarks.kernel.report import TreeRow
from sglang_pat import Target, plan

ALL = all_forests(None)


def test_a_generator_draws_the_same_batches_for_ever() -> None:
    """A change of what is drawn needs another name of the generator, and then a digest here."""
    drawn = json.dumps([(each.name, each.paths, each.seq_lens) for each in ALL])
    digest = hashlib.sha256(drawn.encode()).hexdigest()[:16]
    assert (GENERATOR, digest) == ("ragged-1", "6a2778d92c19f961")
    assert len({each.name for each in ALL}) == len(ALL) == 6 * 5 + 8 * 3


@pytest.mark.parametrize("batch", ALL, ids=str)
def test_a_batch_is_a_forest_that_can_be_planned(batch: Forest) -> None:
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    made = plan(batch.paths, batch.seq_lens, Target.h200(max_queries=batch.num_queries, **heads))
    assert made.kv_tokens_read(sum(batch.seq_lens)) >= batch.unique_tokens and not made.degraded


def test_what_the_families_are() -> None:
    by_family: dict[str, list[Forest]] = {}
    for each in ALL:
        by_family.setdefault(each.family, []).append(each)
    for kind in ("uniform", "bimodal", "zipf", "bucketed"):
        for each in by_family[kind]:
            assert 24 <= each.num_queries <= 480
            assert each.unique_tokens < sum(each.seq_lens)
        depths = {max(len(path) for path in each.paths) for each in by_family[kind]}
        assert max(depths) <= 6 and len(depths) > 1
    for each in by_family["skew"]:
        longest, second = sorted(each.seq_lens)[:-3:-1]
        assert longest >= 16_384 and second <= 2200
    for each in by_family["samples"]:
        tails = [n - p[-1][2] for n, p in zip(each.seq_lens, each.paths, strict=True)]
        assert len(set(tails)) > each.num_queries / 2
    assert by_family["pair"][0].seq_lens == [1024, 1024]
    assert by_family["single"][-1].seq_lens == [131_072]
    assert by_family["fork"][3].unique_tokens == 3 * 4096


def test_slots_are_shared_where_nodes_are() -> None:
    batch = next(each for each in ALL if each.name == "zipf-4")
    for permuted in (False, True):
        table, seq_lens = slot_table(batch, permuted=permuted)
        used = {
            slot
            for query, length in enumerate(seq_lens.tolist())
            for slot in table[query + 1, :length].tolist()
        }
        assert used == set(range(1, batch.unique_tokens + 1))


def write_trace(file: Path, requests: int) -> Path:
    """Every request has one block that all share, one of four, and one of its own, half full."""
    lines = [
        {"input_length": 1280, "hash_ids": [0, 1 + number % 4, 100 + number]}
        for number in range(requests)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


def test_windows_of_a_trace(tmp_path: Path) -> None:
    found = forests.windows(write_trace(tmp_path / "trace", 200))
    assert [each.name for each in found] == [f"window-{seed}" for seed in range(5)]
    for each in found:
        assert each.num_queries in (32, 64, 128)
        assert all(1281 <= length <= 1580 for length in each.seq_lens)
        blocks = {(node, start) for path in each.paths for node, start, _ in path}
        assert len([start for _, start in blocks if start == 0]) == 1
        assert len([start for _, start in blocks if start == 512]) == 4
        assert len([start for _, start in blocks if start == 1024]) == each.num_queries
    with pytest.raises(ValueError, match=r"has 100 requests of at most 16384 tokens.*longer trace"):
        forests.windows(write_trace(tmp_path / "short", 100))


def test_cases_of_one_pool_are_neighbours() -> None:
    heads = [Heads.parse(spec) for spec in ("32/8", "8/1", "64/8", "5/1")]
    found = drawn(heads, ["single-1k"], None)
    assert [case.name for case in found] == [
        "single-1k-32/8",
        "single-1k-64/8",
        "single-1k-8/1",
        "single-1k-5/1",
    ]
    assert len(drawn(RAGGED_HEADS, [], None)) == 9 * len(ALL)
    assert {case.requests.family for case in drawn(heads, ["*-3-8/1", "skew"], None)} == {
        *("uniform", "bimodal", "zipf", "bucketed", "skew", "samples")
    }
    with pytest.raises(ValueError, match=r"--only nothing matches no row; .* as uniform-0-32/8"):
        drawn(heads, ["nothing"], None)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_device(monkeypatch)


@pytest.mark.usefixtures("no_device")
def test_a_run_from_arguments_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    arguments = ["--ragged", "--heads", "4/2/64", "4/1/64", "--only", "fork-1k", "bucketed-2"]
    assert kernel.main([*arguments, "--permuted", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "family window is left out: it needs a Mooncake trace" in printed
    assert "4/4 fork-1k-4/1/64 10.0 us, 0.909 of the better peer" in printed
    document = json.loads(file.read_text())
    assert (document["kind"], document["generator"]) == ("ragged", GENERATOR)
    assert document["left_out"] == []
    rows = [TreeRow(**each) for each in document["rows"]]
    names = ["bucketed-2", "fork-1k"]
    assert [each.spec for each in rows] == names * 2
    assert [each.heads for each in rows] == ["4/2/64"] * 2 + ["4/1/64"] * 2
    for each in rows:  # against attention by definition, with FA3 as SGLang calls it
        assert not each.wrong and each.differences.keys() == {"fa3"} and each.levels is None
    assert kernel.main(["--from", str(file)]) == 0
    shown = capsys.readouterr().out.partition("\n\n")[2]
    assert "fa3 and flashinfer: 0.909 (bucketed 0.909, fork 0.909)" in shown and shown in printed


@pytest.mark.usefixtures("no_device")
def test_what_does_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    arguments = ["--ragged", "--heads", "4/2/64", "--json", str(file), "--only", "single-?k"]
    # 1,024 tokens of 2 heads, K and V, 64 elements of 2 bytes: 524,288 bytes and a slot.
    assert kernel.main([*arguments, "--pool-gb", "0.00053"]) == 0
    left_out = json.loads(file.read_text())["left_out"]
    assert [text.partition(":")[0] for text in left_out] == [
        f"single-{kilo}k-4/2/64" for kilo in (2, 4, 8)
    ]
    assert "K and V of 0.0 GB, over 0.00053" in left_out[0]
    capsys.readouterr()
    assert kernel.main([*arguments, "--budget-s", "0"]) == 0
    document = json.loads(file.read_text())
    assert document["rows"] == [] and len(document["left_out"]) == 4
    assert "left out: single-1k-4/2/64: the time is up" in capsys.readouterr().out
    assert kernel.main(["--ragged", "--only", "nobody"]) == 2
    assert "--only nobody matches no row" in capsys.readouterr().err


def test_no_row_starts_that_would_not_end() -> None:
    budget = Budget(time.monotonic() + 100.0)
    assert budget.allows("row") and "s left" in str(budget)
    budget.took("row", 101.0)
    assert not budget.allows("row")
    endless = Budget(math.inf)
    endless.took("row", time.monotonic())
    assert endless.allows("row") and str(endless) == ""
