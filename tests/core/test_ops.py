# SPDX-License-Identifier: Apache-2.0
"""``decode``, ``check_slots`` and ``masks_of`` refuse what does not fit, saying what was given and
what fits; what a GPU is needed for is in tests/gpu/test_errors.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import latents
from kit.cases import Case, case
from kit.drafts import custom_mask, drafted
from kit.pieces import Piece, shared

from benchmarks.common.forests import Tree
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import make_batch
from sglang_pat import _C, Plan, SlotMismatch, Target, check_slots, decode, plan
from sglang_pat.draft_masks import masks_of
from sglang_pat.ops import check_cuda, check_kv

# A prefix of 40 tokens and three tails of 10: 70 slots and 50 that nobody owns, a table [6, 55].
PIECES = [Piece((0, 1, 2), 0, 40), *(Piece((i,), 40, 10) for i in range(3))]
HEADS = (8, 2)
meta = methodcaller("to", "meta")  # the only other device that every machine has
masks = torch.ones(3, 1, dtype=torch.int64)


def arguments_of(inputs: Case) -> dict[str, Any]:
    """All of ``decode``'s arguments; what it writes to holds NaN."""
    names = ("q", "k_cache", "v_cache", "req_to_token", "rows", "seq_lens")
    return {
        **dict(zip(names, inputs.inputs, strict=True)),
        **inputs.options,
        "plan": inputs.plan(),
        "out": torch.full((*inputs.q.shape[:2], inputs.v.shape[2]), float("nan")),
        "lse": torch.full(inputs.q.shape[:2], float("nan")),
        "partial_dtype": torch.float32,
        "workspace": None,
    }


@pytest.fixture(scope="module")
def inputs() -> Case:
    """D is 64 and Dv 48, so that neither can pass for the other."""
    return case(PIECES, HEADS, 64, 48)


@pytest.mark.parametrize("index", [torch.int16, torch.int32, torch.int64], ids=str)
def test_what_fits_runs(inputs: Case, index: torch.dtype) -> None:
    """The case that all below change: without this, a refusal says nothing of its change."""
    fits = replace(inputs, rows=inputs.rows.to(index), seq_lens=inputs.seq_lens.to(index))
    arguments = arguments_of(fits)
    out, lse = arguments["out"], arguments["lse"]
    assert decode(**arguments) is out
    truth, truth_lse = inputs.truth()
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(decode(**(arguments | {"out": None, "lse": None})), out)
    one = case([Piece((0,), 0, 1)], HEADS)  # a dimension of one has a stride that nothing takes
    out = decode(**(arguments_of(one) | {"req_to_token": one.table[:, ::6]}))
    torch.testing.assert_close(out.double(), one.truth()[0], rtol=1e-4, atol=1e-5)


