# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: its batches, what is run and left out, its arithmetic, runs from arguments
to JSON, how peers are called and times taken, and the fit of the judge's costs. GPU and peers are
replaced, by attention by its definition."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import weakref
from contextlib import nullcontext
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.bench import (
    RATES,
    Calls,
    CpuClock,
    CpuGraph,
    CpuLayer,
    chain_batch,
    fake_peers,
    replace_device,
    row,
)

from benchmarks.common import reference
from benchmarks.common.forests import GENERATOR, PAPER_TREES, Forest, Tree, all_forests, forest
from benchmarks.kernel import __main__ as kernel
from benchmarks.kernel import clock, fit, latents, peers
from benchmarks.kernel.cases import Work, asked
from benchmarks.kernel.floor import Heads, floor_us, flops, least_bytes
from benchmarks.kernel.kv import quantised, relative, slot_table
from benchmarks.kernel.layer import E4M3, PatOptions, error_of
from benchmarks.kernel.report import TreeRow, complaints, summary
from sglang_pat.gpus import GPUS
from sglang_pat.target import CUTS, WITHOUT_BRANCHES

ALL = all_forests()


def test_a_generator_draws_the_same_batches_for_ever() -> None:
    """A change of what is drawn needs another name of the generator, and then a digest here."""
    drawn = json.dumps([(each.name, each.paths, each.seq_lens) for each in ALL])
    digest = hashlib.sha256(drawn.encode()).hexdigest()[:16]
    assert (GENERATOR, digest) == ("ragged-2", "aa7801103824a069")
    assert len({each.name for each in ALL}) == len(ALL) == 7 * 5 + 8 * 3


def test_slots_are_shared_where_nodes_are() -> None:
    """Also where a query shares the first tokens of a node only, as in a server's batches."""
    paths = [[(5, 0, 30), (6, 30, 50)], [(5, 0, 30), (6, 30, 41)], [(5, 0, 12)], []]
    small = Forest("small", paths, [60, 41, 20, 9])
    assert small.unique_tokens == 50 + 10 + 0 + 8 + 9
    for batch in (small, next(each for each in ALL if each.name == "zipf-4")):
        for permuted in (False, True):
            table, seq_lens = slot_table(batch, permuted=permuted)
            held = torch.arange(table.shape[1]) < seq_lens[:, None]
            used = table[1:][held].tolist()
            assert set(used) == set(range(1, batch.unique_tokens + 1)), "slot 0 is nobody's"
            assert not table[0].any() and len(used) == sum(batch.seq_lens)
            for query, path in enumerate(batch.paths, 1):
                first = next(i for i, other in enumerate(batch.paths, 1) if other[:1] == path[:1])
                end = path[0][2] if path else 0
                assert torch.equal(table[query, :end], table[first, :end])
    table, _ = slot_table(small, permuted=False)
    assert torch.equal(table[1, :41], table[2, :41]) and torch.equal(table[1, :12], table[3, :12])
    assert table[1, :50].tolist() == list(range(1, 51))
    assert (slot_table(small, permuted=True)[0][1, :30].diff() != 1).any()


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def work(*arguments: str) -> Work:
    return asked(kernel.make_parser().parse_args(arguments))


