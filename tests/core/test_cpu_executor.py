# SPDX-License-Identifier: Apache-2.0
"""The CPU executor against attention by its definition, on plans by hand and of the planner."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from kit import drafts
from kit.cases import E4M3, Case, by_hand, case, check, error, execute, grown, random_trees
from kit.pieces import DYNAMIC, Branch, Piece, branched, forest, paths_of, prefix, shared
from kit.plans import encode
from kit.trees import Batch, check_plan

from sglang_pat.planner import plan
from sglang_pat.target import CUTS, Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Factors of K and V in float8_e4m3fn, unequal so that swapped ones are seen; without, fp32 as q.
STORED = pytest.mark.parametrize("scales", [None, (0.037, 1.75)], ids=["fp32", "e4m3"])
Scales = tuple[float, float] | None
drafted = partial(drafts.drafted, before=drafts.AROUND_BLOCKS)
GROUPS = [1, 2, 4, 5, 7, 8, 16]


def stored(inputs: Case, scales: Scales) -> Case:
    return inputs.to_e4m3(*scales) if scales else inputs


@STORED
@pytest.mark.parametrize(
    "head_dims", [(d, d) for d in (8, 64, 72, 96, 128, 256)] + [(64, 128), (192, 128), (128, 72)]
)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_head_dims_and_ratios(scales: Scales, head_dims: tuple[int, int], group: int) -> None:
    check(stored(case(shared(3, 70), (2 * group, 2), *head_dims, seed=group), scales))


@STORED
@pytest.mark.parametrize("tokens", [*range(1, 10), *range(30, 38), *range(62, 68)])
def test_numbers_of_tokens(scales: Scales, tokens: int) -> None:
    """Around the blocks of 32 tokens, and the four of which scores are computed together."""
    check(stored(case(shared(3, tokens), (2, 1), tails=(tokens,), seed=tokens), scales))


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, (0.037, 1.75))],
)
@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
def test_plans_of_the_planner(
    dtype: torch.dtype, scales: Scales, draft_tokens: int, group: int
) -> None:
    """At the plan's own lengths and with tails as long as it allows, of every cut."""
    for seed, cut in enumerate(CUTS):
        rng = np.random.default_rng(100 * group + seed)
        pieces = forest(rng, int(rng.integers(2, 12)))
        heads, cap = (2 * group, 2), (0.0, 5.0)[seed % 2]
        inputs = drafted(pieces, heads, draft_tokens, seed=seed, logit_cap=cap)
        inputs = stored(inputs.to(dtype), scales)
        made_for = Target.cpu(
            threads=4,
            num_q_heads=heads[0],
            num_kv_heads=2,
            head_dim=64,
            draft_tokens=draft_tokens,
            max_queries=64,
            cuts=(cut,),
        )
        paths, lens = paths_of(pieces, len(inputs.rows)), inputs.seq_lens.tolist()
        made = plan(paths, lens, made_for)
        check_plan(made, Batch(paths, lens), made_for, lens)
        bound = 9e-3 if dtype == torch.bfloat16 else 2e-6
        check(inputs, made, bound)
        check(grown(inputs, made.max_seq_lens.tolist(), seed), made, bound)


@pytest.mark.parametrize("most", [1, 3, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_branches_by_hand(group: int, most: int) -> None:
    """Every second one has its tails first. Of a query with other items beside it, the branch's
    partial is the last."""
    pieces = prefix(20, 200)
    mixed: list[Piece | Branch] = [pieces[0], *branched(pieces[1:], most)]
    check(replace(case(pieces, (group, 1)), pieces=mixed))
    for seed in range(3):
        pieces = forest(np.random.default_rng(seed), 17)
        inputs = by_hand(pieces, (2 * group, 2), most=most, seed=seed, logit_cap=seed * 10.0)
        check(inputs)
        check(inputs.to_e4m3(0.6, 3.0))


@pytest.mark.parametrize("draft_tokens", [2, 3, 8, 60, 64])
@pytest.mark.parametrize("heads", [(8, 2), (5, 1), (2, 2)])
def test_drafts(draft_tokens: int, heads: tuple[int, int]) -> None:
    """That are a chain or a tree, in items of their own and in branches. A chain is the same tree,
    bit by bit."""
    for seed in range(2):
        pieces = forest(np.random.default_rng(seed), 4)
        chain = drafted(pieces, heads, draft_tokens, seed=seed)
        out = check(chain)
        masked = replace(chain, draft_masks=drafts.chains(len(chain.rows), draft_tokens))
        assert torch.equal(execute(masked)[0], out)
        check(random_trees(chain, seed))
        if draft_tokens * heads[0] // heads[1] <= 32:
            branches = replace(chain, pieces=branched(pieces, 2))
            check(branches)
            check(random_trees(branches, seed))


@pytest.mark.parametrize("group", [1, 4, 8])
def test_queries_without_tokens(group: int) -> None:
    """An empty tail is neutral beside a prefix; no tokens, in an item or a branch, and no item at
    all, as of a padded row, give zeros and -inf. A batch may have no queries."""
    check(case(shared(4, 60), (group, 1), tails=(0,)))
    check(by_hand(prefix(4, 60), (group, 1), tails=(0,)))
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


@pytest.mark.parametrize("made", [case, by_hand])
def test_a_swapped_slot_is_seen(made) -> None:
    """The comparison has teeth: one wrong slot among hundreds, of the prefix or of a tail, exceeds
    the bound."""
    inputs = made(prefix(4, 300), (8, 2), tails=(30,))
    for token in (7, 310):
        table = inputs.table.clone()
        table[inputs.rows, token] = table[inputs.rows, token + 1]
        assert error(execute(replace(inputs, table=table))[0], inputs.truth()[0]) > 1e-4


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