OUT = "must be (3, 8, 48) torch.float32 on cpu"
LSE = "must be contiguous (3, 8) float32 on cpu"
TENSOR = "must be a torch.Tensor: convert it with torch.as_tensor"
LISTS = ("q", "seq_lens", "lse")
NAN, INF, E4M3 = float("nan"), float("inf"), torch.float8_e4m3fn
OTHER_BATCH = [Piece((0, 1), 0, 40)]
# Argument, what becomes of it, and what is said.
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    *((name, torch.Tensor.tolist, f"{name} is of type list, {TENSOR}") for name in LISTS),
    ("plan", lambda _: None, "plan is of type NoneType, must be a Plan: make it with sglang_pat"),
    ("q", lambda t: t[0], "q has shape (8, 64), must have 3 dimensions"),
    ("q", lambda t: t[..., ::2], "q has strides (536, 67, 2), the last must be 1"),
    ("q", meta, "q is on meta: sglang_pat decodes on CPU and CUDA devices"),
    ("q", torch.Tensor.int, "q is torch.int32, must be float32, bfloat16 or float16"),
    ("k_cache", meta, "k_cache is on meta, q on cpu: move one of them"),
    ("k_cache", torch.Tensor.bfloat16, "k_cache is torch.bfloat16 and v_cache torch.float32, must"),
    ("k_cache", lambda t: t[..., :56], "k_cache has head dim 56, q has 64"),
    ("v_cache", lambda t: t.to(E4M3), "v_cache torch.float8_e4m3fn, must both be torch.float32"),
    ("v_cache", lambda t: t[1:], "v_cache has 119 slots of 2 heads, k_cache 120 of 2"),
    ("k_scale", lambda _: 2.0, "k_scale is 2.0 and v_scale 1.0, must be 1 where K and V"),
    ("v_scale", lambda _: NAN, "v_scale is nan, must be from 1.2e-38"),
    ("k_scale", lambda _: 1e-60, "k_scale is 1e-60, must be from 1.2e-38"),
    ("k_scale", lambda _: INF, "k_scale is inf, must be from 1.2e-38"),
    ("k_scale", torch.tensor, "k_scale is of type Tensor, must be a float, one"),
    ("req_to_token", lambda t: t[0], "has shape (55,), must have 2 dimensions"),
    ("req_to_token", torch.Tensor.long, "is torch.int64, must be int32"),
    ("rows", lambda t: t[:2], "rows has shape (2,), q has 3 queries"),
    ("rows", torch.Tensor.float, "rows is torch.float32, must be an integer type"),
    ("rows", meta, "rows is on meta, where tensors have no values"),
    ("rows", lambda t: t + 6, "is outside of req_to_token with 6 rows"),
    ("rows", lambda t: t - 6, "query 0: row -"),
    ("seq_lens", lambda t: t - 60, "query 0: length -10"),
    ("seq_lens", lambda t: t + 6, "length 56 is outside of req_to_token with 55"),
    ("req_to_token", lambda t: t.index_fill(1, torch.tensor(45), -1), "names a slot outside"),
    ("req_to_token", lambda t: t.index_fill(1, torch.tensor(45), 120), "names a slot outside"),
    ("draft_masks", lambda _: masks[:2], "must be contiguous int64 (3, 1)"),
    ("draft_masks", lambda _: masks.int(), "draft_masks is torch.int32 (3, 1), must be"),
    ("draft_masks", lambda _: meta(masks), "draft_masks is on meta, must be on cpu"),
    ("plan", lambda _: case(OTHER_BATCH, HEADS).plan(), "the plan is for 2 queries, the arguments"),
    ("plan", lambda _: case(PIECES, (8, 4)).plan(), "for 8 query and 4 KV heads, the arguments"),
    ("sinks", lambda _: torch.zeros(7), "sinks is (7,) torch.float32 on cpu"),
    ("sinks", lambda _: torch.zeros(16)[::2], "with strides (2,), must be contiguous (8,)"),
    ("sinks", lambda _: torch.zeros(8).double(), "of float32, bfloat16 or float16"),
    ("sinks", lambda _: meta(torch.zeros(8)), "on meta with strides (1,), must be"),
    ("scale", lambda _: NAN, "scale is nan, must be finite"),
    ("logit_cap", lambda _: -1.0, "is -1, must be finite and 0 (off) or more"),
    ("out", lambda t: t[1:], f"out is (2, 8, 48) torch.float32 on cpu, {OUT}"),
    ("out", torch.Tensor.half, f"out is (3, 8, 48) torch.float16 on cpu, {OUT}"),
    ("out", meta, f"out is (3, 8, 48) torch.float32 on meta, {OUT}"),
    ("lse", lambda t: t.T.contiguous().T, f"torch.float32 on cpu with strides (1, 3), {LSE}"),
    ("lse", lambda t: t[1:], f"lse is (2, 8) torch.float32 on cpu with strides (8, 1), {LSE}"),
    ("lse", torch.Tensor.double, f"lse is (3, 8) torch.float64 on cpu with strides (8, 1), {LSE}"),
    ("partial_dtype", lambda _: torch.half, "partial_dtype is torch.float16, must be float32 or b"),
    ("workspace", lambda _: ON_GPU, "workspace is on cuda:0, q on cpu: leave it out"),
]
ON_GPU = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_wrong_arguments_of_decode(
    inputs: Case, name: str, change: Callable[[Any], Any], message: str
) -> None:
    """Each is refused before anything is written."""
    arguments = arguments_of(inputs)
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(**(arguments | {name: change(arguments[name])}))
    assert arguments["out"].isnan().all() and arguments["lse"].isnan().all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": lambda t: t[:11]}, "q has 11 rows, must be a multiple of the plan's 4 draft"),
        (dict.fromkeys(("q", "k_cache"), lambda t: t[..., :60]), "head_dim is 60, must be a mult"),
        ({"v_cache": lambda t: t[..., :0]}, "v_head_dim is 0, must be a multiple of 8"),
        ({"q": lambda t: t[:, :7]}, "7 query heads do not divide into 2 KV heads"),
    ],
)
def test_shapes_that_no_plan_has(wrong: dict[str, Callable[[Any], Any]], message: str) -> None:
    arguments = arguments_of(drafted(shared(3, 70), HEADS, 4, before=(0, 7)))
    arguments |= {"out": None, "lse": None}
    with pytest.raises(ValueError, match=message):
        decode(**(arguments | {name: change(arguments[name]) for name, change in wrong.items()}))


