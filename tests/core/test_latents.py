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
from kit import drafts, trees
from kit.cases import check, error, execute, random_trees
from kit.latents import HEADS, K_DIM, V_DIM, Latents, grown, latents, target
from kit.pieces import DYNAMIC, Piece, branched, forest, paths_of, prefix, shared
from kit.trees import Batch, batches, check_plan, content, packed_rows

from benchmarks.common.forests import Tree
from sglang_pat import _C, decode
from sglang_pat.capacity import ROOM, buffer_shapes
from sglang_pat.ops import Executor, check_cuda
from sglang_pat.planner import plan
from sglang_pat.target import CUTS, WITHOUT_BRANCHES, Target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OF_HEADS = pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 64])


def planned(pieces: list[Piece], inputs: Latents, cut: str, **overrides: Any) -> Any:
    """A plan of the planner for an H200, checked."""
    made_for = target(inputs.q.shape[1], draft_tokens=inputs.draft_tokens, cuts=(cut,), **overrides)
    paths, lens = paths_of(pieces, len(inputs.rows)), inputs.seq_lens.tolist()
    made = plan(paths, lens, made_for)
    check_plan(made, Batch(paths, lens), made_for, lens)
    return made


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [*((h, torch.float32) for h in (1, 8, 16, 20, 32, 64)), (8, torch.bfloat16), (20, torch.half)],
)
def test_plans_of_the_planner(heads: int, dtype: torch.dtype) -> None:
    """Of random forests and every cut, by turns with tails as long as the plan allows."""
    for seed, cut in enumerate(CUTS):
        rng = np.random.default_rng(100 * heads + seed)
        pieces = forest(rng, int(rng.integers(2, 9 if heads < 32 else 5)))
        inputs = latents(pieces, heads, seed=seed, logit_cap=(0.0, 5.0)[seed % 2]).to(dtype)
        made = planned(pieces, inputs, cut)
        partial = (torch.float32, torch.bfloat16)[seed // 2 % 2]
        bound = 2e-6 if dtype == partial == torch.float32 else 9e-3
        if (seed + heads // 4) % 2:
            inputs = grown(inputs, made.max_seq_lens.tolist(), seed)
        check(inputs, made, bound, partial=partial)


@pytest.mark.parametrize(("heads", "draft_tokens"), [(1, 64), (8, 8), (20, 3)])
def test_drafts(heads: int, draft_tokens: int) -> None:
    """That are a chain or a tree by turns, in items of their own and in branches."""
    for seed, cut in enumerate(CUTS):
        pieces = forest(np.random.default_rng(seed), 4)
        tails = tuple(draft_tokens + more for more in drafts.AROUND_BLOCKS)
        chain = latents(pieces, heads, draft_tokens=draft_tokens, seed=seed, tails=tails)
        inputs = random_trees(chain, seed) if (seed + heads) % 2 else chain
        check(inputs, planned(pieces, chain, cut))


@OF_HEADS
def test_branches_by_hand(heads: int) -> None:
    pieces = prefix(7, 200)
    inputs = latents(pieces, heads)
    check(replace(inputs, pieces=[pieces[0], *branched(pieces[1:], min(3, 64 // heads))]))
    check(replace(inputs, pieces=branched(pieces, min(4, 64 // heads))))


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


@pytest.mark.parametrize(("heads", "cut"), [(8, "half_end_branches"), (16, "end_branches")])
def test_ends_of_a_node_stand_with_the_tails(heads: int, cut: str) -> None:
    """So that there is one unit for each SM, all about as long, where tails of their own come on
    top of pieces. With row tiles of fewer rows there are no such branches."""
    tree = Tree((1, 128), (8192, 256))
    made = plan(tree.paths, tree.seq_lens, target(heads))
    assert content(made) == content(plan(tree.paths, tree.seq_lens, target(heads, cuts=(cut,))))
    branches = np.flatnonzero(made.items["kind"] == _C.BRANCH)
    assert made.num_items == 128 and len(branches) == 32
    tokens = [sum(r.length for r in trees.ranges_of(made, i, tree.seq_lens)) for i in range(128)]
    assert max(tokens) < 1.08 * sum(tokens) / 128
    for made_for in (trees.target(num_q_heads=16), trees.target(num_q_heads=64, num_kv_heads=4)):
        same = replace(made_for, cuts=WITHOUT_BRANCHES)
        ends = replace(made_for, cuts=(*WITHOUT_BRANCHES, cut))
        one, other = (plan(tree.paths, tree.seq_lens, each) for each in (same, ends))
        assert content(one) == content(other)


def test_what_a_target_says_of_a_token() -> None:
    """Of latents K alone is kept, and partials have the dim of V; other head dims that differ have
    K and V."""
    made_for = target(16)
    assert made_for.token_values == K_DIM and made_for.kv_tiles == (64,)
    room = {name: getattr(made_for, name) for name in ROOM}
    shape, _ = buffer_shapes(16, made_for.v_head_dim, 1, torch.float32, room)["partials"]
    assert shape == (1 << 18, 16, V_DIM)
    assert trees.target(head_dim=192, v_head_dim=128).token_values == 320


def test_the_executor_of_a_server() -> None:
    inputs = latents(shared(4, 150), 16).to(torch.bfloat16)
    made_for = Target.cpu(threads=2, num_q_heads=16, max_queries=4, **HEADS)
    made = plan(paths_of(shared(4, 150), 4), inputs.seq_lens.tolist(), made_for)
    executor = Executor(made_for, inputs.table)
    executor.load(made, 4)
    executor.snapshot(inputs.rows, inputs.seq_lens)
    out = torch.empty(4, 16, V_DIM, dtype=torch.bfloat16)
    executor.decode(inputs.q, inputs.k, inputs.v, out, q_rope=inputs.q_rope, scale=inputs.scale)
    assert error(out, inputs.truth()[0]) < 9e-3


WRONG: dict[str, tuple[Callable[[Latents], dict[str, Any]], str]] = {
    "type": (lambda t: {"q_rope": [0]}, "q_rope is of type list, must be a torch.Tensor"),
    "rows": (lambda t: {"q_rope": t.q_rope[1:]}, "q_rope is (2, 16, 64) torch.float32 on cpu"),
    "heads": (lambda t: {"q_rope": t.q_rope[:, :8]}, "the rows and heads of q, (3, 16, 512)"),
    "none": (lambda t: {"q_rope": t.q_rope[..., :0]}, "q_rope is (3, 16, 0) torch.float32"),
    "dtype": (lambda t: {"q_rope": t.q_rope.half()}, "q_rope is (3, 16, 64) torch.float16 on cpu"),
    "device": (lambda t: {"q_rope": t.q_rope.to("meta")}, "torch.float32 on meta, must have"),
    "strides": (lambda t: {"q_rope": t.q_rope.mT.contiguous().mT}, "the last must be 1"),
    "dims": (lambda t: {"q_rope": t.q_rope[..., :32]}, "k_cache has head dim 576, q has 544"),
    "a copy": (lambda t: {"v_cache": t.v.clone()}, "give the first part of K, k_cache[..., :512]"),
    "the end": (lambda t: {"v_cache": t.k[..., 64:]}, "first part of K, k_cache[..., :512]"),
    "all of K": (lambda t: {"v_cache": t.k}, "v_cache is (109, 1, 576) at 0x"),
    "whole q": (lambda t: {"q": t.whole_q}, "give the first part of K, k_cache[..., :576]"),
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
