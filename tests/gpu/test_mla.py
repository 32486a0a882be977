# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on the GPU (sm_90a) against attention by its definition: slots that
no query owns are NaN, as is what lies between the rows of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit import device
from kit.cases import random_trees
from kit.device import BF16, Captured, attend, execute, pieces_of_tree, same
from kit.kinds import KINDS, TAILS
from kit.latents import K_DIM, V_DIM, Latents, latents, target
from kit.pieces import DYNAMIC, Parts, Piece, branched, forest, shared

from benchmarks.common.forests import Tree
from sglang_pat.ops import decode
from sglang_pat.planner import Planner
from sglang_pat.workspace import Workspace

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels of MLA run on compute capability 9.0",
)

HEADS = (8, 16, 20, 32)
ITEM_ROWS = 1024  # packed rows of one item, at most
of_heads = pytest.mark.parametrize("heads", HEADS)
of_partials = pytest.mark.parametrize("partial", [torch.float32, BF16], ids=str)


def on_device(inputs: Latents) -> Latents:
    """On the GPU in bf16, with the strides of SGLang's tensors and NaN around the latents."""
    k = torch.full((len(inputs.k), 2, K_DIM + 64), float("nan"), dtype=BF16, device="cuda")
    k = k[:, :1, :K_DIM]
    k.copy_(inputs.k)
    num_rows, heads, _ = inputs.q.shape
    q = torch.empty((heads, num_rows, V_DIM), dtype=BF16, device="cuda").transpose(0, 1)
    q.copy_(inputs.q)
    rope = torch.full((num_rows, heads, 192), float("nan"), dtype=BF16, device="cuda")[..., 128:]
    assert inputs.q_rope is not None
    rope.copy_(inputs.q_rope)
    moved = {name: getattr(inputs, name).cuda() for name in ("table", "rows", "seq_lens")}
    if inputs.draft_masks is not None:
        moved["draft_masks"] = inputs.draft_masks.cuda()
    return replace(inputs, **moved, k=k, v=k[..., :V_DIM], q=q, q_rope=rope)


def workspace_for(inputs: Latents, plan: Any, **options: Any) -> Workspace:
    """With NaN in all partials."""
    made = Workspace(
        target(
            inputs.heads[0],
            draft_tokens=inputs.draft_tokens,
            max_queries=max(1, len(inputs.rows)),
            max_items=1 << 12,
            max_partials=max(256, plan.num_partials),
        ),
        inputs.table.shape[1],
        list_tokens=max(1, plan.list_tokens),
        draft_masks=inputs.draft_masks is not None,
        **options,
    )
    made.partials.fill_(float("nan"))
    made.partial_lse.fill_(float("nan"))
    return made


def check(inputs: Latents, plan: Any = None, **options: Any) -> None:
    """As ``device.check``, at least for a sum of 32; further runs give the same bits, and the queue
    is left as it was."""
    plan = plan or inputs.plan()
    workspace = workspace_for(inputs, plan, **options)
    out = device.check(inputs, plan, summed=32.0, workspace=workspace)
    one, other = (attend(inputs, plan, workspace=workspace) for _ in range(2))
    assert torch.equal(one[0], out) and same(one, other)
    assert not workspace.queue.any()


def with_parts(parts: Parts, heads: int, **options: Any) -> Latents:
    options.setdefault("tails", TAILS)
    return on_device(latents(parts, heads, **options))


@pytest.mark.parametrize("tokens", [1, 15, 63, 64, 65, 127, 128, 129, 193, 1000])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_lengths(queries: int, tokens: int) -> None:
    """One item around the tiles, of 16 to 64 rows: the first thing to run."""
    check(with_parts([Piece(tuple(range(queries)), 0, tokens)], 16))


@pytest.mark.parametrize(
    ("queries", "heads"),
    [
        (queries, heads)
        for heads in (*HEADS, 64)
        for queries in (1, 2, 3, 4, 5, 8, 9, 17)
        if queries * heads <= ITEM_ROWS
    ],
)
def test_numbers_of_packed_rows(queries: int, heads: int) -> None:
    """Around 64 rows and beyond, which the kernel runs in parts."""
    check(with_parts(shared(queries, 130), heads))


@of_partials
@of_heads
def test_random_forests(heads: int, partial: torch.dtype) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        parts = forest(rng, int(rng.integers(10, 40)))
        check(with_parts(parts, heads, seed=seed), partial_dtype=partial)


