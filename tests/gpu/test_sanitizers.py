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

from itertools import product

import pytest
import torch
from kit.cases import E4M3, Case
from kit.device import ALL_DTYPES, BF16, BOTH_KV, FP16, Dtypes, on_device, target_of
from kit.kinds import SMALL, items_of
from kit.plans import HandPlan

from sglang_pat.ops import decode
from sglang_pat.workspace import Workspace


def run(inputs: Case, hand: HandPlan, dtypes: Dtypes, launch: str = "queue") -> None:
    """Two steps of the plan."""
    inputs = inputs.to(dtypes[0])
    if dtypes[1] == E4M3:
        inputs = inputs.to_e4m3(0.5, 2.0)
    given = on_device(inputs, dtypes[0])
    workspace = Workspace(target_of(inputs), given.table.shape[1], launch=launch)
    for name in ("queue", "plan", "row_masks"):
        buffer = workspace._buffers[name]
        buffer.copy_(torch.zeros(buffer.shape, dtype=buffer.dtype))  # from the host
    workspace.load(hand)
    out = torch.full(inputs.q.shape, 1e4, dtype=dtypes[0]).cuda()
    lse = torch.full(inputs.q.shape[:2], 1e4).cuda()
    for _ in range(2):
        workspace.snapshot(given.table, given.rows, given.seq_lens)
        decode(*given.inputs, hand, **given.options, out=out, lse=lse, workspace=workspace)
    truth, truth_lse = inputs.truth()
    most = 0.04 if dtypes[1] == E4M3 else 0.01
    assert (out.cpu().double() - truth).norm() < most * truth.norm()
    finite = truth_lse.isfinite()
    assert (lse.cpu() - truth_lse)[finite].abs().max() < 0.05


@pytest.mark.parametrize(
    ("kind", "head_dim", "dtypes"),
    [
        *product(SMALL, [128], BOTH_KV),
        *product(["forest", "wide", "branches"], [64, 256], BOTH_KV),
        ("forest", 128, (FP16, FP16)),
        ("branches", 128, ALL_DTYPES[-1]),
    ],
)
def test_kinds_of_items(kind: str, head_dim: int, dtypes: Dtypes) -> None:
    run(*items_of(kind, (8, 2), head_dim), dtypes)


@pytest.mark.parametrize(
    ("heads", "options", "launch"),
    [
        ((14, 2), {}, "queue"),
        ((8, 2), {"logit_cap": 5.0}, "queue"),
        ((8, 2), {"draft_tokens": 3, "tails": (3, 40, 70)}, "queue"),
        ((8, 2), {}, "streams"),
    ],
)
def test_others(heads: tuple[int, int], options: dict[str, object], launch: str) -> None:
    run(*items_of("forest", heads, **options), (BF16, BF16), launch)
