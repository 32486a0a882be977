# SPDX-License-Identifier: Apache-2.0
"""What the step planner reads of SGLang's requests while the batch stays the same, and after that.
No server.

A batch that has not changed for more than ``SETTLE_STEPS`` decode steps is settled: its requests
are not read again until the batch changes, a prefill runs, or ``RECHECK_STEPS`` steps have passed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.steps import OWN, QUERIES, SYSTEM, TOOL, StepBed, count_calls, shared_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from benchmarks.host.live import CACHES
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS
from sglang_pat.srt.step import known


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> StepBed:
    return StepBed(request.param)


def test_a_settled_batch_is_not_read(bed: StepBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a prefill runs, the batch changes, or ``RECHECK_STEPS`` steps have passed."""
    reads = count_calls(monkeypatch, "read_handles")
    first = bed.settle()
    before = len(reads)
    bed.reqs[3].kv.cache_protected_len -= OWN + TOOL
    assert bed.plan() is first and len(reads) == before
    bed.batch = replace(bed.batch, others=1)  # a prefill
    bed.plan()
    assert len(reads) == before + 1
    bed.settle()
    before = len(reads)
    bed.batch = replace(bed.batch, reqs=bed.reqs[::-1], rows=bed.batch.rows.flip(0))
    second = bed.plan()
    assert second is not first and len(reads) == before + 1
    bed.settle()
    before = len(reads)
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert len(reads) == before + 1
    assert third is not second and third.kv_tokens_read(0) > first.kv_tokens_read(0)


@pytest.mark.parametrize("how", ["outgrown", "changed", "prefill"])
def test_a_change_of_a_settled_request_is_seen_when_all_are_read_again(
    bed: StepBed, how: str
) -> None:
    """And not before, not even when a new plan is made for other reasons."""
    bed.settle()
    first = bed.plan()
    bed.reqs[3].kv.cache_protected_len -= OWN + TOOL
    if how == "outgrown":
        bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    elif how == "changed":
        bed.batch, bed.lens = bed.cache.batch(bed.reqs[1:])
    else:
        bed.batch = replace(bed.batch, others=1)
    second = bed.plan()
    assert (second is first) == (how == "prefill")
    assert shared_tokens(second) == SYSTEM + 2 * TOOL
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert third.kv_tokens_read(0) > second.kv_tokens_read(0)


@pytest.mark.parametrize("settled", [True, False])
def test_a_plan_that_is_outgrown_keeps_its_paths(
    bed: StepBed, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, look_ups = count_calls(monkeypatch, "read_handles"), count_calls(monkeypatch, "plan")
    first = bed.settle() if settled else bed.plan()
    for _ in range(3):
        last = bed.plan()
        before = len(reads)
        bed.lens = torch.from_numpy(last.max_seq_lens + 1)
        second = bed.plan()
        assert bed.steps.made and second is not last
        assert shared_tokens(second) == shared_tokens(first) and second.fits(
            bed.lens.data_ptr(), QUERIES
        )
        bed.check(second)
        assert len(reads) == before + (not settled) and len(look_ups) == 1
        if not settled:  # a prefill came between
            bed.batch = replace(bed.batch, others=bed.batch.others + 1)
            bed.plan()


def test_paths_are_read_again_only_after_a_failure(
    bed: StepBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_ups = count_calls(monkeypatch, "plan")
    first = bed.settle()
    bed.steps.private(known(bed.lens))  # has a working memory of its own
    bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    assert shared_tokens(bed.plan()) == shared_tokens(first)
    assert len(look_ups) == 1
    grown, bed.lens = bed.lens, bed.lens - 250  # shorter than the paths
    assert shared_tokens(bed.plan()) == 0
    assert bed.stats.fallbacks == {"sharing not usable": 1}
    bed.lens = grown
    assert shared_tokens(bed.plan()) == shared_tokens(first)
    assert len(look_ups) == 2


def test_a_request_that_comes_shares_with_the_settled_at_once(bed: StepBed) -> None:
    """Also where it splits a node of theirs: their paths are not remembered."""
    text = bed.system + bed.tools[0] + bed.text(400)
    bed.reqs.append(bed.cache.admit(text))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    assert shared_tokens(bed.settle()) == SYSTEM + 2 * TOOL
    bed.reqs.append(bed.cache.admit(text[:-100] + bed.text(OWN)))
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    second = bed.plan()
    assert shared_tokens(second) == SYSTEM + 2 * TOOL + 300
    bed.check(second)


@pytest.mark.parametrize("pause", ["flush", "prompt logprobs"])
@pytest.mark.parametrize("age", [0, RECHECK_STEPS - 10])
def test_requests_that_a_pause_gave_the_same_rows_share_as_they_stand_then(
    bed: StepBed, pause: str, age: int
) -> None:
    """Also before their prefill is processed, when each has slots of its own, and also where some
    would have been read again anyway."""
    bed.settle()
    for _ in range(age):
        bed.plan()
    rows, in_order = bed.batch.rows, sorted(bed.reqs, key=lambda req: req.kv.req_pool_idx)
    bed.cache.retract(in_order)
    if pause == "flush":
        bed.cache.flush()
    bed.cache.prefill(in_order, most=0)
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    assert torch.equal(bed.batch.rows, rows)
    bed.check(bed.plan())
    bed.cache.process(bed.reqs)
    bed.batch = replace(bed.batch, others=1)
    for _ in range(SETTLE_STEPS + 1):
        plan = bed.plan()
        bed.check(plan)
    assert shared_tokens(plan) == SYSTEM + 2 * TOOL
    assert not bed.stats.fallbacks


@pytest.mark.parametrize("what", ["released", "gone"])
def test_a_settled_node_that_is_gone_costs_the_others_nothing(bed: StepBed, what: str) -> None:
    """Of the batch all is read anew, in the same step, if the tree does not know a node of it."""
    bed.settle()
    bed.plan()
    req = bed.reqs[3]
    lock, req.lock = req.lock, None
    if what == "gone":
        bed.cache.tree.unlock(lock)
        bed.cache.tree.evict(EvictParams(num_tokens=OWN))
    # Half of them are new: the tree is asked for the paths of all.
    bed.batch, bed.lens = bed.cache.batch([*bed.reqs[2:4], bed.admit(0), bed.admit(0)])
    plan = bed.plan()
    bed.check(plan)
    assert shared_tokens(plan) == SYSTEM + TOOL
    assert not bed.stats.fallbacks