WRONG_ON_CUDA: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": torch.float32}, "q is float32, the CUDA kernels take bfloat16 and float16"),
    "v head dim": ({"v_dim": 128}, "V has head dim 128, K 64: must be alike on CUDA"),
    "alignment": ({"shift": 1}, "rows must begin at multiples of 16 bytes; make it contiguous"),
    "of 1 byte": ({"kv_dtype": E4M3, "shift": 8}, "rows must begin at multiples of 16 bytes"),
    "head dim": ({"dim": 72, "v_dim": 72}, "head_dim is 72, the CUDA kernels have 64, 128 and 256"),
    "ratio": ({"heads": (34, 2)}, "34 query heads on 2 KV heads: the ratio must be a whole number"),
    "logit_cap": ({"logit_cap": -1.0}, "logit_cap -1, both must be finite and the cap 0 (off)"),
    "": ({"kv_dtype": E4M3, "k_scale": 0.5}, ""),
}


@pytest.mark.skipif(not hasattr(_C, "check_decode_cuda"), reason="built with PAT_CUDA=OFF")
@pytest.mark.parametrize(("changes", "message"), WRONG_ON_CUDA.values(), ids=WRONG_ON_CUDA)
def test_what_cuda_kernels_do_not_have(changes: dict[str, Any], message: str) -> None:
    """Told before anything is launched, so without a device."""
    given = {"dtype": torch.bfloat16, "heads": HEADS, "dim": 64, "v_dim": 64, "shift": 0} | changes
    dtype, (q_heads, kv_heads), dim = given["dtype"], given["heads"], given["dim"]
    kv_dtype, shift = given.get("kv_dtype", dtype), given["shift"]
    q = torch.zeros(3, q_heads, dim, dtype=dtype)
    k = torch.zeros(10 * kv_heads * dim + shift, dtype=kv_dtype)[shift:].view(10, kv_heads, dim)
    v = torch.zeros(10, kv_heads, given["v_dim"], dtype=kv_dtype)
    names = {"scale": 0.125, "logit_cap": 0.0, "k_scale": 1.0, "v_scale": 1.0}
    factors = {name: given.get(name, value) for name, value in names.items()}
    factors["kv_dtype"] = check_kv(q, k, v, 1.0, 1.0)
    if not message:
        check_cuda(q, k, v, torch.zeros_like(q), 1, factors)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cuda(q, k, v, torch.zeros_like(q), 1, factors)


TREE = Tree((1, 2, 6), (300, 200, 40))
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
TARGETS = {
    "packs": Target.cpu(threads=2, max_queries=8, **SHAPE),
    "branches": Target.h200(max_queries=8, cuts=("branches",), **SHAPE),
}
PLANS = {name: plan(TREE.paths, TREE.seq_lens, target) for name, target in TARGETS.items()}
BATCH = make_batch(TREE, Heads(*SHAPE.values()), True, dtype=torch.float32)


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("query", "token"), [(1, 0), (4, 299), (2, 300), (5, 499)])
def test_a_wrong_slot_is_named(made: Plan, query: int, token: int) -> None:
    """Padding is not read, and tokens of one query are its own."""
    table, row = BATCH.req_to_token.clone(), int(BATCH.rows[query])
    table[BATCH.rows[3], 510] += 1
    check_slots(made, table, torch.cat([BATCH.rows, torch.tensor([-1, 99])]))
    right = int(table[row, token])
    table[row, token] = right + 1
    with pytest.raises(SlotMismatch, match=rf"at token {token}, .*req_to_token") as raised:
        check_slots(made, table, BATCH.rows)
    assert f"query {query} " in str(raised.value)
    assert re.search(rf"slot {right}\b", str(raised.value))


