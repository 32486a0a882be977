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
from kit.drafts import chains, custom_mask
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_pat.srt.backend import PatVerifyMixin, have_prefix
from sglang_pat.srt.step import MAX_SLACK, bounds_of

DRAFT_TOKENS = 3
VERIFY = ForwardMode.TARGET_VERIFY


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    target = replace(TARGET, draft_tokens=DRAFT_TOKENS)
    return BackendBed(monkeypatch, mixin=PatVerifyMixin, target=target)


def verify(bed: BackendBed, draft_tokens: int = DRAFT_TOKENS, **options: Any) -> list[str]:
    """Announce a batch of so many draft tokens a request and prepare its forward."""
    spec_info = SimpleNamespace(
        draft_token_num=draft_tokens,
        custom_mask=custom_mask(chains(len(bed.lens), draft_tokens), bed.lens),
        spec_input_type=SpecInputType.NGRAM_VERIFY,
    )
    return bed.step(graph=False, mode=VERIFY, spec_info=spec_info, **options)


def layer(bed: BackendBed, mode: ForwardMode = VERIFY) -> list[str]:
    """Run a layer of the forward that was prepared; what the base was asked."""
    bed.backend.calls.clear()
    q = torch.zeros(QUERIES * DRAFT_TOKENS, HEADS * HEAD_DIM)
    batch = SimpleNamespace(forward_mode=mode)
    out = bed.backend.forward_extend(q, None, None, make_layer(0), batch)
    assert out.shape == q.shape
    return list(bed.backend.calls)


def test_a_verify_step_is_planned_with_its_draft_tokens(bed: BackendBed) -> None:
    verify(bed)
    assert layer(bed) == []
    (plan,) = bed.executor.plans
    assert (plan.num_queries, plan.draft_tokens) == (QUERIES, DRAFT_TOKENS)
    assert plan.num_shared_items == 1
    with_drafts = (bed.lens + DRAFT_TOKENS).tolist()
    assert bed.executor.lengths == [with_drafts]
    stats = bed.backend._stats
    assert (stats.decode_steps, stats.verify_steps, stats.packed_steps) == (1, 1, 1)
    assert stats.kv_tokens_unpacked == sum(with_drafts)
    assert not bed.fallbacks


def test_masks_of_a_step_are_sglangs(bed: BackendBed) -> None:
    verify(bed)
    assert [masks.tolist() for masks in bed.executor.masks] == [[[1, 3, 7]] * QUERIES]


@pytest.mark.parametrize("default", TreeMaskMode)
@pytest.mark.parametrize("mode", [None, *TreeMaskMode])
@pytest.mark.parametrize("kind", [SpecInputType.EAGLE_VERIFY, SpecInputType.NGRAM_VERIFY])
def test_which_masks_have_a_prefix(
    kind: SpecInputType,
    mode: TreeMaskMode | None,
    default: TreeMaskMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the buffer for EAGLE's masks if there is one, else by SGLang's default for the device."""
    monkeypatch.setattr(eagle_utils, "default_tree_mask_mode", lambda: default)
    buffer = None if mode is None else SimpleNamespace(mode=mode)
    own = mode is None or kind == SpecInputType.NGRAM_VERIFY
    found = have_prefix(SimpleNamespace(spec_input_type=kind), buffer)
    assert found == ((default if own else mode) == TreeMaskMode.FULL_MASK)


def test_a_step_without_memory_for_its_masks_is_the_bases(
    bed: BackendBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one with the masks of the step before."""
    bed.backend.token_to_kv_pool.device = "cuda"

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(bed.executor, "read_draft_masks", full)
    verify(bed)
    assert layer(bed) == ["extend layer"]
    assert bed.fallbacks == {"no memory for the slots": 1}


def test_chains_need_no_masks(bed: BackendBed) -> None:
    bed.executor.has_draft_masks = False
    verify(bed)
    assert bed.executor.plans and not bed.executor.masks


def test_the_masks_of_each_replay_are_taken(bed: BackendBed) -> None:
    """Those of a graph's rows, padding included, from the buffer that EAGLE's workers fill."""
    bed.backend.verify_mask = SimpleNamespace(mode=TreeMaskMode.FULL_MASK)
    given = (torch.tensor([[1, 2, 4]] * QUERIES), chains(QUERIES, DRAFT_TOKENS))
    for captures, masks in zip((True, False), given, strict=True):
        spec_info = SimpleNamespace(
            draft_token_num=DRAFT_TOKENS,
            custom_mask=custom_mask(masks, bed.lens),
            spec_input_type=SpecInputType.EAGLE_VERIFY,
        )
        if captures:
            bed.capture(2, mode=VERIFY, spec_info=spec_info)
            bed.executor.masks.clear()
            bed.backend.token_to_kv_pool.device = "cuda"
        bed.step(mode=VERIFY, spec_info=spec_info, padding=2)
    for found, masks in zip(bed.executor.masks, given, strict=True):
        assert len(found) == QUERIES + 2 and torch.equal(found[:QUERIES], masks)


def test_a_plan_is_kept_while_tokens_are_accepted(bed: BackendBed) -> None:
    for _ in range(20):
        verify(bed)
        bed.lens += torch.tensor([1, 2, 3, 1])[:QUERIES]
    assert len({id(plan) for plan in bed.executor.plans}) == 1
    assert bed.backend._stats.plans_made == 1


def test_a_single_request_is_verified(bed: BackendBed) -> None:
    """A CPU has no other attention for it."""
    bed.reqs = bed.reqs[:1]
    bed.live, bed.lens = bed.cache.batch(bed.reqs)
    verify(bed)
    assert [plan.num_queries for plan in bed.executor.plans] == [1]


def test_prefills_are_the_bases(bed: BackendBed) -> None:
    bed.step(graph=False, mode=ForwardMode.EXTEND)
    assert layer(bed, ForwardMode.EXTEND) == ["extend layer"]
    assert bed.base_forwards == {"extend": 1} and not bed.fallbacks and not bed.executor.plans


def test_what_is_no_such_verify_step_is_counted(bed: BackendBed) -> None:
    bed.step(graph=False)
    verify(bed, draft_tokens=DRAFT_TOKENS + 1)
    assert bed.fallbacks == {
        "decode step on a server that speculates": 1,
        "other draft tokens": 1,
    }
    with pytest.raises(RuntimeError, match="restart without --speculative-algorithm"):
        layer(bed)
    bed.backend.token_to_kv_pool.device = "cuda"
    assert layer(bed) == ["extend layer"]


def requests_of(lengths: list[tuple[int, int]]) -> list[Any]:
    """Requests with so many tokens committed and slots for so many."""
    return [
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=least, kv_allocated_len=most))
        for least, most in lengths
    ]