REFUSED = {
    "--trees 1,4": "tree '1,4' is not NODES_TOKENS",
    "--trees 4,6_16,16": "tree '4,6_16,16' is not NODES_TOKENS",
    "--heads 7/2": "the KV heads must divide",
    "--heads 32": "heads '32' are not",
    "--only nobody": "no row is asked for; rows are named as 1,10_4096,416-32/32",
    "--batches nowhere": "No such file",
    "--from pyproject.toml": "pyproject.toml is no document",
    "": "no CUDA device",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_run_is_refused(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel.main(given.split()) == 2 and REFUSED[given] in capsys.readouterr().err


def test_the_target_is_that_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server's is: rates of an H200 would be wrong on an H100, branches on an A100."""
    tree, heads = PAPER_TREES[0], Heads(32, 8)
    assert PatOptions().target(tree, heads).cuts == CUTS
    assert PatOptions(kv_dtype="fp8_e4m3").target(tree, heads).kv_bytes == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: GPUS["a100"])
    found = PatOptions().target(tree, heads)
    assert (found.num_sms, found.cuts) == (108, WITHOUT_BRANCHES)


def test_the_floor_is_bytes_or_operations() -> None:
    """As other code gave it for an H200's rates, in microseconds."""
    heads = Heads(32, 8)
    for spec, floor in (("1,10_4096,416", 7.7), ("1,1024_2048,32", 48.3), ("256_1024", 243.6)):
        assert floor_us(Tree.parse(spec), heads, RATES) == pytest.approx(floor, abs=0.06)
    tree = Tree((1, 64), (8192, 128))
    saved = least_bytes(tree, heads) - least_bytes(tree, heads, 1)
    assert saved == 2 * tree.unique_tokens * 8 * 128
    assert least_bytes(tree, heads, 2, 4) == least_bytes(tree, heads) + 3 * 2 * 64 * 32 * 128 * 2
    # The first of two draft tokens does not attend to the second.
    assert flops(tree, heads, 2) == 2 * flops(tree, heads) - 4 * 64 * 32 * 128


def test_errors_are_of_all_draft_tokens_of_the_first_to_the_last_query() -> None:
    batch, expected = chain_batch(Tree((1, 20), (9, 5)), 2, permuted=False)
    assert error_of(expected, batch, 0.25) < 1e-6
    for wrong_row, is_seen in ((0, True), (1, True), (3, False), (38, True), (39, True)):
        wrong = expected.clone()
        wrong[wrong_row] *= 2
        assert (error_of(wrong, batch, 0.25) > 0.01) is is_seen


def test_the_summary_has_means_the_worst_row_and_those_that_lose() -> None:
    found = [row(), row("1,8_64,16", pat=31.0), row("5_64", pat=27.0, levels=20.0, fa3=None)]
    floor, decode, best = summary(found)
    assert "floor: 2.16; worst 3.10 at 1,8_64,16" in floor
    assert "0.775 (shared 0.719, private 0.900)" in decode and "1 of 3: 1,8_64,16 1.033" in decode
    assert "5_64 1.350" in best
    *_, over, error = summary([row(pat=16.0, bf16=20.0, errors={"fa3": 0.03})])
    assert "0.800 (shared 0.800)" in over and error.endswith("0.067")


@pytest.mark.parametrize("bad", [0.02, math.nan, math.inf])
def test_outputs_that_disagree_are_named(bad: float) -> None:
    """With K/V of 8 bits pat may be twice as far off as FA3."""
    assert complaints([row()]) == []
    peer = row(differences={"fa3": 0.003, "levels": bad})
    assert list(peer.wrong) == ["levels"] and "levels" in complaints([peer])[0]
    assert list(row(error=bad).wrong) == ["pat"]
    assert "too small" in complaints([row(degraded="max_items too small")])[0]
    good, wrong, worse = (
        row(kv_dtype="fp8_e4m3", error=error, errors={"fa3": fa3, "flashinfer": flashinfer})
        for error, fa3, flashinfer in ((0.05, 0.14, 0.003), (0.06, 0.2, 0.02), (0.008, 0.003, 0))
    )
    assert not complaints([good]) and set(wrong.wrong) == {"pat", "fa3", "flashinfer"}
    assert not worse.wrong and "2.67" in complaints([worse])[0]


# Batches of a server

HEADER = {"sglang_pat_dump": 1, "date": "2026-11-23T12:00:00+00:00", "device": "NVIDIA H200"}
HEADER |= {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "versions": {"sglang": "0.5.23"}}
PATHS = [[(7, 0, 40), (2**40, 40, 60)], [(7, 0, 40), (2**40, 40, 60)], [(7, 0, 40)], []]


def dump(file: Path, count: int, draft_tokens: int, kv_dtype: str = "bfloat16") -> str:
    lines: list[dict[str, Any]] = [HEADER | {"draft_tokens": draft_tokens, "kv_dtype": kv_dtype}]
    for number in range(1, count + 1):
        lengths = [length + number for length in (70, 64, 45, 9)]
        lines.append({"paths": PATHS, "seq_lens": lengths})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_a_dump_is_run_as_on_its_server_unless_asked(tmp_path: Path) -> None:
    file = dump(tmp_path / "dump", 11, 4, "float8_e4m3fn")
    own = work("--batches", file, "--sample", "3")
    names = ["batch-1-4/2/64 x 4", "batch-6-4/2/64 x 4", "batch-11-4/2/64 x 4"]
    assert [case.name for case in own.cases] == names
    assert own.kv_dtype == "fp8_e4m3" and own.server
    other = work("--batches", file, "--heads", "8/2", "--kv-dtype", "bfloat16")
    assert other.kv_dtype == "bfloat16" and {case.heads for case in other.cases} == {Heads(8, 2)}
    assert other.server == own.server
    drafted = work("--batches", file, "--draft-tokens", "1", "--sample", "1")
    assert [case.name for case in drafted.cases] == ["batch-1-4/2/64"]


# Runs

TREES = ["1,6_40,9", "5_20"]
RUNS: dict[str, tuple[list[int], list[str], int]] = {  # drafts, batches, peers
    "--heads 8/1/64 --trees 1,6_40,9 5_20 --draft-tokens 1,3": ([1, 3], TREES * 2, 3),
    "--heads 4/2/64 --trees 1,6_40,9 5_20 --kv-dtype fp8_e4m3": ([1], TREES, 3),
    "--heads 4/1/64 --ragged --only fork-1k turns-2": ([1], ["turns-2", "fork-1k"], 2),
    "--batches DUMP --sample 2": ([4], ["batch-1", "batch-4"], 2),
}


@pytest.mark.parametrize("arguments", RUNS)
def test_a_run_from_arguments_to_json(
    arguments: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pat's plans run on the CPU's executor, beside the peers by definition, of which a cascade
    runs on trees only; times are made up: 10 us, and one more for each that was captured later."""
    replace_device(monkeypatch)
    drafts, specs, peers = RUNS[arguments]
    file, source = tmp_path / "run.json", dump(tmp_path / "dump", 4, 4)
    given = [*arguments.replace("DUMP", source).split(), "--permuted", "--json", str(file)]
    assert kernel.main(given) == 0
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["left_out"] == [] and document["settings"]["draft_tokens"] == drafts
    assert ("there sglang 0.5.23, kv_dtype bfloat16" in printed) == (source in given)
    found = [TreeRow(**each) for each in document["rows"]]
    assert [each.spec for each in found] == specs
    assert {each.draft_tokens for each in found} == set(drafts)
    e4m3 = "fp8_e4m3" in given
    for each in found:
        assert each.permuted and not complaints([each]) and each.error < 0.01
        assert each.kv_read_over_unique >= 1 and len(each.differences) == peers
        assert (each.pat, each.fa3, each.flashinfer) == (10.0 + e4m3, 11.0 + e4m3, 12.0 + e4m3)
        assert (each.bf16, len(each.errors)) == ((10.0, peers) if e4m3 else (None, 0))
        assert not e4m3 or each.errors["fa3"] > 0.01, "FA3 casts the queries"
    assert kernel.main(["--from", str(file)]) == 0
    assert capsys.readouterr().out.partition("\n\n")[2] in printed


def test_what_fails_is_left_out_and_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: Any, *_: Any) -> Any:
        raise RuntimeError("workspace too small")

    def wrong(batch: Any, *_: Any) -> Any:
        return lambda: torch.ones_like(batch.q)

    def small(tree: Any, *rest: Any) -> Any:
        if tree.num_queries > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
        return make(tree, *rest)

    replace_device(monkeypatch)
    make = kernel.device_batch
    monkeypatch.setattr(kernel, "device_batch", small)
    monkeypatch.setattr(kernel, "PEERS", kernel.PEERS | {"flashinfer": broken, "levels": wrong})
    file = tmp_path / "run.json"
    arguments = ["--heads", "4/2/64", "--trees", "1,6_40,9", "7_20", "--json", str(file)]
    arguments += ["--draft-tokens", "1,10"]
    assert kernel.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "flashinfer did not run: RuntimeError: workspace too small" in printed
    assert "output of levels is off" in printed and "output of fa3" not in printed
    document = json.loads(file.read_text())
    assert [each["flashinfer"] for each in document["rows"]] == [None]
    large, drafted, _ = document["left_out"]
    assert large.startswith("7_20-4/2/64: ") and large.endswith("out of memory")
    assert drafted.startswith("1,6_40,9-4/2/64 x 10: ") and "the 10 draft tokens" in drafted
    assert kernel.main([*arguments, "--budget-s", "0"]) == 0
    assert "left out: 1,6_40,9-4/2/64: the time is up" in capsys.readouterr().out


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_times_go_on_where_a_file_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cut that gives a plan of its own is run, in verify steps and with K/V in 8 bits, too."""
    replace_device(monkeypatch, fit)
    monkeypatch.setattr(fit, "Clock", CpuClock)
    settings = (PatOptions(), PatOptions(kv_dtype=E4M3), PatOptions(draft_tokens=4))
    monkeypatch.setattr(fit, "SETTINGS", [(Heads(4, 2, 64), each) for each in settings])
    monkeypatch.setattr(fit, "batches", lambda: (Tree((1, 4, 12), (300, 70, 9)), Tree((3,), (3,))))
    file = tmp_path / "times"
    assert fit.main(["time", str(file), "--budget-s", "0"]) == 0
    assert "0 of 5 batches are timed" in capsys.readouterr().out
    assert fit.main(["time", str(file)]) == 0
    rows = rows_of(file)
    assert [row["batch"] for row in rows] == ["1,4,12_300,70,9", "3_3"] * 2 + ["1,4,12_300,70,9"]
    assert all(row["us"] for row in rows) and len(rows[0]["us"]) > 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert fit.main(["time", str(file)]) == 0
    assert rows_of(file) == rows
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert fit.main(["costs", str(file)]) == 2
    assert "has times of none, here is another" in capsys.readouterr().err


def test_costs_are_found_from_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up times are those that the judge expects with an item's begin three times as long."""
    trees = [*PAPER_TREES[:6], forest("uniform", 0), forest("zipf", 1)]
    cases = [(Heads(32, 8), PatOptions(), tree) for tree in trees]
    monkeypatch.setattr(fit, "cases", lambda: iter(cases))
    monkeypatch.setattr(fit, "LEAST_STEP", 0.1)
    file = tmp_path / "times"
    with file.open("w") as out:
        for heads, settings, tree in cases:
            us = {}
            for cut, planner in fit.plans(heads, settings, tree).items():
                planner.costs = [cost * (1 + 2 * (i == 0)) for i, cost in enumerate(planner.costs)]
                us[cut] = 1e6 * planner.plan_again(tree.seq_lens).seconds
            row = {"device": fit.device_name(), "batch": str(tree), "heads": str(heads)}
            out.write(json.dumps(row | {"noise": 0.01, "us": us}) + "\n")
    found = fit.Fit(rows_of(file))
    before = fit.Planner(PatOptions().target(trees[0], Heads(32, 8))).costs
    truth = [3 * before[0], *before[1:]]
    assert found.regret(truth) == pytest.approx(1.0)
    assert found.loss(found.improved(list(before))) < found.loss(before)
    with pytest.raises(TypeError, match="FixedSize"):
        fit.Planner(PatOptions().target(trees[0], Heads(32, 8))).costs = [1.0, 2.0]
    assert fit.main(["costs", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(before)
    file.write_text(file.read_text().replace("1,10_4096,416", "2,10_4096,416"))
    assert fit.main(["costs", str(file)]) == 2
    assert "time all anew" in capsys.readouterr().err


TREE = Tree((1, 3), (9, 5))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return fake_peers(monkeypatch)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("spec", ["1,3_9,5", "2,4,12_6,3,5", "5_7", "1,1_4,4"])
@pytest.mark.parametrize("peer", peers.PEERS)
def test_peers_attend_to_the_whole_batch_and_drafts_as_a_chain(
    peer: str, spec: str, drafts: int
) -> None:
    """K and V of 8 bits come with both scales; then FA3 takes queries of 8 bits only."""
    tree = Tree.parse(spec)
    batch, expected = chain_batch(tree, drafts)
    torch.testing.assert_close(peers.PEERS[peer](batch, tree, 0.25)(), expected)
    batch = quantised(chain_batch(tree, drafts, dtype=torch.bfloat16)[0])
    for cache in (batch.k_cache, batch.v_cache):
        assert cache.float().abs().max() == torch.finfo(peers.E4M3).max
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    expected, _ = reference.attention(*batch.inputs, scale=0.25, draft_tokens=drafts, **scales)
    error = relative(peers.PEERS[peer](batch, tree, 0.25)(), expected)
    assert error < 0.005 if peer == "flashinfer" else 0.005 < error < 0.1


def parameters_of(package: str, file: str, *path: str) -> list[str]:
    """Names of the parameters of a function of an installed package, "**" for any others. The
    package is not imported: on a machine without a GPU that may fail."""
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package}")
    tree: Any = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    for name in path:
        found = [each for each in tree.body if getattr(each, "name", "") == name]
        tree = found[-1]  # after overloads
    named = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
    return [*(each.arg for each in named), *["**"] * bool(tree.args.kwarg)]


@pytest.mark.parametrize("drafts", [1, 4])
def test_fa3_is_called_as_sglang_calls_it(drafts: int, calls: Calls) -> None:
    """Its scheduler's metadata are made once for all layers, in decode steps alone; the lengths of
    K are given in verify steps alone."""
    layer = peers.fa3(quantised(chain_batch(TREE, drafts)[0]), TREE, 0.25)
    layer()
    layer()
    first, given = (each for each in calls if each["call"] == "attend")
    assert given["causal"] is True
    known = parameters_of("sgl_kernel", "flash_attn.py", "flash_attn_with_kvcache")
    assert known[:3] == ["q", "k_cache", "v_cache"]
    assert given.keys() - {"call"} <= set(known)
    assert ("scheduler_metadata" in given) is (drafts == 1)
    if drafts > 1:
        assert given["cu_seqlens_k_new"].tolist() == [0, 14, 28, 42]
        return
    assert "cu_seqlens_k_new" not in given
    (asked,) = [each for each in calls if each["call"] == "metadata"]
    assert first["scheduler_metadata"] is given["scheduler_metadata"]
    known = parameters_of("sgl_kernel", "flash_attn.py", "get_scheduler_metadata")
    assert asked.keys() - {"call"} <= set(known)
    shape = {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 14, "num_heads": 4}
    shape |= {"num_heads_k": 2, "headdim": 16, "page_size": 1, "causal": True}
    assert asked.items() >= (shape | {"qkv_dtype": peers.E4M3}).items()


@pytest.mark.parametrize("drafts", [1, 4])
def test_flashinfer_is_called_as_sglang_calls_it(drafts: int, calls: Calls) -> None:
    batch, _ = chain_batch(TREE, drafts)
    peers.flashinfer(quantised(batch), TREE, 0.25)()
    made, plan, run = calls
    assert (made["backend"], plan["shape"]) == ("fa2", (4, 2, 16, 1))
    assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.float32, peers.E4M3)
    kind, file = ("Prefill", "prefill.py") if drafts > 1 else ("Decode", "decode.py")
    where = ("flashinfer", file, f"Batch{kind}WithPagedKVCacheWrapper")
    for found, method in ((made, "__init__"), (plan, "plan"), (run, "run")):
        known = parameters_of(*where, method)
        assert "**" in known or found.keys() - {"call", "shape"} <= set(known)


def test_latents_are_attended_to_as_a_whole_and_copied_into_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLA: pat's output is right, and a page of 64 tokens holds those of each request in order."""
    requests = latents.on_prefixes(2, 3, 70, 9)
    batch = latents.latent_batch(requests, 8, "cpu")
    for name, stand_in in (("Layer", CpuLayer), ("capture", CpuGraph)):
        monkeypatch.setattr(latents, name, stand_in)
    monkeypatch.setattr(latents, "latent_batch", lambda *_: batch)
    timer: Any = CpuClock(1.0)
    row = latents.measure(8, requests, timer, with_peers=False)
    assert row["error_ours"] < 0.01 and (row["heads"], row["us_ours"]) == (8, 10.0)
    expected = batch.k_cache[batch.req_to_token[batch.rows]]
    for page, held in ((1, 1 + 2 * (70 + 3 * 9)), (64, 2 * (1 + 3))):
        pages, table = latents.in_pages(batch, page)
        assert pages.shape == (held, page, 1, 576) and table.dtype == torch.int32
        assert torch.equal(pages[table].flatten(1, 2)[:, :79], expected)


def test_peers_that_cannot_run_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA3 is not even launched where its kernels are missing: that would end the process."""

    def missing(*_: Any) -> peers.Run:
        raise ImportError("No module named 'nothing'")

    monkeypatch.setattr(peers, "device_batch", lambda *_, draft_tokens: None)
    monkeypatch.setattr(peers, "quantised", lambda batch: batch)
    monkeypatch.setattr(peers, "fa3_lacks", lambda dim, e4m3: (dim, e4m3) == (64, True))
    monkeypatch.setattr(peers, "PEERS", {"fa3": missing, "flashinfer": missing})
    assert peers.missing([Heads(32, 8, 64)], True, 1) == {
        "fa3": peers.NO_KERNEL,
        "flashinfer": "ImportError: No module named 'nothing'",
    }


def test_a_graph_keeps_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed inputs are memory that others get, which replays would read."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    table = torch.zeros(3)
    alive = weakref.ref(table)
    captured = clock.capture(partial(torch.add, table, 1))
    del table
    assert alive() is not None and captured.out is not None
    assert captured.out.tolist() == [1, 1, 1]


def test_times_are_medians_and_noise_is_what_the_turns_differ_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = object.__new__(clock.Clock)
    monkeypatch.setattr(timer, "repeats", lambda run: 3, raising=False)
    monkeypatch.setattr(
        timer, "times_us", lambda run, count: [run() for _ in range(count)], raising=False
    )
    steady, drifting = iter([5.0] * 4), iter([10.0, 10.0, 20.0, 20.0])
    runs = {"a": steady.__next__, "b": drifting.__next__}
    assert timer.compare(runs) == ({"a": 5.0, "b": 15.0}, 0.5)
