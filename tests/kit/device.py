# SPDX-License-Identifier: Apache-2.0
"""Inputs of decode steps on a GPU, from plans of hand (``kit.cases``) and from radix paths."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.common.forests import Tree
from kit.cases import E4M3, Case, case, error
from kit.pieces import Piece
from kit.plans import COMMON_LAST, HandPlan, joint
from sglang_pat.ops import decode
from sglang_pat.target import Target
from sglang_pat.workspace import LAUNCHES, LIST_TOKENS, Workspace

POISON = 1e4
BF16, FP16 = torch.bfloat16, torch.float16
HEAD_DIMS = (64, 128, 256)
# Dtypes of q, and of K and V.
Dtypes = tuple[torch.dtype, torch.dtype]
ALL_DTYPES: tuple[Dtypes, ...] = ((BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3))
BOTH_KV: tuple[Dtypes, ...] = ((BF16, BF16), (BF16, E4M3))
of_all_dtypes = pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
of_both_kv = pytest.mark.parametrize("dtypes", BOTH_KV, ids=str)
of_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)
K_SCALE, V_SCALE = 0.37, 2.3
# Half of the distance between neighbouring numbers, relative: how far rounding goes.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, E4M3: 2.0**-4}
# Hopper adds up products of e4m3 with about 14 bits: a logit may be so far from the true one,
# relative to the greatest sum on the way to it.
SUMMING = 2.0**-11


def on_device(inputs: Case, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Case:
    """The case on the GPU, with strides wider than the tensors and NaN in between; K and V in
    e4m3 stay so, or become it by ``kv_dtype``, slots that no query owns NaN."""
    if kv_dtype == E4M3:
        inputs = inputs.to(dtype).to_e4m3(K_SCALE, V_SCALE)
        assert all(cache.float().isnan().any() for cache in (inputs.k, inputs.v))
    moved = {name: getattr(inputs, name).cuda() for name in ("table", "rows", "seq_lens")}
    for name in ("draft_masks", "sinks"):
        if (value := getattr(inputs, name)) is not None:
            moved[name] = value.cuda()
    dtypes = {"q": dtype} | {
        name: getattr(inputs, name).dtype if inputs.k.dtype == E4M3 else dtype for name in "kv"
    }
    wide = {name: widened(getattr(inputs, name).to(to)) for name, to in dtypes.items()}
    return replace(inputs, **moved, **wide)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU, made where the tensor is: of one on the host a copy is all that the GPU does."""
    rows, heads, dim = tensor.shape
    beside = 16 // tensor.element_size()  # rows begin at multiples of 16 bytes
    wide = tensor.new_full((rows, heads + 1, dim + beside), float("nan"))
    wide[:, 1:, :dim] = tensor
    return wide.cuda()[:, 1:, :dim]


def target_of(inputs: Case, **overrides: Any) -> Target:
    num_q_heads, num_kv_heads = inputs.heads
    values: dict[str, Any] = {
        "max_queries": max(1, len(inputs.rows)),
        "draft_tokens": inputs.draft_tokens,
    }
    return Target.h200(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=inputs.q.shape[2],
        **(values | overrides),
    )


