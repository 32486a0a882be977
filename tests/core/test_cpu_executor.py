# SPDX-License-Identifier: Apache-2.0
"""The CPU executor against attention by its definition, on plans by hand and of the planner; what
it rounds and joins, and attention sinks."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from kit import drafts, sinks
from kit import latents as of_mla
from kit.cases import E4M3, Case, by_hand, case, check, error, execute, grown, random_trees
from kit.pieces import DYNAMIC, Piece, branched, forest, paths_of, shared
from kit.plans import encode
from kit.sinks import with_sinks
from kit.trees import Batch, check_plan

from sglang_pat.planner import plan
from sglang_pat.target import CUTS, Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Factors of K and V in float8_e4m3fn, unequal so that swapped ones are seen; without, fp32 as q.
SCALES = (0.037, 1.75)
# K and V; the last is multi-head latent attention, which has one KV head.
HEAD_DIMS = [*((dim, dim) for dim in (8, 64, 72, 96, 128, 256)), (64, 128), (192, 128), (128, 72)]
HEAD_DIMS += [(of_mla.K_DIM, of_mla.V_DIM)] * 3


def planned(inputs: Case, pieces: list[Piece], cut: str) -> Any:
    """A plan of the planner, checked; its branches hold 64 packed rows, as those by hand."""
    q_heads, kv_heads = inputs.heads
    dims = {"head_dim": inputs.k.shape[2], "v_head_dim": inputs.v.shape[2]}
    room = {"max_queries": 64, "draft_tokens": inputs.draft_tokens, "cuts": (cut,)}
    if dims["v_head_dim"] == of_mla.V_DIM:
        made_for = of_mla.target(q_heads, **room)
    else:
        made_for = Target.cpu(threads=4, num_q_heads=q_heads, num_kv_heads=kv_heads, **dims, **room)
    paths, lens = paths_of(pieces, len(inputs.rows)), inputs.seq_lens.tolist()
    made = plan(paths, lens, made_for)
    check_plan(made, Batch(paths, lens), made_for, lens)
    return made


def drawn(rng: np.random.Generator, seed: int) -> tuple[Case, list[Piece]]:
    """A forest, and inputs for it of any heads, dtypes, draft tokens and sinks."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    dims, group, kv_heads = one_of(*HEAD_DIMS), one_of(1, 2, 3, 4, 5, 7, 8, 16), one_of(1, 2, 3)
    is_mla, draft_tokens = dims[1] == of_mla.V_DIM, one_of(1, 1, 2, 3, 8, 60, 64)
    group = one_of(1, 8, 16, 20, 32, 64) if is_mla else group
    draft_tokens = draft_tokens if group * draft_tokens <= 64 else 1
    pieces = forest(rng, int(rng.integers(1, 6 if draft_tokens > 1 or is_mla else 25)))
    options = {"seed": seed, "logit_cap": one_of(0.0, 0.0, 0.5, 5.0), "draft_tokens": draft_tokens}
    if draft_tokens > 1:
        options["tails"] = tuple(draft_tokens + more for more in drafts.AROUND_BLOCKS)
    if is_mla:
        inputs: Case = of_mla.latents(pieces, group, **options)
    else:
        inputs = case(pieces, (group * kv_heads, kv_heads), *dims, **options)
    inputs = inputs.to(one_of(*DTYPES))
    if not is_mla and one_of(True, False):
        inputs = inputs.to_e4m3(*SCALES)
    if one_of(True, False):
        inputs = sinks.with_sinks(inputs, one_of(*sinks.SINKS), one_of(*DTYPES))
    if one_of(True, False):
        inputs = random_trees(inputs, seed)
    return inputs, pieces


