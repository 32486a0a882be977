# SPDX-License-Identifier: Apache-2.0
"""A small suite for compute-sanitizer: every kernel and kind of item. All tensors are made on the
host, since of torch's own kernels, which ``--kernel-name`` leaves out, the tools see no writes.

    K="--kernel-name kns=forward_kernel --kernel-name kns=merge_kernel"
    K="$K --kernel-name kns=snapshot_kernel --kernel-name kns=first_units_kernel"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck $K \\
        python3 -m pytest tests/gpu/test_sanitizers.py

memcheck likewise. racecheck and synccheck want kernels made for them, else the first reports each
barrier that one lane releases for its warp, and the second one that the jobs of a CTA meet at in
several places: ``pip install -C cmake.define.PAT_SANITIZER=ON .``
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import E4M3, Case, by_hand, case
from kit.device import DevicePlan, on_device, target_of
from kit.pieces import Piece, forest, prefix

from sglang_pat.ops import decode
from sglang_pat.workspace import Workspace

BF16, FP16 = torch.bfloat16, torch.float16


def run(
    inputs: Case, dtype: torch.dtype = BF16, *, wide: bool = False, launch: str = "queue"
) -> None:
    """Two steps of the case's plan; K and V in e4m3 stay so."""
    inputs = replace(inputs, q=inputs.q.to(dtype)) if inputs.k.dtype == E4M3 else inputs.to(dtype)
    given = on_device(inputs, dtype)
    plan = DevicePlan(inputs.plan(wide))
    workspace = Workspace(target_of(inputs), given.table.shape[1], launch=launch)
    for name in ("queue", "plan", "row_masks"):
        buffer = workspace._buffers[name]
        buffer.copy_(torch.zeros(buffer.shape, dtype=buffer.dtype))  # from the host
    workspace.load(plan)  # type: ignore[arg-type]
    out = torch.full(inputs.q.shape, 1e4, dtype=dtype).cuda()
    lse = torch.full(inputs.q.shape[:2], 1e4).cuda()
    options = {
        "scale": inputs.scale,
        "logit_cap": inputs.logit_cap,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
        "out": out,
        "lse": lse,
        "workspace": workspace,
    }
    batch = (given.table, given.rows, given.seq_lens)
    for _ in range(2):
        workspace.snapshot(*batch)
        decode(given.q, given.k, given.v, *batch, plan, **options)  # type: ignore[arg-type]
    truth, truth_lse = inputs.truth()
    most = 0.04 if inputs.k.dtype == E4M3 else 0.01
    assert (out.cpu().double() - truth).norm() < most * truth.norm()
    finite = truth_lse.isfinite()
    assert (lse.cpu() - truth_lse)[finite].abs().max() < 0.05


def pieces(seed: int, num_queries: int) -> list[Piece]:
    return forest(np.random.default_rng(seed), num_queries)


@pytest.mark.parametrize(("head_dim", "num_queries"), [(64, 24), (128, 24), (256, 16)])
def test_forests(head_dim: int, num_queries: int) -> None:
    run(case(pieces(1, num_queries), (8, 2), head_dim))


def test_a_group_of_seven() -> None:
    run(case(pieces(4, 20), (14, 2), 128))


def test_fp16() -> None:
    run(case(pieces(5, 16), (4, 1), 128), FP16)


def test_wide_items() -> None:
    run(case(prefix(40, 700), (8, 2), 128), wide=True)


def test_items_of_64_rows() -> None:
    run(case(prefix(16, 600), (8, 2), 128))


@pytest.mark.parametrize(("head_dim", "num_queries"), [(64, 20), (128, 32), (256, 12)])
def test_branches(head_dim: int, num_queries: int) -> None:
    run(by_hand(pieces(6, num_queries), (8, 2), head_dim=head_dim))


def test_a_kernel_a_row_tile() -> None:
    run(case(pieces(9, 20), (8, 2), 128), launch="streams")


def test_capped_logits() -> None:
    run(replace(case(pieces(10, 16), (8, 2), 128), logit_cap=5.0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8(head_dim: int) -> None:
    """All kinds of items, for mma.sync and for wgmma."""
    run(case(pieces(11, 20), (8, 2), head_dim).to_e4m3(0.5, 2.0))
    run(case(prefix(40, 300), (8, 2), head_dim).to_e4m3(0.5, 2.0), wide=True)
    run(by_hand(pieces(12, 16), (8, 2), head_dim=head_dim).to_e4m3(0.5, 2.0), FP16)