def test_bounds_of_lengths() -> None:
    lengths = bounds_of(requests_of([(40, 48), (100, 106)]), DRAFT_TOKENS)
    assert lengths is not None and not lengths.are_known
    assert lengths.least.tolist() == [43, 103] and lengths.most.tolist() == [48, 106]
    assert lengths.first(1).least.tolist() == [43] and lengths.first(1).most.tolist() == [48]
    assert lengths.first(2) is lengths


@pytest.mark.parametrize("lengths", [[(40, 42)], [(40, 44), (40, 44 + MAX_SLACK)]])
def test_bounds_that_no_plan_is_made_with(lengths: list[tuple[int, int]]) -> None:
    """Slots for less than the draft tokens, or for many more."""
    assert bounds_of(requests_of(lengths), DRAFT_TOKENS) is None


def test_a_step_whose_lengths_the_host_does_not_know(bed: BackendBed) -> None:
    """It is planned with bounds, and the plan holds for whatever was accepted."""
    committed = bed.lens.clone()
    for _ in range(30):
        for req, least in zip(bed.reqs, committed.tolist(), strict=True):
            req.kv.kv_committed_len = least
            req.kv.kv_allocated_len = least + 2 * DRAFT_TOKENS
        verify(bed, on_host=False)
        for most in (DRAFT_TOKENS, 2 * DRAFT_TOKENS):
            holds(bed.executor.plans[-1], committed + most)
        committed += torch.tensor([1, 3, 2, 3])[: len(committed)]
    assert bed.backend._stats.plans_made == 1 and not bed.fallbacks


def test_lengths_whose_bounds_are_far_apart_are_read_from_the_device(bed: BackendBed) -> None:
    """That costs a synchronisation, and is counted."""
    for req in bed.reqs:
        req.kv.kv_committed_len, req.kv.kv_allocated_len = 1, 2000
    verify(bed, on_host=False)
    holds(bed.executor.plans[-1], bed.lens + DRAFT_TOKENS)
    assert bed.fallbacks == {"lengths read from the GPU": 1}


def holds(plan: Any, lens: torch.Tensor) -> None:
    assert plan.total_tokens(lens.data_ptr(), len(lens)) == int(lens.sum())


def test_requests_that_cannot_be_read_cost_a_synchronisation(bed: BackendBed) -> None:
    for req in bed.reqs:
        req.kv.kv_committed_len = None
    verify(bed, on_host=False)
    holds(bed.executor.plans[-1], bed.lens + DRAFT_TOKENS)
    assert bed.fallbacks == {"lengths read from the GPU": 1}
