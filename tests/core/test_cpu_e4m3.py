# SPDX-License-Identifier: Apache-2.0
"""The CPU executor on K/V in float8_e4m3fn, against attention of the dequantised K/V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import E4M3, by_hand, case, execute
from kit.cpu import check, error
from kit.pieces import Piece, forest, shared

from benchmarks.kernel.kv import TreeBatch, make_batch
from sglang_pat import decode
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import Plan, plan
from sglang_pat.reference import attention
from sglang_pat.target import Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCALES = (0.037, 1.75)  # neither is a power of two, nor the other


def test_every_value_is_read_exactly() -> None:
    """One token whose V is all 254 numbers: the output is V."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].view(E4M3)
    values = torch.zeros(256, dtype=E4M3)
    values[:254] = numbers
    inputs = case(shared(2, 1), (1, 1), 256, tails=(0,)).to_e4m3()
    v = inputs.v.clone()
    v[:, 0] = values
    out, _ = execute(replace(inputs, v=v))
    assert torch.equal(out[:, 0], values.float().expand(2, -1))


def test_subnormals_are_read_where_fp32_flushes_its_own() -> None:
    inputs = case(shared(2, 40), (2, 1), 64).to_e4m3(k_scale=500.0, v_scale=500.0)
    assert inputs.v.float().abs().nan_to_num(0.0).max() < 2**-6, "all are subnormal"
    torch.set_flush_denormal(True)
    try:
        found, _ = execute(inputs, threads=1)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, execute(inputs, threads=1)[0])
    assert found.abs().max() > 0


@pytest.mark.parametrize("at", [3, 39])
@pytest.mark.parametrize("group", [1, 8])
def test_nan_stays_nan(at: int, group: int) -> None:
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


@pytest.mark.parametrize("logit_cap", [0.0, 20.0])
def test_branches_and_logit_caps(logit_cap: float) -> None:
    pieces = [Piece((0, 1, 2), 0, 90), Piece((0, 1), 90, 33), Piece((2,), 90, 64)]
    check(by_hand(pieces, (8, 2), logit_cap=logit_cap).to_e4m3(0.6, 3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("partial", [torch.float32, torch.bfloat16], ids=str)
def test_queries_of_16_bits(dtype: torch.dtype, partial: torch.dtype) -> None:
    inputs = case(forest(np.random.default_rng(5), 12, max_splits=4), (8, 2), 128).to(dtype)
    quantised = inputs.to_e4m3(*SCALES)
    out, _ = execute(quantised, partial=partial)
    assert out.dtype == dtype
    assert error(out, quantised.truth()[0]) < (6e-3 if partial == torch.bfloat16 else 4e-3)


def quantised(scales: tuple[float, float]) -> tuple[TreeBatch, Plan]:
    """A tree's inputs of ``decode`` with K/V in float8_e4m3fn, and its plan."""
    tree = Tree((1, 2, 6), (800, 400, 21))
    batch = make_batch(tree, num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    k_scale, v_scale = scales
    stored = replace(
        batch,
        k_cache=(batch.k_cache / k_scale).to(E4M3),
        v_cache=(batch.v_cache / v_scale).to(E4M3),
    )
    target = Target.cpu(
        threads=2, num_q_heads=8, num_kv_heads=2, head_dim=64, max_queries=8, kv_bytes=1
    )
    return stored, plan(tree.paths, tree.seq_lens, target)


@pytest.mark.parametrize("scales", [(1.0, 1.0), SCALES])
def test_decode_of_a_shared_tree(scales: tuple[float, float]) -> None:
    batch, made = quantised(scales)
    assert made.num_shared_items > 0
    k_scale, v_scale = scales
    given = {"scale": 0.125, "k_scale": k_scale, "v_scale": v_scale}
    out = decode(*batch.inputs, made, **given)
    truth, _ = attention(*batch.inputs, **given, dtype=torch.float64)
    assert error(out, truth) < 4e-3
    swapped, _ = attention(
        *batch.inputs, scale=0.125, k_scale=v_scale, v_scale=k_scale, dtype=torch.float64
    )
    assert scales == (1.0, 1.0) or error(out, swapped) > 0.1
