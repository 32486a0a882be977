# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on the GPU: joined once per query head, in every kind of unit and in the merge,
and read anew at every replay of a graph. tests/core/test_cpu_executor.py has the CPU's."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from kit.cases import case
from kit.device import (
    BF16,
    BOTH_KV,
    Captured,
    Dtypes,
    check,
    check_launches,
    execute,
    of_all_dtypes,
    of_both_kv,
    of_head_dims,
    on_device,
    same,
    target_of,
)
from kit.pieces import DYNAMIC, Piece, shared
from kit.sinks import of_plans, of_sinks, planned, with_sinks

from sglang_pat.workspace import Workspace


@of_both_kv
@of_head_dims
@of_sinks
@of_plans
def test_every_query_head_has_its_sink_once(
    name: str, sinks: str, head_dim: int, dtypes: Dtypes
) -> None:
    for heads in ((16, 2), (7, 1)):
        inputs, hand = planned(name, heads, head_dim)
        check(with_sinks(on_device(inputs, *dtypes), sinks, BF16), hand)


@of_both_kv
@pytest.mark.parametrize("partial", [torch.float32, BF16])
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 9, 32, 33, 70])
@pytest.mark.parametrize("queries", [1, 4, 60, 500])
def test_merges(queries: int, splits: int, partial: torch.dtype, dtypes: Dtypes) -> None:
    """By one warp, by several that share a head, and where a warp takes two heads."""
    inputs = on_device(case(shared(queries, 20 * splits, splits), (8, 2), 64), *dtypes)
    check(with_sinks(inputs, "mixed"), partial_dtype=partial)


@of_all_dtypes
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["one split", "two splits", "chains", "branches", "wide"])
def test_dtypes_of_sinks(name: str, sink_dtype: torch.dtype, dtypes: Dtypes) -> None:
    """The values are exact in all of them, so these give the same bits."""
    inputs, hand = planned(name, (16, 2))
    inputs = on_device(inputs, *dtypes)
    check(with_sinks(inputs, "mixed"), hand)
    wanted = execute(with_sinks(inputs, "mixed"), hand)
    assert same(execute(with_sinks(inputs, "mixed", sink_dtype), hand), wanted)


@of_both_kv
@of_plans
def test_sinks_of_minus_infinity_are_none(name: str, dtypes: Dtypes) -> None:
    """Bit by bit."""
    inputs, hand = planned(name, (16, 2), 128)
    inputs = on_device(inputs, *dtypes)
    assert same(execute(with_sinks(inputs, "none"), hand), execute(inputs, hand))


@pytest.mark.parametrize("dtypes", BOTH_KV, ids=str)
@pytest.mark.parametrize("name", ["joint", "joint splits", "pairs", "beside", "wide_forest"])
def test_launches_agree_and_repeat(name: str, dtypes: Dtypes) -> None:
    inputs, hand = planned(name, (16, 2))
    check_launches(with_sinks(on_device(inputs, *dtypes), "mixed", BF16), hand)


@of_both_kv
def test_neither_scale_nor_cap_changes_a_sink(dtypes: Dtypes) -> None:
    """With logits that a kernel takes as they are, scaled and capped."""
    for name in ("one split", "two splits", "branches", "wide"):
        inputs, hand = planned(name, (16, 2))
        inputs = with_sinks(on_device(inputs, *dtypes), "mixed")
        for scale, cap in ((0.01, 0.0), (0.5, 2.0), (1.0, 25.0), (0.0, 0.0), (-0.1, 0.0)):
            check(replace(inputs, scale=scale, logit_cap=cap), hand)


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_without_tokens_a_sink_is_all_there_is(draft_tokens: int) -> None:
    """Of a query that has an item, of one that has none, and of rows that pad: output 0, and the
    sink as LSE."""
    tails = [Piece((query,), 0, DYNAMIC) for query in range(8)]
    options = {"draft_tokens": draft_tokens, "tails": (0,) if draft_tokens == 1 else (5,)}
    full = with_sinks(on_device(case(tails, (8, 2), **options), BF16), "mixed")
    assert full.sinks is not None
    count, first = 3, 0 if draft_tokens == 1 else 3 * draft_tokens
    part = replace(
        full,
        q=full.q[: count * draft_tokens],
        rows=full.rows[:count],
        seq_lens=full.seq_lens[:count],
        pieces=tails[:count],
    )
    workspace = Workspace(target_of(full), full.table.shape[1])
    out, lse = execute(full, part.plan(), workspace=workspace)
    assert not out[first:].any()
    wanted = (full.sinks / log(2)).expand_as(lse)[first:]
    torch.testing.assert_close(lse[first:], wanted, rtol=1e-6, atol=1e-6)


@of_both_kv
@pytest.mark.parametrize("sink_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", ["one split", "two splits", "chains", "branches", "joint"])
def test_a_graph_reads_new_values(name: str, sink_dtype: torch.dtype, dtypes: Dtypes) -> None:
    """As a weight update leaves them where the old ones were."""
    inputs, hand = planned(name, (16, 2))
    inputs = with_sinks(on_device(inputs, *dtypes), "mixed", sink_dtype)
    assert inputs.sinks is not None
    workspace = Workspace(target_of(inputs), inputs.table.shape[1])
    before = execute(inputs, hand, workspace=workspace)
    captured = Captured(inputs, workspace)
    assert same(captured.replay(), before)
    inputs.sinks.copy_(inputs.sinks.roll(1))
    results = captured.replay()
    assert same(results, execute(inputs, hand)) and not same(results, before)