@pytest.mark.parametrize("seed", range(240))
def test_random_forests(seed: int) -> None:
    """By turns in items by hand, in branches by hand, and by the planner with each cut, then also
    with tails as long as its plan allows."""
    rng = np.random.default_rng(seed)
    inputs, pieces = drawn(rng, seed)
    if inputs.draft_tokens > 1 and inputs.draft_masks is None:  # the same tree, bit by bit
        masks = drafts.chains(len(inputs.rows), inputs.draft_tokens)
        assert torch.equal(execute(replace(inputs, draft_masks=masks))[0], execute(inputs)[0])
    partial = DTYPES[rng.integers(2)]
    how: dict[str, Any] = {"partial": partial, "bound": 0.0 if partial == DTYPES[0] else 9e-3}
    if seed % 3 == 0:
        check(inputs, **how)
    elif seed % 3 == 1:
        rows = inputs.heads[0] // inputs.heads[1] * inputs.draft_tokens
        most = max(1, min(int(rng.choice([1, 3, 4, 64])), 64 // rows))
        check(replace(inputs, pieces=branched(pieces, most)), **how)
    else:
        made = planned(inputs, pieces, CUTS[seed // 3 % len(CUTS)])
        check(inputs, made, **how)
        longer = of_mla.grown if isinstance(inputs, of_mla.Latents) else grown
        check(longer(inputs, made.max_seq_lens.tolist(), seed), made, **how)


@pytest.mark.parametrize("scales", [None, SCALES], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("tokens", [*range(1, 10), *range(30, 38), *range(62, 68)])
def test_numbers_of_tokens(scales: tuple[float, float] | None, tokens: int) -> None:
    """Around the blocks of 32 tokens, and the four of which scores are computed together."""
    inputs = case(shared(3, tokens), (2, 1), tails=(tokens,), seed=tokens)
    check(inputs.to_e4m3(*scales) if scales else inputs)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_queries_without_tokens(group: int) -> None:
    """An empty tail is neutral beside a prefix; no tokens, in an item or a branch, and no item at
    all, as of a padded row, give zeros and -inf. A batch may have no queries."""
    check(case(shared(4, 60), (group, 1), tails=(0,)))
    check(by_hand(shared(4, 60), (group, 1), tails=(0,)))
    tails = [Piece((i,), 0, DYNAMIC) for i in range(5)]
    for inputs in (
        case([*tails[:1], Piece((1,), 0, 5)], (group, 1), tails=(0,)),
        case([Piece((1,), 0, 40)], (group, 1)),
        by_hand(tails, (group, 1), tails=(0,)),
        case([]),
    ):
        out, lse = execute(inputs)
        empty = inputs.seq_lens == 0
        assert not out[empty].any() and lse[empty].isneginf().all()
        assert error(out, inputs.truth()[0]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_runs_give_equal_bits(dtype: torch.dtype) -> None:
    pieces = forest(np.random.default_rng(3), 24, max_splits=6)
    for inputs in (case(pieces, (8, 2), 128), by_hand(pieces, (8, 2), head_dim=128)):
        inputs = inputs.to(dtype)
        expected, expected_lse = execute(inputs, threads=1)
        for threads in (1, 2, 3, 7) * 5:
            out, lse = execute(inputs, threads=threads)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        backwards = encode(inputs.pieces[::-1], len(inputs.q), inputs.heads)
        assert torch.equal(execute(inputs, backwards)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_of_latents_give_equal_bits(dtype: torch.dtype) -> None:
    """q in one tensor, and V copied out of K, too."""
    pieces = forest(np.random.default_rng(3), 12, max_splits=6)
    for parts in (pieces, branched(pieces, 4)):
        inputs = replace(of_mla.latents(pieces, 16).to(dtype), pieces=parts)
        out, lse = execute(inputs, threads=1)
        whole = replace(inputs, q=inputs.whole_q, q_rope=None)
        copied = replace(whole, v=inputs.v.clone())
        for same in (*[inputs] * 5, whole, copied):
            again, lse_again = execute(same, threads=3)
            assert torch.equal(again, out) and torch.equal(lse_again, lse)


def test_callers_on_several_threads() -> None:
    inputs = [case(forest(np.random.default_rng(s), 9), seed=s) for s in range(4)]
    expected = [execute(one)[0] for one in inputs]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda i: execute(inputs[i % 4], threads=3)[0], range(200)))
    assert all(torch.equal(out, expected[i % 4]) for i, out in enumerate(found))


def _in_a_child(inputs: Case, expected: torch.Tensor) -> None:
    assert torch.equal(execute(inputs, threads=3)[0], expected)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_works_after_a_fork() -> None:
    inputs = case(shared(16, 600), (8, 2), 128)
    expected, _ = execute(inputs, threads=3)
    child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(inputs, expected))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_offsets_beyond_32_bits() -> None:
    """Heads lie more than 2^31 elements apart; pages that nobody touches take no memory."""
    far = 2**31 + 64
    inputs = case([Piece((0,), 0, 3)], (2, 2)).to(torch.bfloat16)
    memory = torch.empty(far + 3 * 64, dtype=torch.bfloat16)
    pool = memory.as_strided((3, 2, 64), (64, far, 1))
    pool.copy_(torch.randn(3, 2, 64))
    table = torch.arange(3, dtype=torch.int32).view(1, 3).contiguous()
    rows = torch.zeros(1, dtype=torch.int64)
    check(replace(inputs, k=pool, v=pool, table=table, rows=rows))


@pytest.mark.parametrize("flush", [False, True])
def test_every_value_of_e4m3_is_read_exactly(flush: bool) -> None:
    """One token whose V is all 254 numbers: the output is V, also where a program has told its
    threads to flush subnormal numbers of fp32."""
    numbers = torch.arange(256, dtype=torch.uint8)
    values = torch.where((numbers & 0x7F) == 0x7F, 0, numbers).view(E4M3)
    inputs = case(shared(2, 1), (1, 1), 256, tails=(0,)).to_e4m3()
    v = inputs.v.clone()
    v[:, 0] = values
    torch.set_flush_denormal(flush)
    try:
        out, _ = execute(replace(inputs, v=v), threads=1)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out[:, 0], values.float().expand(2, -1))


@pytest.mark.parametrize("at", [3, 39])
@pytest.mark.parametrize("group", [1, 8])
def test_nan_of_e4m3_stays_nan(at: int, group: int) -> None:
    """Of V in its column, of K in all of the row, and nowhere else."""
    inputs = case([Piece((0,), 0, 40), Piece((1,), 0, 9)], (group, 1), tails=(0,)).to_e4m3()
    slot = int(inputs.table[inputs.rows[0], at])
    for byte in (0x7F, 0xFF):
        v, k = inputs.v.clone(), inputs.k.clone()
        v.view(torch.uint8)[slot, 0, 5] = byte
        out, _ = execute(replace(inputs, v=v))
        assert out[0, :, 5].isnan().all() and int(out.isnan().sum()) == group
        k.view(torch.uint8)[slot, 0, 5] = byte
        out, _ = execute(replace(inputs, k=k))
        assert out[0].isnan().all() and not out[1].isnan().any()


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def of_values(values: torch.Tensor, tokens: int) -> Case:
    """Queries that give equal weights to ``tokens`` tokens each, whose V are ``values``."""
    count, dtype = len(values), values.dtype
    queries = count // tokens
    inputs = case([Piece((i,), 0, tokens) for i in range(queries)], (1, 1), 8, 256).to(dtype)
    k, table = torch.zeros(count, 1, 8, dtype=dtype), torch.arange(count, dtype=torch.int32)
    return replace(
        inputs, k=k, v=values, table=table.view(queries, tokens), rows=torch.arange(queries)
    )


@HALVES
def test_every_half_value_is_read_and_written_as_torch_does(dtype: torch.dtype) -> None:
    """One token's weight is 1, so that its V comes out unchanged: all 65536 values of a dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 256)
    out, _ = execute(of_values(values, 1))
    torch.testing.assert_close(out, values, rtol=0, atol=0, equal_nan=True)


@HALVES
def test_halves_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Two equal tokens average their V: exact in fp32, rounded once on the way out."""
    torch.manual_seed(0)
    size = torch.tensor([1e-7, 1e-5, 1.0, 300.0, 6e4]).repeat_interleave(200).view(-1, 1, 1)
    values = (torch.randn(1000, 1, 256).clamp(-1.05, 1.05) * size).to(dtype)
    out, _ = execute(of_values(values, 2))
    assert torch.equal(out, (values.float().view(500, 2, 1, 256).sum(1) / 2).to(dtype))


@pytest.mark.parametrize("group", [1, 4, 8])
def test_equal_and_large_scores(group: int) -> None:
    """All keys alike: the mean of V, and log2 of the number of tokens above the score. V of 1e4
    costs no relative accuracy; scores of 1e4 leave no second token."""
    inputs = case(shared(2, 128, splits=2), (group, 1), tails=(7,))
    for size in (0.0, 1.0, 1e4):
        check(replace(inputs, k=torch.full_like(inputs.k, size)))
    check(replace(inputs, v=inputs.v * 1e4))
    check(replace(inputs, scale=1e4))


def test_neither_scale_nor_cap_changes_a_sink() -> None:
    """Where the logits are below -20 too, a sink of -30 counts."""
    inputs = case(shared(4, 40), (8, 2))
    for scale, cap in ((0.01, 0.0), (0.5, 2.0), (1.0, 25.0), (0.0, 0.0)):
        check(with_sinks(replace(inputs, scale=scale, logit_cap=cap), "mixed"))
    keys = inputs.q[:1, :1].expand_as(inputs.k)
    low = replace(inputs, q=-inputs.q[:1, :1].expand_as(inputs.q), k=keys, scale=0.5)
    assert low.truth()[1].max() < -20 / log(2)
    check(with_sinks(low, "below"))


@pytest.mark.parametrize("sinks", ["above", "mixed", "none"])
def test_without_tokens_a_sink_is_all_there_is(sinks: str) -> None:
    """In a query that has an item, and in one that has none: output 0, and the sink as LSE."""
    for parts in ([Piece((0,), 0, DYNAMIC), Piece((1,), 0, 5)], [Piece((1,), 0, 40)]):
        inputs = with_sinks(case(parts, (8, 2), tails=(0,)), sinks)
        assert inputs.sinks is not None and inputs.seq_lens[0] == 0
        check(inputs)
        out, lse = execute(inputs)
        assert not out[0].any()
        torch.testing.assert_close(lse[0], inputs.sinks / log(2))
