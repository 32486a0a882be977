# SPDX-License-Identifier: Apache-2.0
"""Branches on the CPU: as the planner makes them and by hand, against attention by definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import by_hand, case, execute, grown
from kit.cpu import check_any as check
from kit.pieces import DYNAMIC, Branch, Piece, branched, forest, paths_of, prefix
from kit.trees import BRANCHING, Batch, branches_of, check_plan, ranges_of, target

from sglang_pat.ops import decode
from sglang_pat.planner import plan
from sglang_pat.target import Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GROUPS = [1, 2, 4, 5, 7, 8, 16]


def cpu(heads: tuple[int, int], cut: str = "branches") -> Target:
    options = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 64}
    return Target.cpu(threads=4, max_queries=64, cuts=(cut,), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_planned_branches(dtype: torch.dtype, group: int) -> None:
    """Of random forests, at the lengths of the plan and with tails as long as it allows."""
    for seed, cut in enumerate(BRANCHING):
        rng = np.random.default_rng(100 * group + seed)
        pieces = forest(rng, int(rng.integers(2, 30)))
        inputs = case(pieces, (2 * group, 2), 64, seed=seed, logit_cap=(0.0, 5.0)[seed % 2])
        inputs, made_for = inputs.to(dtype), cpu(inputs.heads, cut)
        paths, lens = paths_of(pieces, len(inputs.q)), inputs.seq_lens.tolist()
        made = plan(paths, lens, made_for)
        check_plan(made, Batch(paths, lens), made_for, lens)
        assert made.branch_tokens > 0
        check(inputs, made)
        check(grown(inputs, made.max_seq_lens.tolist(), seed), made)


def test_the_order_of_the_batch_does_not_count() -> None:
    """Which of a node's queries make a branch: of nine, one of which has another tail."""
    made_for = target(cuts=("half_branches",))
    results = []
    for place in range(9):
        batch = Batch([[(1, 0, 700)]] * 9, [704 if i == place else 700 for i in range(9)])
        made = plan(batch.paths, batch.seq_lens, made_for)
        assert len(branches_of(made)) == 2
        items = [ranges_of(made, index, batch.seq_lens) for index in range(made.num_items)]
        results.append(sorted([(r.length, len(r.queries)) for r in item] for item in items))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("most", [1, 3, 4])
def test_hand_made_branches(group: int, most: int) -> None:
    """Every second one has its tails first."""
    for seed in range(3):
        pieces = forest(np.random.default_rng(seed), 17)
        inputs = by_hand(pieces, (2 * group, 2), most=most, seed=seed)
        firsts = [part.tails_first for part in inputs.pieces]  # type: ignore[union-attr]
        assert firsts[:4] == [False, True, False, True]
        check(inputs, inputs.plan())


def test_branches_beside_other_items() -> None:
    """A query of both a branch and other items: the branch's partial is its last."""
    pieces = prefix(20, 200)
    mixed: list[Piece | Branch] = [pieces[0], *branched(pieces[1:], 8)]
    inputs = replace(case(pieces, (4, 1)), pieces=mixed)
    check(inputs, inputs.plan())


def test_empty_tails() -> None:
    """Beside a prefix they are neutral; a branch without tokens gives zeros and -inf."""
    inputs = by_hand(prefix(5, 40), (4, 1), tails=(0,))
    check(inputs, inputs.plan())
    out, lse = execute(by_hand([Piece((i,), 0, DYNAMIC) for i in range(5)], (4, 1), tails=(0,)))
    assert not out.any() and torch.all(lse.isneginf())


def test_threads_and_runs_give_equal_bits() -> None:
    inputs = by_hand(forest(np.random.default_rng(3), 24), (8, 2), head_dim=128)
    expected = execute(inputs, threads=1)
    for threads in (1, 2, 3, 7) * 3:
        for got, want in zip(execute(inputs, threads=threads), expected, strict=True):
            assert torch.equal(got, want)


def test_a_swapped_slot_is_seen() -> None:
    inputs = by_hand(prefix(4, 300), (8, 2), tails=(30,))
    for token in (7, 310):  # shared, and of query 3 alone
        table = inputs.table.clone()
        table[inputs.rows, token] = table[inputs.rows, token + 1]
        out, _ = execute(replace(inputs, table=table))
        truth, _ = inputs.truth()
        assert (out.double() - truth).norm() > 1e-4 * truth.norm()


def test_decode_runs_planned_branches() -> None:
    inputs = case(prefix(16, 100), (8, 2), tails=(5,))
    paths, lens = paths_of(prefix(16, 100), 16), inputs.seq_lens.tolist()
    made = plan(paths, lens, cpu(inputs.heads))
    assert made.num_items == 1 and made.num_segments == 17 and made.num_partials == 0
    arguments = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.rows, inputs.seq_lens)
    out = decode(*arguments, made, scale=inputs.scale)
    torch.testing.assert_close(out.double(), inputs.truth()[0], rtol=1e-4, atol=1e-5)