def test_decode_checks_when_asked() -> None:
    """Without the check the output is wrong without a word; with it nothing is written."""
    table = BATCH.req_to_token.clone()
    table[BATCH.rows[1], :300] = torch.randperm(len(BATCH.k_cache))[:300].to(torch.int32)
    inputs = replace(BATCH, req_to_token=table).inputs
    right = decode(*BATCH.inputs, PLANS["packs"], scale=0.125, check=True)
    assert torch.equal(decode(*inputs, PLANS["packs"], scale=0.125), right)
    out = torch.full_like(right, float("nan"))
    with pytest.raises(ValueError, match=r"query 1 (of its pack|holds)"):
        decode(*inputs, PLANS["packs"], scale=0.125, out=out, check=True)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        ([[0]], torch.arange(6), "req_to_token is of type list, must be a torch.Tensor"),
        (torch.zeros(540), torch.arange(6), "req_to_token has shape (540,), must have 2 dim"),
        (torch.zeros(6, 540), torch.zeros(6), "rows is torch.float32, must be an integer type"),
        (torch.zeros(6, 540), torch.arange(5), "the plan is for 6 queries, rows has 5"),
        (torch.zeros(6, 540), torch.arange(6) + 1, "query 5: row 6 is not one of the table's 6"),
        (torch.zeros(6, 499), torch.arange(6), "req_to_token has 499 a row"),
    ],
)
def test_what_cannot_be_compared_is_named(table: Any, rows: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_slots(PLANS["packs"], table, rows)


@pytest.mark.parametrize("draft_tokens", [1, 3, 33, 64])
def test_masks_of_cells(draft_tokens: int) -> None:
    """With and without those before the drafts, and where there are more cells than needed."""
    masks = torch.randint(-(2**63), 2**63 - 1, (5, draft_tokens))
    if draft_tokens < 64:
        masks &= (1 << draft_tokens) - 1
    lens = torch.tensor([5, 0, 130, 1, 64])
    alone, whole = custom_mask(masks), custom_mask(masks, lens)
    assert torch.equal(masks_of(alone, lens, draft_tokens, with_prefix=False), masks)
    for given in (whole, whole * torch.tensor(255).byte(), torch.cat([whole, whole[:9]])):
        found = masks_of(given, lens.int(), draft_tokens, with_prefix=True)
        assert torch.equal(found, masks)


def test_rows_of_padding_have_no_cells() -> None:
    """SGLang's masks end with the last request, its lengths with a one for each row of padding. An
    idle rank's have no cells at all."""
    lens = torch.tensor([4, 1, 1])
    given = custom_mask(torch.tensor([[1, 2, 4]]), lens[:1])
    masks = masks_of(given, lens, 3, with_prefix=True)
    assert masks.tolist() == [[1, 2, 4], [0, 0, 0], [0, 0, 0]]
    assert not masks_of(given[:0], lens, 3, with_prefix=False).any()


def test_cells_that_are_refused() -> None:
    cells, lens = torch.ones(18, dtype=torch.bool), torch.tensor([5, 2])
    for given, of, why in (
        (cells[1:], lens, "2 requests' 3 draft tokens has 17 cells, must have 18"),
        (cells[::2], lens, "custom_mask is torch.bool .9,. with strides .2,., must be flat"),
        (cells.view(2, 9), lens, "custom_mask is torch.bool .2, 9. with"),
        (cells.long(), lens, "torch.int64 .* must be flat, contiguous and torch.bool or torch.ui"),
        (cells, lens.float(), "seq_lens is torch.float32"),
        (cells, lens.to("meta"), "custom_mask is on cpu, seq_lens on meta"),
    ):
        with pytest.raises(ValueError, match=why):
            masks_of(given, of, 3, with_prefix=False)


WRONG_OF_LATENTS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "type": (lambda t: {"q_rope": [0]}, "q_rope is of type list, must be a torch.Tensor"),
    "rows": (lambda t: {"q_rope": t.q_rope[1:]}, "q_rope is (2, 16, 64) torch.float32 on cpu"),
    "none": (lambda t: {"q_rope": t.q_rope[..., :0]}, "q_rope is (3, 16, 0) torch.float32"),
    "dtype": (lambda t: {"q_rope": t.q_rope.half()}, "q_rope is (3, 16, 64) torch.float16 on cpu"),
    "device": (lambda t: {"q_rope": t.q_rope.to("meta")}, "torch.float32 on meta, must have"),
    "dims": (lambda t: {"q_rope": t.q_rope[..., :32]}, "k_cache has head dim 576, q has 544"),
    "a copy": (lambda t: {"v_cache": t.v.clone()}, "give the first part of K, k_cache[..., :512]"),
    "the end": (lambda t: {"v_cache": t.k[..., 64:]}, "first part of K, k_cache[..., :512]"),
    "all of K": (lambda t: {"v_cache": t.k}, "v_cache is (120, 1, 576) at 0x"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_OF_LATENTS.values(), ids=WRONG_OF_LATENTS)
def test_wrong_arguments_of_latents(change: Callable[[Any], dict[str, Any]], message: str) -> None:
    """Before anything is written."""
    inputs = latents.latents(PIECES, 16)
    arguments = arguments_of(inputs)
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(**(arguments | change(inputs)))
    assert arguments["out"].isnan().all()


def test_latents_that_no_kernel_has_are_refused() -> None:
    for heads, draft_tokens in ((128, 1), (16, 5)):
        rows = heads * draft_tokens
        with pytest.raises(ValueError, match=f"end at 64 rows, fewer than the {rows} of one query"):
            latents.target(heads, draft_tokens=draft_tokens)
    inputs = latents.latents(shared(2, 9), 16).to(torch.bfloat16)
    q, k, v, *_ = inputs.inputs
    message = "V has head dim 256, K 576: must be alike on CUDA, or 512 and 576"
    with pytest.raises(ValueError, match=message):
        check_cuda(q, k, v[..., :256], torch.zeros_like(q), 1, {}, inputs.q_rope)
