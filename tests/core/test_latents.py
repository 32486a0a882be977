# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: plans for it, the CPU executor against attention by its definition,
and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import trees
from kit.cases import execute
from kit.latents import K_DIM, V_DIM, Latents, latents, target
from kit.pieces import DYNAMIC, Piece, branched, forest, shared
from kit.trees import Batch, batches, check_plan, packed_rows

from sglang_pat import decode
from sglang_pat.capacity import ROOM, buffer_shapes
from sglang_pat.ops import check_cuda
from sglang_pat.planner import plan

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_threads_and_forms_of_the_arguments_give_equal_bits(dtype: torch.dtype) -> None:
    """q in one tensor, and V copied out of K, too."""
    pieces = forest(np.random.default_rng(3), 12, max_splits=6)
    for parts in (pieces, branched(pieces, 4)):
        inputs = replace(latents(pieces, 16).to(dtype), pieces=parts)
        out, lse = execute(inputs, threads=1)
        whole = replace(inputs, q=inputs.whole_q, q_rope=None)
        copied = replace(whole, v=inputs.v.clone())
        for same in (*[inputs] * 5, whole, copied):
            again, lse_again = execute(same, threads=3)
            assert torch.equal(again, out) and torch.equal(lse_again, lse)


@settings(max_examples=80)
@given(batches(), st.sampled_from([1, 8, 16, 20, 64]), st.integers(1, 3), st.booleans())
def test_items_are_units_of_the_kernel(
    batch: Batch, heads: int, draft_tokens: int, hopper: bool
) -> None:
    """One row tile, of 64 rows, that an SM runs alone."""
    draft_tokens = 1 if heads * draft_tokens > 64 else draft_tokens
    batch = batch.drafted(draft_tokens)
    made_for = target(heads, draft_tokens=draft_tokens, hopper=hopper)
    made = plan(batch.paths, batch.seq_lens, made_for)
    check_plan(made, batch, made_for, batch.seq_lens)
    assert (made.items["row_tile"] == 64).all()
    assert (made.items["num_queries"] * packed_rows(made_for) <= 64).all()
    assert made.num_heavy_items == made.num_items
    assert made.joint == made.num_wide_items == made.num_paired_items == 0


def test_packs_fill_units() -> None:
    """Four queries of 16 heads are one; the fifth reads the node with its tail, as that costs a
    unit anyway, and has no partials then."""
    for queries, partials in ((4, 8), (5, 8), (8, 16)):
        made = plan([[(1, 0, 640)]] * queries, [700] * queries, target(16, cuts=()))
        assert made.num_partials == partials
    # Heads that fill a unit have nothing to pack.
    alone = plan([[(1, 0, 640)]] * 8, [700] * 8, target(64, cuts=()))
    assert alone.num_shared_items == alone.num_partials == 0


def test_what_a_target_says_of_a_token() -> None:
    """Of latents K alone is kept, and partials have the dim of V; other head dims that differ have
    K and V."""
    made_for = target(16)
    assert made_for.token_values == K_DIM and made_for.kv_tiles == (64,)
    room = {name: getattr(made_for, name) for name in ROOM}
    shape, _ = buffer_shapes(16, made_for.v_head_dim, 1, torch.float32, room)["partials"]
    assert shape == (1 << 18, 16, V_DIM)
    assert trees.target(head_dim=192, v_head_dim=128).token_values == 320


WRONG: dict[str, tuple[Callable[[Latents], dict[str, Any]], str]] = {
    "type": (lambda t: {"q_rope": [0]}, "q_rope is of type list, must be a torch.Tensor"),
    "rows": (lambda t: {"q_rope": t.q_rope[1:]}, "q_rope is (2, 16, 64) torch.float32 on cpu"),
    "none": (lambda t: {"q_rope": t.q_rope[..., :0]}, "q_rope is (3, 16, 0) torch.float32"),
    "dtype": (lambda t: {"q_rope": t.q_rope.half()}, "q_rope is (3, 16, 64) torch.float16 on cpu"),
    "device": (lambda t: {"q_rope": t.q_rope.to("meta")}, "torch.float32 on meta, must have"),
    "dims": (lambda t: {"q_rope": t.q_rope[..., :32]}, "k_cache has head dim 576, q has 544"),
    "a copy": (lambda t: {"v_cache": t.v.clone()}, "give the first part of K, k_cache[..., :512]"),
    "the end": (lambda t: {"v_cache": t.k[..., 64:]}, "first part of K, k_cache[..., :512]"),
    "all of K": (lambda t: {"v_cache": t.k}, "v_cache is (109, 1, 576) at 0x"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(change: Callable[[Latents], dict[str, Any]], message: str) -> None:
    """Before anything is written."""
    inputs = latents([Piece((0, 1, 2), 0, 50), Piece((1,), 50, DYNAMIC)], 16, tails=(9,))
    names = ("q", "k_cache", "v_cache", "req_to_token", "rows", "seq_lens")
    out = torch.full((3, 16, V_DIM), float("nan"))
    arguments = dict(zip(names, inputs.inputs, strict=True)) | inputs.options | {"out": out}
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(**(arguments | change(inputs)), plan=inputs.plan())
    assert out.isnan().all()


def test_what_no_kernel_has_is_refused() -> None:
    for heads, draft_tokens in ((128, 1), (16, 5)):
        rows = heads * draft_tokens
        with pytest.raises(ValueError, match=f"end at 64 rows, fewer than the {rows} of one query"):
            target(heads, draft_tokens=draft_tokens)
    inputs = latents(shared(2, 9), 16).to(torch.bfloat16)
    q, k, v, *_ = inputs.inputs
    message = "V has head dim 256, K 576: must be alike on CUDA, or 512 and 576"
    with pytest.raises(ValueError, match=message):
        check_cuda(q, k, v[..., :256], torch.zeros_like(q), 1, {}, inputs.q_rope)
