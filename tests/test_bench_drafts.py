# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark on verify steps: what the peers are given, what rows say and what is named.
No GPU; peers and device are replaced."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.bench import RATES, fake_sgl_kernel, replace_device, row

from sglang_pat import reference
from sglang_pat.bench.common.trees import PAPER_TREES, Tree
from sglang_pat.bench.kernel import __main__ as kernel
from sglang_pat.bench.kernel import drafts, peers, rows, traffic
from sglang_pat.bench.kernel.floor import Heads, floor_us, flops, least_bytes
from sglang_pat.bench.kernel.kv import TreeBatch, make_batch, quantised, relative
from sglang_pat.bench.kernel.layer import PatOptions, error_of
from sglang_pat.bench.kernel.options import settings_of
from sglang_pat.bench.kernel.report import TreeRow
from sglang_pat.bench.kernel.show import tree_lines

SPECS = ["1,3_9,5", "2,4,12_6,3,5", "5_7", "1,1_4,4"]


def small_batch(tree: Tree, draft_tokens: int, permuted: bool) -> tuple[TreeBatch, torch.Tensor]:
    """A batch on the CPU and what attention over it gives."""
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    options = {"permuted": permuted, "draft_tokens": draft_tokens}
    batch = make_batch(tree, **shape, dtype=torch.float32, **options)
    return batch, reference.attention(*batch.inputs, scale=0.25, draft_tokens=draft_tokens)[0]


class PagedPrefill:
    """FlashInfer's paged prefill wrapper over attention by definition. ``calls`` has what each was
    made, planned and run with."""

    calls: list[dict[str, Any]]

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        self.given = {"layout": layout, **options}
        self.calls.append(self.given)

    def plan(
        self, rows: Any, begins: Any, slots: Any, last: Any, *shape: int, **options: Any
    ) -> None:
        self.given.update(options, shape=shape)
        assert {each.dtype for each in (rows, begins, slots, last)} == {torch.int32}
        assert last.tolist() == [1] * (len(rows) - 1) and len(slots) == begins[-1]
        self.sequences = list(zip(pairwise(rows.tolist()), pairwise(begins.tolist()), strict=True))
        self.slots = slots

    def run(self, q: torch.Tensor, pages: Any, *, out: torch.Tensor, **scales: float) -> None:
        self.given.update(scales)
        assert self.given["causal"] and q.shape == out.shape == (self.sequences[-1][0][1], 4, 16)
        k, v = (cache.squeeze(1) for cache in pages)
        for (first, end), (begin, stop) in self.sequences:
            out[first:end] = reference.attention(
                q[first:end],
                k,
                v,
                self.slots[None, begin:stop],
                torch.zeros(1, dtype=torch.int64),
                torch.tensor([stop - begin]),
                scale=self.given["sm_scale"],
                k_scale=scales.get("k_scale", 1.0),
                v_scale=scales.get("v_scale", 1.0),
                draft_tokens=end - first,
            )[0]