def execute(
    inputs: Case, plan: Any = None, *, workspace: Workspace | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``decode`` on the case's plan or another, which a workspace gets loaded and snapshotted:
    what ``attend`` gives."""
    plan = plan or inputs.plan()
    if workspace is None:
        options["draft_masks"] = inputs.draft_masks
    else:
        if inputs.draft_masks is not None:
            workspace.set_draft_masks(inputs.draft_masks)
        workspace.load(plan)
        workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
    return attend(inputs, plan, workspace=workspace, **options)


def attend(inputs: Case, plan: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode`` by itself: the output, a view of a wider tensor that held poison before, and the
    LSE. With several draft tokens the output must be contiguous."""
    out = torch.full(inputs.q.shape, POISON, dtype=inputs.q.dtype, device="cuda")
    if inputs.draft_tokens == 1:
        out = widened(out)
    lse = torch.full(inputs.q.shape[:2], POISON, device="cuda")
    given = inputs.options | {"draft_masks": None} | options  # a workspace has masks of its own
    decode(*inputs.inputs, plan, **given, out=out, lse=lse)
    return out, lse


def multiplies_e4m3(plan: Any) -> bool:
    """Whether wgmma runs some of the plan's items, and with e4m3 in weights too if K and V are."""
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    return on_hopper and plan.num_wide_items + plan.num_heavy_items > 0


def plans_of(inputs: Case) -> list[HandPlan]:
    """The case's own plan by hand; the same as a joint one, if both halves of an SM could work on
    each item; and one with wide items, if any can be."""
    plan = inputs.plan()
    rows = inputs.heads[0] // inputs.heads[1] * inputs.draft_tokens * plan.items["num_queries"]
    plans = [plan]
    if plan.num_heavy_items == len(plan.items) > 0 and max(rows) <= 64:
        plans.append(joint(plan))
    wide = inputs.plan(wide=True)
    return plans + [wide] * bool(wide.num_wide_items)


def check(inputs: Case, plan: Any = None, summed: float = 0.0, **options: Any) -> torch.Tensor:
    """Execute a plan, or all of ``plans_of``, and compare with fp64 attention. Returns the output
    of the first. It has at most twice the error of attention computed by torch in the inputs'
    dtype, the LSE the rounding of sums in fp32.

    K and V in e4m3 are exact in fp16, and so is q, but for bf16 values below 6e-5; weights are
    rounded once, to fp16 or, for wgmma, to e4m3, and the output to its dtype, once more if partials
    have two bytes. The LSE has the errors of sums in fp32 or, for wgmma, of what it adds up with
    fewer bits. ``summed``: what the products of a logit may add up to where they cancel out."""
    truth, truth_lse = inputs.truth(torch.float64)
    empty = truth_lse.isneginf()
    e4m3 = inputs.k.dtype == E4M3
    of_dtype = 0.0 if e4m3 else error(inputs.truth(inputs.q.dtype)[0], truth)
    first = None
    for each in plans_of(inputs) if plan is None else [plan]:
        out, lse = execute(inputs, each, **options)
        few_bits = e4m3 and multiplies_e4m3(each)
        most = 2 * min(of_dtype, 0.02) + 1e-4
        if e4m3:
            roundings = 1 + (options.get("partial_dtype", torch.float32) != torch.float32)
            # Half of the distance is the most; of many numbers the mean of squares is half of that.
            most = ROUNDING[E4M3] / 2 if few_bits else ROUNDING[FP16]
            most += roundings * ROUNDING[inputs.q.dtype]
        found = error(out, truth)
        assert found <= most, f"{found} of {inputs.heads} heads, at most {most}"
        assert torch.equal(lse.isneginf(), empty) and not out[empty].any()
        difference = (lse - truth_lse).abs()[~empty]
        # Sums on the way to a logit that cancels out are larger, the more so in longer rows.
        greatest = truth_lse[~empty].abs() + summed + few_bits * max(4, inputs.q.shape[-1] / 32)
        assert torch.all(difference <= 1e-5 + (SUMMING if few_bits else 4e-6) * greatest)
        first = out if first is None else first
    assert first is not None
    return first


def same(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    """Whether two results are equal bit by bit."""
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def poisoned(inputs: Case, **options: Any) -> Workspace:
    """A workspace for the case with poison where no item may read before it is written: in the
    list, in row masks, in plan entries and in partials."""
    made = Workspace(target_of(inputs), inputs.table.shape[1], **options)
    poison = {"list": 2**31 - 1, "row_masks": -1, "plan": 0x7F}
    for name, value in (poison | dict.fromkeys(("partials", "partial_lse"), math.nan)).items():
        made._buffers[name].fill_(value)
    return made


def check_launches(inputs: Case, plan: Any) -> None:
    """Run a plan with each launch: right, the same bits from run to run and from launches that
    add up alike, and the queue left as it was found. CTAs of ``streams`` have one half each: they
    join no halves, a branch of a pair does not begin with its own tokens, and wide items run as
    heavy ones do."""
    results: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for launch in LAUNCHES:
        room = max(LIST_TOKENS, plan.list_tokens)  # else load() takes a list without poison
        workspace = poisoned(inputs, launch=launch, list_tokens=room)
        own_first = bool((plan.items["order"] == COMMON_LAST).any())
        alike = launch != "streams" or not (plan.joint or own_first or plan.num_wide_items)
        if alike not in results:
            check(inputs, plan, workspace=workspace)
        results[alike] += [execute(inputs, plan, workspace=workspace) for _ in range(6)]
        assert not workspace.queue.any()
    for first, *others in results.values():
        assert all(same(first, other) for other in others)


class Captured:
    """Snapshot and attention of a batch in a graph, as the workspace's plan has it."""

    def __init__(self, inputs: Case, workspace: Workspace) -> None:
        self.inputs, self.workspace = inputs, workspace
        self.run()  # as before any capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self.run()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Eagerly, into outputs that held poison, as the graph's do at each replay."""
        inputs, workspace = self.inputs, self.workspace
        workspace.snapshot(inputs.table, inputs.rows, inputs.seq_lens)
        return attend(inputs, workspace.plan, workspace=workspace)

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.graph.replay()
        return self.results


def pieces_of_tree(tree: Tree, seq_lens: list[int]) -> list[Piece]:
    """Its nodes, and the private tails up to ``seq_lens``."""
    nodes: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for query, path in enumerate(tree.paths):
        for node in path:
            nodes[node].append(query)
    pieces = [Piece(tuple(of), start, end - start) for (_, start, end), of in nodes.items()]
    starts = [path[-1][2] if path else 0 for path in tree.paths]
    return pieces + [Piece((i,), at, seq_lens[i] - at) for i, at in enumerate(starts)]


def case_of_tree(
    tree: Tree,
    heads: tuple[int, int],
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seq_lens: list[int] | None = None,
    seed: int = 0,
    draft_tokens: int = 1,
) -> Case:
    """Inputs of a batch by levels; ``seq_lens`` may cut or lengthen the private tails, which hold
    the draft tokens. Slots are shuffled, those that no token owns hold NaN."""
    lens = seq_lens or tree.seq_lens
    pieces = pieces_of_tree(tree, lens)
    small = case(pieces, (1, 1), 8, seed=seed, draft_tokens=draft_tokens)  # where tokens are
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def random(rows: int, num_heads: int) -> torch.Tensor:
        shape = (rows, num_heads, head_dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    unowned = small.k[:, 0, 0].isnan().nonzero().flatten().cuda()
    k, v = (random(len(small.k), heads[1]) for _ in range(2))
    k[unowned] = v[unowned] = float("nan")
    return replace(
        small,
        q=random(len(small.q), heads[0]),
        k=k,
        v=v,
        scale=head_dim**-0.5,
        **{name: getattr(small, name).cuda() for name in ("table", "rows", "seq_lens")},
    )
