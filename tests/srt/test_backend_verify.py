# SPDX-License-Identifier: Apache-2.0
"""Verify steps of a server that speculates, as the backend plans and runs them. No server, no
GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import HEAD_DIM, HEADS, QUERIES, TARGET, BackendBed, make_layer
from kit.drafts import chains
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_pat.srt.backend import have_prefix
from sglang_pat.srt.step import MAX_SLACK, bounds_of

DRAFT_TOKENS = 3
VERIFY = ForwardMode.TARGET_VERIFY


class VerifyBed(BackendBed):
    """A test bed of a server that verifies ``DRAFT_TOKENS`` tokens of each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, target=replace(TARGET, draft_tokens=DRAFT_TOKENS))

    def extend(self, mode: ForwardMode = VERIFY) -> list[str]:
        """Run a layer of the forward that was prepared; what the base was asked."""
        self.backend.calls.clear()
        q = torch.zeros(QUERIES * DRAFT_TOKENS, HEADS * HEAD_DIM)
        batch = SimpleNamespace(forward_mode=mode)
        assert self.backend.forward_extend(q, None, None, make_layer(0), batch).shape == q.shape
        return list(self.backend.calls)

    def check_plan_holds(self, lens: torch.Tensor) -> None:
        assert self.plan.total_tokens(lens.data_ptr(), len(lens)) == int(lens.sum())


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> VerifyBed:
    return VerifyBed(monkeypatch)


@pytest.mark.parametrize("masked", [True, False])
def test_a_verify_step_is_planned_with_its_draft_tokens(bed: VerifyBed, masked: bool) -> None:
    """Where drafts may be a tree, with SGLang's masks; a single request too, as a CPU has no other
    attention for it."""
    bed.executor.has_draft_masks = masked
    bed.verify()
    assert bed.extend() == []
    (plan,) = bed.executor.plans
    assert (plan.num_queries, plan.draft_tokens) == (QUERIES, DRAFT_TOKENS)
    assert plan.num_shared_items == 1
    with_drafts = (bed.lens + DRAFT_TOKENS).tolist()
    assert bed.executor.snapshots == [with_drafts]
    masks = [[[1, 3, 7]] * QUERIES] if masked else []
    assert [found.tolist() for found in bed.executor.masks] == masks
    stats = bed.stats
    assert (stats.decode_steps, stats.verify_steps, stats.packed_steps) == (1, 1, 1)
    assert stats.kv_tokens_unpacked == sum(with_drafts) and not stats.fallbacks
    for _ in range(20):
        bed.lens += torch.tensor([1, 2, 3, 1])
        bed.verify()
    assert bed.plan is plan and stats.plans_made == 1
    bed.use(bed.all[:1])
    bed.verify()
    assert bed.plan.num_queries == 1


def test_which_masks_have_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the buffer for EAGLE's masks if there is one, else by SGLang's default for the device."""
    full, short = TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY
    eagle, ngram = SpecInputType.EAGLE_VERIFY, SpecInputType.NGRAM_VERIFY
    for kind, mode, default, expected in (
        (eagle, None, full, True),
        (eagle, None, short, False),
        (eagle, full, short, True),
        (eagle, short, full, False),
        (ngram, full, short, False),
        (ngram, short, full, True),
    ):
        monkeypatch.setattr(eagle_utils, "default_tree_mask_mode", lambda default=default: default)
        buffer = None if mode is None else SimpleNamespace(mode=mode)
        assert have_prefix(SimpleNamespace(spec_input_type=kind), buffer) is expected


def test_the_masks_of_each_replay_are_taken(bed: VerifyBed) -> None:
    """Those of a graph's rows, padding included, from the buffer that EAGLE's workers fill."""
    bed.backend.verify_mask = SimpleNamespace(mode=TreeMaskMode.FULL_MASK)
    trees, eagle = torch.tensor([[1, 2, 4]] * QUERIES), SpecInputType.EAGLE_VERIFY
    bed.verify("capture", trees, eagle, padding=2)
    assert bed.extend() == []
    bed.backend.token_to_kv_pool.device = "cuda"
    for masks in (trees, chains(QUERIES, DRAFT_TOKENS)):
        bed.verify("replay", masks, eagle, padding=2)
        found = bed.executor.masks[-1]
        assert len(found) == QUERIES + 2 and torch.equal(found[:QUERIES], masks)


def test_what_is_no_such_verify_step_is_the_bases(
    bed: VerifyBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one without memory for its masks served with those of the step before."""

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    bed.step("eager", mode=ForwardMode.EXTEND)
    assert bed.extend(ForwardMode.EXTEND) == ["layer"]
    assert bed.stats.base_forwards == {"extend": 1} and not bed.stats.fallbacks
    bed.step("eager")
    bed.verify(masks=chains(QUERIES, DRAFT_TOKENS + 1))
    counted = {"decode step on a server that speculates": 1, "other draft tokens": 1}
    assert bed.stats.fallbacks == counted
    with pytest.raises(RuntimeError, match="restart without --speculative-algorithm"):
        bed.extend()
    bed.backend.token_to_kv_pool.device = "cuda"
    assert bed.extend() == ["layer"]
    monkeypatch.setattr(bed.executor, "read_draft_masks", full)
    bed.verify()
    assert bed.extend() == ["layer"] and not bed.executor.plans
    assert bed.stats.fallbacks == counted | {"no memory for the slots": 1}


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ([(40, 45), (100, 106)], [43, 103], [45, 106]),
        ([(40, 42)], None, None),  # slots for less than the draft tokens
        ([(40, 128), (40, 46)], [43, 43], [46, 46]),  # of whole pages: for more than two steps add
    ],
)
def test_bounds_of_lengths(given: list[tuple[int, int]], least: Any, most: Any) -> None:
    """Of requests with so many tokens committed and slots for so many."""
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=a, kv_allocated_len=b))
        for a, b in given
    ]
    lengths = bounds_of(reqs, DRAFT_TOKENS)
    assert bounds_of(reqs, MAX_SLACK + 1) is None
    if lengths is None:
        assert least is None
    else:
        assert not lengths.are_known
        for count in (1, len(given)):
            first = lengths.first(count)
            assert (first.least.tolist(), first.most.tolist()) == (least[:count], most[:count])


@pytest.mark.parametrize("page", [1, 64])
def test_a_step_whose_lengths_the_host_does_not_know(bed: VerifyBed, page: int) -> None:
    """It is planned with bounds, and the plan holds for whatever was accepted. Without bounds, as
    slots are missing or unreadable, lengths are read from the device, and that is counted."""
    committed = bed.lens.clone()
    for _ in range(80):
        for req, least in zip(bed.reqs, committed.tolist(), strict=True):
            req.kv.kv_committed_len = least
            req.kv.kv_allocated_len = -(-(least + 2 * DRAFT_TOKENS) // page) * page
        bed.verify(on_host=False)
        for most in (DRAFT_TOKENS, 2 * DRAFT_TOKENS):
            bed.check_plan_holds(committed + most)
        committed += torch.tensor([1, 3, 2, 3])
    assert 1 < bed.stats.plans_made < 5 and not bed.stats.fallbacks
    for times, unknown in enumerate((1, None), start=1):
        for req in bed.reqs:
            req.kv.kv_committed_len, req.kv.kv_allocated_len = unknown, 2
        bed.verify(on_host=False)
        bed.check_plan_holds(bed.lens + DRAFT_TOKENS)
        assert bed.stats.fallbacks == {"lengths read from the GPU": times}
