# SPDX-License-Identifier: Apache-2.0
"""The CPU executor against attention by its definition, on hand-made plans."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import Case, case, execute
from kit.cpu import FP32_ERROR, check, error
from kit.pieces import DYNAMIC, Piece, forest, shared, single
from kit.plans import encode

pytestmark = pytest.mark.usefixtures("one_torch_thread")
# Factors of K and V in float8_e4m3fn, unequal so that swapped ones are seen; without, fp32 as q.
STORED = pytest.mark.parametrize("scales", [None, (0.037, 1.75)], ids=["fp32", "e4m3"])
Scales = tuple[float, float] | None


def stored(inputs: Case, scales: Scales) -> Case:
    return inputs.to_e4m3(*scales) if scales else inputs


@STORED
@pytest.mark.parametrize("seed", range(6))
def test_random_forests(scales: Scales, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = [(8, 2), (4, 4), (5, 1), (14, 2), (16, 1), (6, 3)][seed]
    check(stored(case(forest(rng, 1 + 5 * seed), heads, seed=seed), scales))


@STORED
@pytest.mark.parametrize(
    "head_dims", [8, 64, 72, 80, 96, 128, 192, 256, (64, 128), (192, 128), (128, 72)], ids=str
)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_head_dims_and_ratios(scales: Scales, head_dims: int | tuple[int, int], group: int) -> None:
    dims = head_dims if isinstance(head_dims, tuple) else (head_dims, head_dims)
    check(stored(case(shared(3, 70), (2 * group, 2), *dims, seed=group), scales))


@STORED
@pytest.mark.parametrize("tokens", [*range(1, 10), *range(30, 38), *range(62, 68)])
def test_numbers_of_tokens(scales: Scales, tokens: int) -> None:
    """Around the blocks of 32 tokens, and the four of which scores are computed together."""
    check(stored(case(shared(3, tokens), (2, 1), tails=(tokens,), seed=tokens), scales))


@pytest.mark.parametrize("group", [1, 4, 8])
def test_empty_tails(group: int) -> None:
    """A tail of no tokens is neutral beside a prefix, and alone gives zeros and -inf."""
    beside = case(shared(4, 60), (group, 1), tails=(0,))
    check(beside)
    alone = case([Piece((0,), 0, DYNAMIC), Piece((1,), 0, 5)], (group, 1), tails=(0,))
    out, lse = execute(alone)
    assert torch.all(out[0] == 0) and torch.all(lse[0] == -torch.inf)
    assert error(out[1:], alone.truth()[0][1:]) < FP32_ERROR


def test_queries_without_items() -> None:
    """No tokens and no splits: zeros, as for a padded row."""
    inputs = case([Piece((1,), 0, 40)])
    out, lse = execute(inputs)
    assert torch.all(out[0] == 0) and torch.all(lse[0] == -torch.inf)
    assert error(out, inputs.truth()[0]) < FP32_ERROR


def test_no_queries() -> None:
    inputs = case([])
    out, _ = execute(inputs)
    assert out.shape[0] == 0


def test_lse_is_optional() -> None:
    inputs = case(shared(3, 50))
    out, lse = execute(inputs, lse=0)
    assert torch.all(lse.isnan()) and torch.equal(out, execute(inputs)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_runs_give_equal_bits(dtype: torch.dtype) -> None:
    inputs = case(forest(np.random.default_rng(3), 24, max_splits=6), (8, 2), 128).to(dtype)
    expected, expected_lse = execute(inputs, threads=1)
    for threads in (1, 2, 3, 7) * 10:
        out, lse = execute(inputs, threads=threads)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_the_order_of_items_changes_no_bit() -> None:
    inputs = case(forest(np.random.default_rng(4), 12, max_splits=5))
    expected, _ = execute(inputs)
    backwards = encode(inputs.pieces[::-1], len(inputs.q), inputs.heads)
    assert torch.equal(execute(inputs, backwards)[0], expected)


def test_a_swapped_slot_is_seen() -> None:
    """The comparison has teeth: one wrong slot among hundreds exceeds the bound."""
    inputs = case(shared(4, 300), (8, 2))
    truth, _ = inputs.truth()
    table = inputs.table.clone()
    row = int(inputs.rows[3])
    table[row, 7] = table[row, 8]
    out, _ = execute(replace(inputs, table=table))
    assert error(out, truth) > 100 * FP32_ERROR


def test_callers_on_several_threads() -> None:
    inputs = [case(forest(np.random.default_rng(s), 9), seed=s) for s in range(4)]
    expected = [execute(one)[0] for one in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(50):
            if not torch.equal(execute(inputs[i], threads=3)[0], expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


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
    inputs = case(single(3), (2, 2)).to(torch.bfloat16)
    memory = torch.empty(far + 3 * 64, dtype=torch.bfloat16)
    pool = memory.as_strided((3, 2, 64), (64, far, 1))
    pool.copy_(torch.randn(3, 2, 64))
    table = torch.arange(3, dtype=torch.int32).view(1, 3).contiguous()
    rows = torch.zeros(1, dtype=torch.int64)
    check(replace(inputs, k=pool, v=pool, table=table, rows=rows), 4e-3)
