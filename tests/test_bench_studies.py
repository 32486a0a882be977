# SPDX-License-Identifier: Apache-2.0
"""Studies of other papers' rules: what they run, what they say of it, and what is left out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.bench import RATES, CpuClock, fake_sgl_kernel, replace_device

from sglang_pat.bench.common.forests import GENERATOR
from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import peers, variants
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.kv import make_batch
from sglang_pat.bench.kernel.layer import PatOptions, expected_of
from sglang_pat.bench.kernel.studies import (
    chunk,
    consolidated,
    dense,
    engine,
    neighbours,
    packinfer,
    paged,
    persistent,
    report,
)
from sglang_pat.bench.kernel.studies.catalogue import STUDIES
from sglang_pat.bench.kernel.studies.engine import StudyRow

# Of each study two batches that a CPU computes in a moment, of small heads.
FEW = {
    "neighbours": ["single/single-1k", "pair/pair-1k"],
    "chunk": ["shared/1,32_256,", "shared/32_"],
    "paged": ["batch-1/1_512", "batch-8/8_512"],
    "persistent": ["bucketed-b1-13", "uniform-b2-13"],
    "packinfer": ["alpaca/alpaca-b8", "alpaca even/alpaca-b8"],
    "drift": ["single/single-4k", "pair/pair-4k"],
    "plans": ["single/single-1k", "pair/pair-1k"],
}


def row(spec: str = "1,4_64,16", family: str = "shared", **values: Any) -> StudyRow:
    times = values.get("times", {"default": 10.0, "pat": 20.0})
    given: dict[str, Any] = {
        "heads": "32/8",
        "queries": 4,
        "tokens": 320,
        "unique_tokens": 128,
        "floor_us": 5.0,
        "noise": 0.004,
        "times": times,
        "items": {},
        "partials": {},
        "read": {},
        "utilisation": {},
        "errors": dict.fromkeys(times, 0.002),
        "degraded": {},
        "failed": {},
        "rules": list(times),
    }
    return StudyRow(spec=spec, family=family, **(given | values))


def test_a_summary_names_what_is_faster_than_the_default() -> None:
    quick = {"default": 10.0, "pat": 9.7, "chunk": 9.5, "paged": 12.0}
    near = {"default": 10.0, "pat": 9.9, "chunk": 20.0, "paged": 12.0}
    rows = [row("a", times=quick), row("b", times=near), row("c", "zipf", times=near)]
    last = list(neighbours.summary(rows))[-1]
    assert last == (
        "a preset is more than 2% faster than default, 1 of 3 rows: a chunk 0.950 (noise 0.4%)"
    )
    assert list(neighbours.summary(rows[1:]))[-1].endswith("0 of 2 rows: none")
    assert "paged 1.200" in next(iter(neighbours.summary(rows)))


def test_the_summary_of_regret() -> None:
    times = {"default": 10.0, "queries": 8.0, "fixed-512": 30.0, "fa3": 1.0}
    said = list(
        persistent.summary([row("a", times=times), row("b", times=times | {"queries": 16})])
    )
    assert "default over the best alternative 0.884, at worst 1.250" in said[0]
    assert any("the best, 1: a 1.250 of queries (noise 0.4%)" in line for line in said)
    assert any(line.endswith("rows: queries 2") for line in said)  # fa3 is no alternative
    assert list(persistent.summary([row(times={"default": 1.0})])) == [
        "no row has the default and an alternative"
    ]


def test_the_summary_of_chunks() -> None:
    def swept(shared: int, of_chunk: float) -> StudyRow:
        times = {"default": 5.0, "chunk": of_chunk, "paged": 12.0}
        return row(f"1,32_{shared},128" if shared else "32_128", times=times)

    rows = [swept(1024, 6.0), swept(256, 12.0), swept(0, 14.0), swept(512, 10.0)]
    said = list(chunk.summary(rows))
    assert said[0].startswith("chunk is faster than paged from 512 shared tokens on; ")
    assert said[0].endswith("0 0.857, 256 1.000, 512 1.200, 1024 2.000")
    sizes = [row(family="batch", queries=n, times={"default": t}) for n, t in ((8, 4), (64, 40))]
    assert "default: most queries a microsecond with a batch of 8, 2.000" in list(
        chunk.summary(sizes)
    )


def test_the_summaries_of_slots_and_mixes() -> None:
    times = {"default": 10.0, "default/perm": 11.0, "paged": 5.0, "paged-v1": 20.0}
    said = list(paged.summary([row("4_80", "batch-4", times=times | {"fa3-dense": 20.0})]))
    assert said[0] == "batch-4, paged-v1 over paged by length: 80 4.000"
    assert said[1].endswith("geometric means: default 1.100")
    assert "over fa3-dense" in said[2] and "default 0.500" in said[2] and len(said) == 3
    filled = {"default": 0.5, "paged": 0.25, "no split": 0.125}
    mixed = [
        row("alpaca-b4", "alpaca", times={"default": 12.0}, utilisation=filled),
        row("alpaca-b4-even", "alpaca even", times={"default": 10.0}, utilisation=filled),
    ]
    said = list(packinfer.summary(mixed))
    assert said[0].endswith("utilisation default 0.500, paged 0.250, no split 0.125")
    assert said[-1].startswith("alpaca over") and said[-1].endswith("default 1.200")
    # 0.5 us a step gained, 3 lost in the first.
    moved = {"default": 10.0, "in place": 10.5, "copied": 13.5}
    assert list(packinfer.summary([row("b4", "lmsys", times=moved)]))[-1] == (
        "slots at random places take 1.050 of consecutive ones' time, and a step that copies them "
        "together first 1.350: a copy pays after 7 steps"
    )
    no_gain = [row("b4", "lmsys", times=moved | {"in place": 9.9})]
    assert list(packinfer.summary(no_gain))[-1].endswith("a copy never pays")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_device(monkeypatch)


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("name", STUDIES)
def test_a_run_from_arguments_to_json(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, study = tmp_path / "run.json", STUDIES[name]
    arguments = ["--study", name, "--heads", "4/2/64", "--only", *FEW[name]]
    assert kernel.main([*arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert (document["kind"], document["study"]) == ("study", name)
    assert document["generators"] == [GENERATOR, "studies-1"] and document["left_out"] == []
    rows = [StudyRow(**each) for each in document["rows"]]
    assert len(rows) == 2
    ours = [each.name for each in study.variants(Tree((1,), (1,)))]
    theirs = [each.name for each in study.usable_peers({})]
    for each in rows:
        failed = [found for found in theirs if found.startswith("flashinfer")]
        assert list(each.failed) == failed
        assert list(each.times) == ours + [name for name in theirs if name not in failed]
        assert list(each.items) == ours and each.rules == ours and not each.degraded
        assert each.errors.keys() == each.times.keys() and not each.wrong
    assert kernel.main(["--from", str(file)]) == 0
    shown = capsys.readouterr().out.partition("\n\n")[2]
    assert shown and shown in printed and study.title in printed
    if study.peers:
        assert f"and 1 more rows: {failed[0]} did not run: RuntimeError: workspace" in shown
    rows[0].errors["default"] = float("nan")
    document["rows"][0] |= {"errors": rows[0].errors, "degraded": {"default": "too many items"}}
    file.write_text(json.dumps(document))
    assert kernel.main(["--from", str(file)]) == 1
    complaints = capsys.readouterr().out
    assert "output of default is off by nan" in complaints and "too many items" in complaints


@pytest.mark.usefixtures("no_device")
def test_what_the_time_does_not_allow_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    arguments = ["--study", "paged", "--heads", "4/2/64", "--only", "1_512", "--budget-s", "0"]
    assert kernel.main([*arguments, "--json", str(file)]) == 0
    assert "left out: batch-1/1_512-4/2/64: the time is up" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["rows"] == [] and len(document["left_out"]) == 1
    assert kernel.main(["--from", str(file), "--plot", str(tmp_path / "none.png")]) == 0
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--trees", "1_2"], "--study has batches and layouts of its own: leave --trees out"),
        (["--permuted"], "leave --permuted out"),
        (["--preset", "pat"], "--study compares fixed rules: leave --preset out"),
        (["--kv-dtype", "fp8_e4m3"], "--study measures bfloat16 only"),
        (["--draft-tokens", "4"], "--study measures decode steps only"),
        (["--only", "nothing"], "--only nothing matches no row; rows are FAMILY/BATCH-HEADS"),
        (["--pool-gb", "1"], "--pool-gb goes with --ragged or --batches only"),
        (["--ragged"], "not allowed with argument"),
    ],
)
def test_options_that_a_study_has_no_use_for(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernel.main(["--study", "paged", *given])
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("no_device")
def test_a_rule_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = variants.Layer

    def layer(
        batch: Any, tree: Any, heads: Any, settings: PatOptions, scale: float, age: int
    ) -> Any:
        if settings.policy == "queries" and settings.split == "none":
            raise ValueError("a plan of 9 bytes: the buffer has 8; make it larger")
        return made(batch, tree, heads, settings, scale, age)

    monkeypatch.setattr(variants, "Layer", layer)
    study = STUDIES["neighbours"]
    (case,) = study.cases([Heads(4, 2, 64)], False, ["pair/pair-1k"])
    found = engine.row_of(study, case, {}, CpuClock(1.0), RATES)
    assert found.failed == {
        "paged-v1": "ValueError: a plan of 9 bytes: the buffer has 8; make it larger"
    }
    assert "paged-v1" not in found.times and "paged" in found.times and not found.is_sound
    (line,) = report.complaints([found])
    assert line.startswith("4/2/64 pair-1k: paged-v1 did not run: ValueError: a plan of 9 bytes")


def test_peers_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    shape: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    tree = Tree((3,), (40,))
    batch = make_batch(tree, **shape, dtype=torch.float32, permuted=False)
    expected = peers.fa3(batch, tree, 0.25)()
    for make in dense.PEERS.values():
        torch.testing.assert_close(make(batch, tree, 0.25)(), expected)
    scattered = make_batch(tree, **shape, dtype=torch.float32, permuted=True)
    with pytest.raises(ValueError, match="slots are not consecutive"):
        dense.sdpa(scattered, tree, 0.25)
    shared = Tree((1, 3), (20, 20))
    with pytest.raises(ValueError, match="tokens are shared"):
        dense.fa3(make_batch(shared, **shape, dtype=torch.float32), shared, 0.25)


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("tree", [Tree((3,), (40,)), Tree((1, 2, 4), (90, 20, 30))], ids=str)
def test_consolidated_keys_and_values(tree: Tree) -> None:
    """Every run makes the copy, from wherever the pool has K and V, and its output is right."""
    shape: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    batch = make_batch(tree, **shape, dtype=torch.float32, permuted=True)
    expected = expected_of(batch, 0.125)
    runs = {name: make(batch, tree, 0.125) for name, make in consolidated.PEERS.items()}
    for run in runs.values():
        assert expected.error(run()) < 1e-5
    batch.k_cache.neg_()
    batch.v_cache.mul_(3.0)
    expected = expected_of(batch, 0.125)
    for run in runs.values():
        assert expected.error(run()) < 1e-5


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("a"), row("b", times={"default": 8.0}), row("c", "zipf"), row("d", heads="8/1")]
    report.draw("Title", rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_of_an_axis_have_room() -> None:
    assert report.ticks(0.94, 1.12) == [0.95, 1, 1.05, 1.1]
    wide = report.ticks(0.9, 9.0)
    assert 1 in wide and {2, 3, 4, 6, 8} <= set(wide) and not {0.95, 1.05} & set(wide)
    assert report.ticks(1.2, 1.6) == [1.25, 1.5]  # an axis without 1


def test_families_of_one_batch_share_a_panel() -> None:
    rows = [row("a"), row("b"), row("c", "zipf"), row("d", "skew"), row("e", heads="8/1")]
    assert [(what, len(members)) for what, members in report.panels(rows)] == [
        ("shared, 32/8 heads", 2),
        ("one batch of each kind, 32/8 heads", 2),
        ("shared, 8/1 heads", 1),
    ]


def test_a_table_has_holes_where_nothing_ran() -> None:
    rows = [row("a"), row("b", times={"default": 8.0}), row("c", times={"pat": 8.0})]
    cells = [line.split() for line in report.table("32/8", rows)]
    assert cells[2:5] == [["a", "10.0", "2.000"], ["b", "8.0", "-"], ["c", "-", "-"]]
    assert cells[5] == ["geometric", "mean,", "shared", "2.000"]
    assert asdict(rows[0]) == asdict(StudyRow(**asdict(rows[0])))
