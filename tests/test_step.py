# SPDX-License-Identifier: Apache-2.0
"""What the step planner makes of SGLang's own caches and requests: the plan of a step, when it is
kept, what it falls back to, and check mode. No server."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.steps import OWN, QUERIES, SYSTEM, TARGET, TOOL, StepBed, shared_tokens, sharing_queries

from benchmarks.host.live import CACHES
from sglang_pat.slots import SlotMismatch
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.step import known


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> StepBed:
    return StepBed(request.param)


def test_paths_of_the_live_tree_are_packed(bed: StepBed) -> None:
    plan = bed.plan()
    assert shared_tokens(plan) == SYSTEM + 2 * TOOL
    bed.check(plan)
    private = QUERIES * (OWN + 1)
    assert bed.stats.kv_tokens_read == SYSTEM + 2 * TOOL + private
    assert bed.stats.kv_tokens_unpacked == QUERIES * (SYSTEM + TOOL + OWN + 1)
    assert (bed.stats.decode_steps, bed.stats.packed_steps) == (1, 1)
    assert not bed.stats.fallbacks and not bed.stats.private_requests


def test_a_plan_is_reused_while_tails_grow(bed: StepBed) -> None:
    first = bed.plan()
    for _ in range(3):
        bed.lens += 1
        assert bed.plan() is first
    assert (bed.stats.plans_made, bed.stats.plans_reused) == (1, 3)


def test_steady_steps_make_few_plans() -> None:
    bed = StepBed("rust", queries=64)
    for _ in range(256):
        bed.plan()
        bed.lens += 1
    assert bed.stats.plans_made <= 8
    assert bed.stats.plans_made + bed.stats.plans_reused == bed.stats.decode_steps == 256


@pytest.mark.parametrize("what", ["row", "node", "protected"])
def test_a_request_that_changes_makes_a_new_plan(bed: StepBed, what: str) -> None:
    first = bed.plan()
    req = bed.reqs[3]
    if what == "row":
        req.kv.req_pool_idx = bed.batch.rows[3] = bed.batch.rows.max() + 1
    elif what == "node":
        req.lock = bed.cache.tree.lock(bed.reqs[1].lock.node)
    else:
        req.kv.cache_protected_len -= OWN + TOOL
    second = bed.plan()
    assert second is not first
    assert bed.stats.plans_made == 2
    if what == "protected":
        assert 3 in sharing_queries(first, start=SYSTEM)
        assert 3 not in sharing_queries(second, start=SYSTEM)


def test_a_batch_of_the_same_shape_after_a_flush_makes_a_new_plan(bed: StepBed) -> None:
    """SGLang gives no node handle twice, so the plan of before the flush cannot be taken for one
    of the new batch."""
    first = bed.plan()
    nodes = [getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs]
    bed.cache.flush()
    bed.reqs = [bed.admit(i // 4) for i in range(QUERIES)]
    assert not set(nodes) & {getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs}
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    second = bed.plan()
    assert second is not first
    bed.check(second)


def test_released_requests_and_rows_beyond_them_are_private(bed: StepBed) -> None:
    bed.reqs[0].lock = None
    bed.reqs[1].kv.req_pool_idx = None
    bed.lens = torch.cat([bed.lens, torch.tensor([1, 1])])  # as padding and beams have it
    plan = bed.plan()
    assert sharing_queries(plan) == set(range(2, QUERIES))
    assert bed.stats.private_requests == {"no tree lock": 2, "row without a request": 2}
    bed.check(plan)


def test_a_node_that_is_gone_costs_the_sharing_only(
    bed: StepBed, caplog: pytest.LogCaptureFixture
) -> None:
    lock, gone = bed.reqs[2].lock, 1 << 40
    lock.node = SimpleNamespace(id=gone) if hasattr(lock.node, "id") else gone
    with caplog.at_level(logging.WARNING, logger="sglang_pat"):
        for protected in (5, 6):
            bed.reqs[0].kv.cache_protected_len = protected
            assert bed.plan().num_shared_items == 0
    assert bed.stats.fallbacks == {"sharing not usable": 2}
    assert len([r for r in caplog.records if "sharing not usable" in r.message]) == 1
    assert bed.stats.kv_tokens_read == bed.stats.kv_tokens_unpacked


def test_requests_that_cannot_be_read_cost_the_sharing_only(bed: StepBed) -> None:
    bed.batch = LiveBatch([object()] * QUERIES, bed.cache.tree, bed.batch.rows)
    assert bed.plan().num_shared_items == 0
    assert bed.stats.fallbacks == {"requests not readable": 1}


def test_a_core_that_cannot_be_looked_into_costs_the_sharing_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Foreign:
        """A tree core of somebody else's, with its nodes as hidden as those of SGLang's."""

        @property
        def root_node(self) -> None:
            raise NotImplementedError

    bed = StepBed("rust")
    with monkeypatch.context() as patch:
        patch.setattr(bed.cache.tree, "tree_core", Foreign())
        for _ in range(2):
            plan = bed.plan()
            bed.check(plan)
            assert plan.num_shared_items == 0
    assert bed.stats.fallbacks == {"requests not readable": 2}
    assert shared_tokens(bed.plan()) == SYSTEM + 2 * TOOL


def test_a_batch_beyond_the_target_is_left_to_the_base(bed: StepBed) -> None:
    many = TARGET.max_queries + 1
    lens = torch.ones(many, dtype=torch.int64)
    assert bed.steps.plan(bed.batch, known(lens)) is None
    assert bed.stats.fallbacks["batch not plannable"] == 1
    assert bed.stats.decode_steps == 0


def test_a_private_plan_is_kept_while_it_fits(bed: StepBed) -> None:
    lens = bed.lens.clone()
    first = bed.steps.private(known(lens))
    assert first.num_shared_items == 0
    assert bed.steps.private(known(lens + 1)) is first
    longer = lens + 10_000
    second = bed.steps.private(known(longer))
    assert second is not first and second.fits(longer.data_ptr(), len(longer))
    assert bed.steps.private(known(longer[:3])).num_queries == 3
    assert bed.stats.decode_steps == 0


def test_the_log_says_once_where_prefixes_are_looked_for(
    bed: StepBed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_pat")
    bed.plan()
    kind = bed.steps.view.kind
    bed.plan()
    bed.batch = replace(bed.batch, tree_cache=object())
    bed.plan()
    found, unknown = (text for text in caplog.messages if "looks for shared prefixes" in text)
    assert kind and found.endswith(f"in SGLang's radix cache ({kind})")
    assert unknown.endswith("nowhere: unknown cache object")


@pytest.mark.parametrize("token", [5, SYSTEM + 5, SYSTEM + TOOL + 5])
def test_check_mode_names_the_wrong_slot(bed: StepBed, token: int) -> None:
    plan = bed.plan()
    row = int(bed.batch.rows[3])
    right = int(bed.cache.table.req_to_token[row, token])
    bed.cache.table.req_to_token[row, token] = right + 1
    rid = bed.reqs[3].rid
    with pytest.raises(
        SlotMismatch, match=rf"{rid} .*slot {right + 1} at token {token}, .* slot {right}"
    ):
        bed.check(plan)