@pytest.fixture
def paged_prefill(monkeypatch: pytest.MonkeyPatch) -> type[PagedPrefill]:
    module = ModuleType("flashinfer.prefill")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = PagedPrefill
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(PagedPrefill, "calls", [], raising=False)
    return PagedPrefill


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("draft_tokens", [2, 4])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("peer", ["fa3", "levels", "flashinfer"])
def test_peers_attend_as_a_chain_does(
    peer: str,
    spec: str,
    draft_tokens: int,
    permuted: bool,
    paged_prefill: type[PagedPrefill],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree.parse(spec)
    batch, expected = small_batch(tree, draft_tokens, permuted)
    out = peers.PEERS[peer](batch, tree, 0.25)()
    assert out.shape == (tree.num_queries * draft_tokens, 4, 16)
    torch.testing.assert_close(out, expected)


def test_what_fa3_is_given_is_what_sglang_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def attend(q: Any, k: Any, v: Any, **call: Any) -> Any:
        given.update(call, q=q, k=k)
        return q

    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    vars(module)["flash_attn_with_kvcache"] = attend
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    tree = Tree((1, 3), (9, 5))
    batch, _ = small_batch(tree, 4, permuted=True)
    peers.fa3(batch, tree, 0.25)()
    assert given["q"].shape == (12, 4, 16) and given["k"].shape[1] == 1  # pages of one token
    assert given["cu_seqlens_q"].tolist() == [0, 4, 8, 12] and given["max_seqlen_q"] == 4
    assert given["cache_seqlens"].tolist() == [14, 14, 14], "draft tokens included"
    assert given["cu_seqlens_k_new"].tolist() == [0, 14, 28, 42]
    assert given["page_table"].tolist() == batch.req_to_token[1:].tolist()
    assert given["causal"] is True and given["softmax_scale"] == 0.25
    for name in ("cu_seqlens_q", "cu_seqlens_k_new", "cache_seqlens", "page_table"):
        assert given[name].dtype == torch.int32 and given[name].is_contiguous()
    given.clear()
    decode, _ = small_batch(tree, 1, permuted=True)
    peers.fa3(decode, tree, 0.25)()
    assert given["cu_seqlens_q"].tolist() == [0, 1, 2, 3] and "cu_seqlens_k_new" not in given


def test_what_flashinfer_is_given(paged_prefill: type[PagedPrefill]) -> None:
    tree = Tree((1, 3), (9, 5))
    batch, _ = small_batch(tree, 4, permuted=True)
    peers.flashinfer(batch, tree, 0.25)()
    (given,) = paged_prefill.calls
    assert (given["layout"], given["backend"], given["shape"]) == ("NHD", "fa2", (4, 2, 16, 1))
    assert given["causal"] is True and given["sm_scale"] == 0.25 and "k_scale" not in given
    assert (given["q_data_type"], given["kv_data_type"]) == (torch.float32, torch.float32)


@pytest.mark.parametrize("peer", ["fa3", "levels", "flashinfer"])
def test_peers_take_kv_of_8_bits(
    peer: str, paged_prefill: type[PagedPrefill], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in fake_sgl_kernel().items():
        monkeypatch.setitem(sys.modules, name, module)
    tree = Tree((1, 6), (40, 9))
    batch = quantised(small_batch(tree, 4, permuted=True)[0])
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    expected = reference.attention(*batch.inputs, scale=0.25, draft_tokens=4, **scales)[0]
    out = peers.PEERS[peer](batch, tree, 0.25)()
    assert relative(out, expected) < (1e-6 if peer == "flashinfer" else 0.1)


def test_errors_are_of_all_draft_tokens_of_a_query() -> None:
    batch, expected = small_batch(Tree((1, 3), (9, 5)), 4, permuted=True)
    assert error_of(expected, batch, 0.25) < 1e-6
    for draft_token in range(4):
        wrong = expected.clone()
        wrong[draft_token] *= 2
        assert error_of(wrong, batch, 0.25) > 0.1
    # Of a batch with more queries than are looked at, those from the first to the last.
    many, right = small_batch(Tree((1, 20), (9, 5)), 2, permuted=False)
    for query, is_seen in ((0, True), (1, False), (19, True)):
        wrong = right.clone()
        wrong[2 * query + 1] *= 2
        assert (error_of(wrong, many, 0.25) > 0.01) is is_seen


def test_the_floor_counts_draft_tokens() -> None:
    heads, tree = Heads(32, 8), Tree((1, 64), (8192, 128))
    q_and_out = 2 * 64 * 32 * 128 * 2
    assert least_bytes(tree, heads, 2, 4) == least_bytes(tree, heads) + 3 * q_and_out
    # The first of two draft tokens does not attend to the second.
    assert flops(tree, heads, 2) == 2 * flops(tree, heads) - 4 * 64 * 32 * 128
    assert flops(tree, heads, 4) == 4 * flops(tree, heads) - 6 * 4 * 64 * 32 * 128
    # 64 query heads over one prefix of 8192 are bound by arithmetic, with four times the queries.
    assert floor_us(tree, heads, RATES, 2, 4) > 3.9 * flops(tree, heads) / RATES.flops_per_s * 1e6


def test_traffic_counts_partial_results_of_all_draft_tokens() -> None:
    heads, tree = Heads(32, 8), Tree((1, 64), (2048, 128))
    one, four = (PatOptions(branching="never", draft_tokens=count) for count in (1, 4))
    assert traffic.plan_bytes(tree, heads, four)[1] == (
        traffic.plan_bytes(tree, heads, one)[1] + 3 * 2 * 64 * 32 * 128 * 2
    )
    packed = least_bytes(tree, heads, draft_tokens=4) + 2 * 2 * 64 * 4 * 32 * 4 * 129
    assert traffic.plan_bytes(tree, heads, four)[0] >= packed


def cases(*arguments: str) -> list[traffic.Case]:
    return kernel.cases(kernel.parser().parse_args(arguments))


def test_what_is_measured() -> None:
    todo = cases("--draft-tokens", "4,8")
    assert len(todo) == 3 * (4 + len(PAPER_TREES)) == len(set(todo))
    assert {str(heads) for heads, _, _ in todo} == {"32/8", "64/8", "8/1"}
    specs = [str(tree) for _, _, tree in todo[:4]]
    assert specs == ["1,64_8192,128", "64_1024", "1,16_4096,300", "16_2048"]
    quick = cases("--draft-tokens", "4", "--quick")
    assert [(str(heads), str(tree)) for heads, _, tree in quick] == [("32/8", s) for s in specs]
    chosen = cases("--draft-tokens", "2", "--heads", "28/4", "--trees", "5_64", "--permuted")
    assert chosen == [(Heads(28, 4), True, Tree((5,), (64,)))]
    options = kernel.parser().parse_args(["--draft-tokens", "8,4,8"])
    assert options.draft_tokens == (8, 4) and settings_of(options).draft_tokens == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft-tokens", "0"], "'0' are not whole numbers from 1 to 128, as in 4,8"),
        (["--draft-tokens", "4,"], "'4,' are not whole numbers"),
        (["--draft-tokens", "4", "--ragged"], "--ragged measures decode steps only"),
        (["--draft-tokens", "4", "--sweep"], "--sweep measures decode steps only"),
        (["--draft-tokens", "4", "--tiles"], "--tiles measures decode steps only"),
        (["--draft-tokens", "4,8", "--traffic"], "takes one number of --draft-tokens at a time"),
        (
            ["--draft-tokens", "4,40"],
            "--draft-tokens 40: the tails of tree 1,256_256,32 have 32 tokens, which must hold",
        ),
        (["--draft-tokens", "6", "--trees", "5_64", "1,4_64,5"], "tails of tree 1,4_64,5 have 5"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernel.main(arguments)
    assert said in capsys.readouterr().err


def test_what_the_kernels_do_not_take() -> None:
    assert drafts.reason_against(Heads(32, 8), 32) == ""
    assert "draft_tokens is 33" in drafts.reason_against(Heads(32, 8), 33)
    assert drafts.reason_against(Heads(64, 8), 16) == ""
    assert drafts.reason_against(Heads(32, 8, 256), 32)


def verify_row(spec: str, pat: float, draft_tokens: int = 4, heads: str = "32/8") -> TreeRow:
    """Beside peers of which the better takes 100 us."""
    times = {"pat": pat, "fa3": 100.0, "flashinfer": 120.0, "levels": 50.0}
    return row(spec, heads=heads, draft_tokens=draft_tokens, **times)


def test_rows_over_their_limit_are_named() -> None:
    at_limit = [
        verify_row("1,64_8192,128", 55.0),
        verify_row("1,16_4096,300", 102.0),
        verify_row("64_1024", 103.0),
    ]
    (*_, named) = drafts.summary(at_limit)
    assert named == "over the limit, 0 of 3: none"
    over = [
        verify_row("1,64_8192,128", 55.1),
        verify_row("1,16_4096,300", 102.1),
        verify_row("64_1024", 103.1),
    ]
    lines = list(drafts.summary(over))
    assert lines[0] == (
        "over the better of fa3 and flashinfer, 2 trees with sharing: 0.750 in the geometric mean"
    )
    assert lines[1].endswith("64_1024 1.031")
    assert lines[2] == (
        "over the limit, 3 of 3: 1,64_8192,128 0.551 (at most 0.55), 1,16_4096,300 1.021 (at most "
        "1.02), 64_1024 1.031 (at most 1.03)"
    )
    # Other numbers of draft tokens, and decode steps, have the limit of decode steps.
    eight = list(drafts.summary([verify_row("1,64_8192,128", 90.0, 8)]))
    assert eight[-1] == "over the limit, 0 of 1: none"
    (*_, decode) = drafts.summary([verify_row("64_1024", 102.5, 1)])
    assert "1 of 1: 64_1024 1.025 (at most 1.02)" in decode


def test_rows_that_a_server_leaves_to_the_base_have_no_limit() -> None:
    left = verify_row("1,16_4096,300", 130.0, 8, "64/8")
    assert drafts.is_the_bases(left)
    assert not drafts.is_the_bases(verify_row("1,16_4096,300", 130.0, 7, "64/8"))
    lines = list(drafts.summary([left]))
    assert "a server leaves these to SGLang's attention (64 packed rows" in lines[-1]
    assert not any("over the limit" in line for line in lines)
    alone = row("64_1024", draft_tokens=4, fa3=None, flashinfer=None, levels=None)
    assert list(drafts.summary([alone])) == ["no peer ran"]


def test_rows_are_grouped_by_draft_tokens() -> None:
    found = [verify_row("64_1024", 90.0, count) for count in (1, 4, 4, 8)]
    lines = tree_lines({"kind": "drafts", "left_out": ["64/8 x 40: too many"]}, found)
    titles = [line for line in lines if "heads, slots" in line]
    assert [title.split("contiguous")[1].split(" floor")[0].strip() for title in titles] == [
        "",
        ", 4 draft tokens",
        ", 8 draft tokens",
    ]
    assert lines[-1] == "left out: 64/8 x 40: too many"


def test_a_run_from_arguments_to_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pat's plans run on the CPU's executor, beside FA3 by definition."""
    replace_device(monkeypatch)
    monkeypatch.setattr(rows, "PEERS", {name: peers.PEERS[name] for name in ("fa3", "levels")})
    asked: dict[str, Any] = {}

    def usable(heads: Any, **options: Any) -> dict[str, str]:
        asked.update(options)
        return {"fa3": "", "levels": "", "flashinfer": "ImportError: none"}

    monkeypatch.setattr(kernel, "usable", usable)
    file = tmp_path / "run.json"
    arguments = ["--draft-tokens", "1,3,9", "--heads", "4/2/64", "32/2/64"]
    arguments += ["--trees", "1,6_40,9", "5_20", "--permuted", "--json", str(file)]
    assert kernel.main(arguments) == 0
    assert asked["draft_tokens"] == 9
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["kind"] == "drafts" and document["settings"]["draft_tokens"] == [1, 3, 9]
    assert len(document["left_out"]) == 1 and document["left_out"][0].startswith("32/2/64 x 9: ")
    found = [TreeRow(**each) for each in document["rows"]]
    assert len(found) == 2 * 5
    for each in found:
        assert each.differences.keys() == {"fa3", "levels"} and not each.wrong
        assert (each.pat, each.fa3, each.levels) == (10.0, 11.0, 12.0)
        assert each.permuted and each.error < 0.01
    assert [each.draft_tokens for each in found] == [1] * 4 + [3] * 4 + [9] * 2
    assert "4/2/64 5_20 x 9 10.0 us" in printed and "over the limit, 0 of 2: none" in printed
    assert kernel.main(["--from", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.partition("\n\n")[2] in printed and "left out: 32/2/64 x 9" in shown