@of_heads
def test_branches(heads: int) -> None:
    most = 64 // heads
    for seed in range(3):
        parts = branched(forest(np.random.default_rng(seed), 40), most)
        check(with_parts(parts, heads, seed=seed))
    for tails in (TAILS, (0,), (1, 200)):
        check(with_parts(branched(shared(most, 70), most), heads, tails=tails))


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("heads", "draft_tokens"), [(8, 2), (8, 8), (16, 2), (16, 4), (20, 3)])
def test_draft_tokens(heads: int, draft_tokens: int, trees: bool) -> None:
    for seed in range(3):
        parts = shared(7, 150) if seed == 0 else forest(np.random.default_rng(seed), 12)
        tails = tuple(draft_tokens + more for more in (0, 1, 31, 62, 64, 130))
        made = latents(parts, heads, draft_tokens=draft_tokens, tails=tails, seed=seed)
        drafted: Any = random_trees(made, seed) if trees else made
        check(on_device(drafted))


@pytest.mark.parametrize("draft_tokens", [2, 4])
def test_draft_tokens_in_branches(draft_tokens: int) -> None:
    tails = (draft_tokens, draft_tokens + 1, draft_tokens + 70)
    parts = branched(forest(np.random.default_rng(1), 8), 64 // (8 * draft_tokens))
    check(with_parts(parts, 8, draft_tokens=draft_tokens, tails=tails))


@pytest.mark.parametrize("kind", ["turns", "heavy"])
def test_many_units(kind: str) -> None:
    """More units than SMs, so that rings go on from unit to unit and tickets are claimed."""
    parts = KINDS[kind](4, np.random.default_rng(0))
    check(with_parts(parts, 16, tails=(0, 1, 40, 65, 200, 700)))
    check(with_parts([Piece((query,), 0, DYNAMIC) for query in range(600)], 8))


@of_partials
@of_heads
def test_plans_of_the_planner(heads: int, partial: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    planned = target(heads, partial_bytes=partial.itemsize, max_queries=256)
    for spec in ("1,40_700,60", "2,6,24_200,90,30", "3_5000", "1,1_3000,9000"):
        tree = Tree.parse(spec)
        start = sum(tree.tokens[:-1])
        lens = (start + rng.integers(1, 900, tree.num_queries)).tolist()
        plan = Planner(planned).plan(tree.paths, lens)
        check(with_parts(pieces_of_tree(tree, lens), heads), plan, partial_dtype=partial)


def test_large_and_rising_logits() -> None:
    """References are raised in later tiles, and rows of queries that are not there ask for none."""
    inputs = with_parts([Piece((0, 1), 0, 700)], 16)
    rise = torch.linspace(0.1, 12.0, len(inputs.k), device="cuda", dtype=BF16)
    order = inputs.table[inputs.rows[0], :700].long()
    k = inputs.k.clone()
    k[order] *= rise[:700, None, None]
    check(replace(inputs, k=k, v=k[..., :V_DIM]))


def test_nan_stays_in_its_query() -> None:
    inputs = with_parts(shared(5, 200), 16, tails=(70,))
    plan = inputs.plan()
    workspace = workspace_for(inputs, plan)
    out, _ = execute(inputs, plan, workspace=workspace)
    k = inputs.k.clone()
    k[inputs.table[inputs.rows[2], 210].long()] = float("nan")
    other, _ = attend(replace(inputs, k=k, v=k[..., :V_DIM]), plan, workspace=workspace)
    assert other[2].isnan().all()
    mine = torch.arange(5, device="cuda") != 2
    assert torch.equal(out[mine], other[mine])


def test_a_graph_gives_what_eager_launches_give() -> None:
    inputs = with_parts(shared(9, 300), 16, tails=(3, 40))
    plan = inputs.plan()
    workspace = workspace_for(inputs, plan)
    want = execute(inputs, plan, workspace=workspace)
    captured = Captured(inputs, workspace)
    for _ in range(3):
        assert same(captured.replay(), want)


def test_refusals() -> None:
    inputs = with_parts(shared(2, 70), 16)
    plan = inputs.plan()
    workspace = workspace_for(inputs, plan)
    execute(inputs, plan, workspace=workspace)

    def refused(message: str, **changes: Any) -> None:
        options = {"scale": 0.1, "q_rope": inputs.q_rope, "workspace": workspace}
        with pytest.raises(ValueError, match=message):
            decode(*inputs.inputs, plan, **(options | changes))

    refused("cap", logit_cap=30.0)
    refused("scale", scale=-0.1)
    refused("sinks", sinks=torch.zeros(16, device="cuda"))
    halves = inputs.to(torch.float16)
    with pytest.raises(ValueError, match="q is not bfloat16"):
        attend(halves, plan, workspace=workspace)
