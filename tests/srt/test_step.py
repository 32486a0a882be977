# SPDX-License-Identifier: Apache-2.0
"""What the step planner makes of SGLang's own caches and requests: the plan of a step, when it is
kept, what is read for it, what it falls back to, and what is dumped of it. No server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.steps import (
    OWN,
    QUERIES,
    SYSTEM,
    TARGET,
    TOOL,
    StepBed,
    count_calls,
    flush,
    retract,
    shared_tokens,
)
from sglang.srt import runtime_context
from sglang.srt.managers import scheduler_pp_mixin
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

import sglang_pat
from benchmarks.host.live import CACHES, LiveCache
from sglang_pat import _C
from sglang_pat.config import PatConfig
from sglang_pat.dump import read_dump
from sglang_pat.planner import Plan
from sglang_pat.srt.dump import Tap, make_tap
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import RECHECK_STEPS, SETTLE_STEPS
from sglang_pat.srt.step import Lengths, StepPlanner, bounds_of, known, micro_batches
from sglang_pat.stats import Stats
from sglang_pat.target import Target

SHARED = SYSTEM + 2 * TOOL  # tokens of the bed's requests that several share


@pytest.fixture(params=CACHES)
def bed(request: pytest.FixtureRequest) -> StepBed:
    return StepBed(request.param)


def test_paths_of_the_live_tree_are_packed_and_a_plan_is_kept(bed: StepBed) -> None:
    plan = bed.plan()
    assert shared_tokens(plan) == SHARED
    bed.check(plan)
    assert bed.stats.kv_tokens_read == SHARED + QUERIES * (OWN + 1)
    assert bed.stats.kv_tokens_unpacked == QUERIES * (SYSTEM + TOOL + OWN + 1)
    for _ in range(3):
        bed.lens += 1
        assert bed.plan() is plan
    stats = bed.stats
    assert (stats.plans_made, stats.plans_reused, stats.packed_steps) == (1, 3, 4)
    assert not stats.fallbacks and not stats.private_requests


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
    assert second is not first and bed.stats.plans_made == 2
    assert second.kv_tokens_read(0) - first.kv_tokens_read(0) == TOOL * (what == "protected")


def test_a_settled_batch_of_other_padding_is_planned_anew_and_still_shares(bed: StepBed) -> None:
    """Data parallel attention without graphs pads to the ranks' most requests, in each step."""
    bed.settle()
    bed.lens = torch.cat([bed.lens, torch.zeros(3, dtype=torch.int64)])
    padded = bed.plan()
    assert padded.num_queries == QUERIES + 3 and shared_tokens(padded) == SHARED
    bed.lens = bed.lens[:QUERIES]
    assert shared_tokens(bed.plan()) == SHARED and not bed.stats.fallbacks


# What cannot be read or planned costs the sharing, not the server.


class ForeignCore:
    """A tree core of somebody else's, with its nodes as hidden as those of SGLang's."""

    @property
    def root_node(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("what", ["requests", "core", "cache"])
def test_what_cannot_be_read_costs_the_sharing_only(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = StepBed("rust")
    right = bed.batch
    if what == "requests":
        bed.batch = LiveBatch([object()] * QUERIES, bed.cache.tree, bed.batch.rows)
    elif what == "cache":
        bed.batch = replace(bed.batch, tree_cache=SimpleNamespace())
    with monkeypatch.context() as patch:
        if what == "core":
            patch.setattr(bed.cache.tree, "tree_core", ForeignCore())
        for _ in range(2):
            plan = bed.plan()
            assert plan.num_shared_items == 0
            if what == "core":
                bed.check(plan)
    if what == "cache":
        assert not bed.stats.fallbacks
        assert bed.stats.private_requests == {"unknown cache SimpleNamespace": QUERIES}
    else:
        assert bed.stats.fallbacks == {"requests not readable": 2}
    bed.batch = right
    assert shared_tokens(bed.plan()) == SHARED


# What is read. A batch that has not changed for more than ``SETTLE_STEPS`` decode steps is settled:
# it is not read again until it changes, a prefill runs, or ``RECHECK_STEPS`` steps have passed.


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
        bed.use(bed.reqs[1:])
    else:
        bed.batch = replace(bed.batch, others=1)
    second = bed.plan()
    assert (second is first) == (how == "prefill")
    assert shared_tokens(second) == SHARED
    for _ in range(RECHECK_STEPS):
        third = bed.plan()
    assert third.kv_tokens_read(0) > second.kv_tokens_read(0)


@pytest.mark.parametrize("settled", [True, False])
def test_a_plan_that_is_outgrown_keeps_its_paths(
    bed: StepBed, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, look_ups = count_calls(monkeypatch, "read_handles"), count_calls(monkeypatch, "plan")
    last = bed.settle() if settled else bed.plan()
    for _ in range(3):
        before = len(reads)
        bed.lens = torch.from_numpy(last.max_seq_lens + 1)
        plan = bed.plan()
        assert bed.steps.made and plan is not last and shared_tokens(plan) == SHARED
        assert plan.fits(bed.lens.data_ptr(), QUERIES)
        bed.check(plan)
        assert len(reads) == before + (not settled) and len(look_ups) == 1
        if not settled:  # a prefill came between
            bed.batch = replace(bed.batch, others=bed.batch.others + 1)
        last = bed.plan()


@pytest.mark.parametrize("page", [1, 64])
def test_a_plan_with_branches_is_kept_while_the_host_has_bounds(page: int) -> None:
    """Of verify steps of 4 draft tokens, 2 of which are accepted; slots come in whole pages."""
    queries, drafts = 64, 4
    cache = LiveCache("rust", slots=60_000, rows=queries, context=2048)
    reqs = [cache.admit([*range(1000), 2000 + i]) for i in range(queries)]
    batch, _ = cache.batch(reqs)
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    stats = Stats()
    steps = StepPlanner(Target.h200(max_queries=queries, draft_tokens=drafts, **heads), stats)
    for step in range(40):
        for req in reqs:
            req.kv.kv_committed_len = 1001 + 2 * step
            slots = req.kv.kv_committed_len + 2 * drafts
            req.kv.kv_allocated_len = -(-slots // page) * page
        bounds = bounds_of(reqs, drafts)
        assert bounds is not None
        plan = steps.plan(batch, bounds)
        assert plan is not None and (plan.items["kind"] == _C.BRANCH).any()
        assert plan.fits(bounds.most.data_ptr(), queries)
    assert 1 < stats.plans_made <= 3 and stats.plans_reused == 40 - stats.plans_made
    read, unpacked = stats.kv_tokens_read, stats.kv_tokens_unpacked
    assert 0 < read < unpacked / 3 and not stats.fallbacks


def test_a_plan_that_does_not_hold_for_its_own_lengths_is_not_run(bed: StepBed) -> None:
    """No server has such bounds: the base serves the step, and nothing of it is counted as ours."""
    assert bed.steps.plan(bed.batch, Lengths(bed.lens, bed.lens + 2000)) is None
    assert bed.stats.fallbacks == {"sharing not usable": 1} and not bed.stats.decode_steps
    assert shared_tokens(bed.plan()) == SHARED


def test_paths_are_read_again_only_after_a_failure(bed: StepBed) -> None:
    first = bed.settle()
    bed.steps.private(known(bed.lens))  # has a working memory of its own
    bed.lens = torch.from_numpy(first.max_seq_lens + 1)
    assert shared_tokens(bed.plan()) == SHARED
    grown, bed.lens = bed.lens, bed.lens - 250  # shorter than the paths
    assert shared_tokens(bed.plan()) == 0
    assert bed.stats.fallbacks == {"sharing not usable": 1}
    bed.lens = grown
    assert shared_tokens(bed.plan()) == SHARED


@pytest.mark.parametrize("pause", ["flush", "prompt logprobs"])
@pytest.mark.parametrize("age", [0, RECHECK_STEPS - 10])
def test_requests_that_a_pause_gave_the_same_rows_share_as_they_stand_then(
    bed: StepBed, pause: str, age: int
) -> None:
    """Also before their prefill is processed, when each has slots of its own, and also where some
    would have been read again anyway. SGLang gives no node handle twice, not even after a flush."""

    def nodes() -> set[int]:
        return {getattr(req.lock.node, "id", req.lock.node) for req in bed.reqs}

    bed.settle()
    for _ in range(age):
        bed.plan()
    before = nodes()
    rows, in_order = bed.batch.rows, sorted(bed.reqs, key=lambda req: req.kv.req_pool_idx)
    retract(bed.cache, in_order)
    if pause == "flush":
        flush(bed.cache)
    bed.cache.prefill(in_order, most=0)
    bed.use(bed.reqs)
    assert torch.equal(bed.batch.rows, rows)
    bed.check(bed.plan())
    bed.cache.process(bed.reqs)
    assert pause != "flush" or before.isdisjoint(nodes())
    bed.batch = replace(bed.batch, others=1)
    for _ in range(SETTLE_STEPS + 1):
        plan = bed.plan()
        bed.check(plan)
    assert shared_tokens(plan) == SHARED and not bed.stats.fallbacks


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
    bed.use([*bed.reqs[2:4], bed.admit(0), bed.admit(0)])
    plan = bed.plan()
    bed.check(plan)
    assert shared_tokens(plan) == SYSTEM + TOOL and not bed.stats.fallbacks


# Several micro-batches that take turns, as under pipeline parallelism.


class Turns:
    """The bed's requests in so many micro-batches."""

    def __init__(self, bed: StepBed, count: int) -> None:
        bed.steps = StepPlanner(TARGET, bed.stats, count)
        self.bed = bed
        self.batches = [bed.cache.batch(bed.reqs[i::count]) for i in range(count)]

    def plan(self, turn: int) -> Plan:
        batch, lens = self.batches[turn]
        plan = self.bed.steps.plan(batch, known(lens))
        assert plan is not None and plan.fits(lens.data_ptr(), len(lens))
        self.bed.check(plan, batch)
        return plan


@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_that_take_turns_keep_their_plans(
    bed: StepBed, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count_calls(monkeypatch, "read_handles")
    turns = Turns(bed, count)
    plans = [turns.plan(turn) for turn in range(count)]
    for step in range(RECHECK_STEPS - 2):
        assert all(turns.plan(turn) is plan for turn, plan in enumerate(plans))
        for _, lens in turns.batches:
            lens += step % 2
    # Also where some are left out, as while they prefill.
    assert all(turns.plan(turn) is plans[turn] for turn in reversed(range(count)))
    assert len({id(plan) for plan in plans}) == count == bed.stats.plans_made
    assert bed.stats.plans_reused == count * (RECHECK_STEPS - 1)
    # Each is read until it has settled, as one batch alone would be.
    assert len(reads) == count * (SETTLE_STEPS + 1)


@pytest.mark.parametrize(
    ("pp_size", "depth", "expected"), [(1, 0, 1), (1, 2, 1), (2, 0, 2), (4, 3, 7)]
)
def test_there_are_as_many_micro_batches_as_sglangs_loop_for_pipeline_parallelism_has(
    pp_size: int, depth: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one stage SGLang runs another loop, and has one batch."""
    parallel = SimpleNamespace(pp_size=pp_size, pp_async_batch_depth=depth)
    for module in (runtime_context, scheduler_pp_mixin):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    assert micro_batches() == expected
    if pp_size > 1:
        spec = SimpleNamespace(is_none=lambda: True)
        loop = SimpleNamespace(spec_algorithm=spec, device="cpu", device_module=None)
        scheduler_pp_mixin.SchedulerPPMixin.init_pp_loop_state(loop)
        assert len(loop.mbs) == expected


# What a server's tap writes of real steps, and what it makes of a bad file.


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process's, as SGLang says them: the first."""
    found = SimpleNamespace(tp_rank=0, pp_rank=0, dp_rank=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: found)
    return found


def tap(file: Path) -> Tap | None:
    runner = SimpleNamespace(device="cpu", kv_cache_dtype=torch.float32, page_size=1)
    return make_tap(runner, PatConfig(dump=str(file)), TARGET)


@pytest.mark.usefixtures("ranks")
def test_the_planner_makes_the_same_plan_of_a_dump(bed: StepBed, tmp_path: Path) -> None:
    file = tmp_path / "dump.jsonl"
    bed.steps.tap = tap(file)
    assert bed.steps.tap is not None
    bed.steps.tap._to_come = 6
    plans = [bed.plan()]
    bed.lens += 1
    bed.plan()  # kept
    limits = [0, 1, SYSTEM - 5, SYSTEM, SYSTEM + 7]
    for req, limit in zip(bed.reqs, limits, strict=False):
        req.kv.cache_protected_len = limit
    plans.append(bed.plan())
    bed.use([*bed.reqs[1:], bed.admit(1)])
    plans.append(bed.plan())
    bed.settle()
    bed.lens += 300  # outgrown, and made of the paths that were read before
    plans.append(bed.plan())
    # Rows without a request, and then requests that cannot be read.
    rows = torch.cat([bed.batch.rows, torch.zeros(2, dtype=torch.int64)])
    bed.batch = replace(bed.batch, rows=rows)
    bed.lens = torch.cat([bed.lens, torch.tensor([7, 8])])
    plans.append(bed.plan())
    bed.batch = replace(bed.batch, reqs=[object()] * QUERIES, rows=rows.clone())
    plans.append(bed.plan())
    assert bed.steps.tap is None
    found = read_dump(file)
    for batch, plan in zip(found.batches, plans, strict=True):
        made = sglang_pat.plan(batch.paths, batch.seq_lens, TARGET)
        for name in ("items", "item_segments", "segments", "members"):
            assert np.array_equal(getattr(made, name), getattr(plan, name))
        assert batch.plan == {
            "items": plan.num_items,
            "shared_items": plan.num_shared_items,
            "kv_tokens_read": plan.kv_tokens_read(sum(batch.seq_lens)),
        }
    for line in map(json.loads, file.read_text().splitlines()[1:]):  # no text
        assert set(line) == {"paths", "seq_lens", "plan"}
        assert all(type(value) is int for path in line["paths"] for node in path for value in node)
    first, limited, _, _, padded, private = found.batches
    assert first.seq_lens == [SYSTEM + TOOL + OWN + 1] * QUERIES
    assert [path[-1][2] if path else 0 for path in limited.paths][:5] == limits
    assert padded.paths[-2:] == [[], []] and padded.seq_lens[-2:] == [7, 8]
    assert private.paths == [[]] * (QUERIES + 2)
    assert found.target == TARGET and found.header["kv_dtype"] == "float32"


@pytest.mark.usefixtures("ranks")
def test_a_full_disk_ends_the_dump_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bed, made = StepBed("rust"), tap(tmp_path / "dump.jsonl")
    assert made is not None
    made._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    bed.steps.tap = made
    assert bed.plan().num_shared_items and bed.steps.tap is None
    (warning,) = caplog.messages
    assert str(tmp_path) in warning and "No space left on device" in warning


def test_the_first_rank_alone_writes_for_its_user_alone(
    tmp_path: Path, ranks: SimpleNamespace
) -> None:
    file = tmp_path / "dump.jsonl"
    assert make_tap(SimpleNamespace(), PatConfig(), TARGET) is None  # nobody asked
    for name in ("tp_rank", "pp_rank", "dp_rank"):
        setattr(ranks, name, 1)
        assert tap(file) is None and not file.exists()
        setattr(ranks, name, 0)
    assert tap(file) is not None and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("there", ["a file", "a FIFO", "a dangling link", "no folder"])
def test_only_a_new_file_is_written(
    there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "dump.jsonl"
    if there == "a FIFO":
        os.mkfifo(file)  # to open it would wait for a reader
    elif there == "no folder":
        file = tmp_path / "folder" / "dump.jsonl"
    elif there == "a file":
        file.write_text("mine")
    else:
        file.symlink_to(tmp_path / "victim")
    before = sorted((str(path), path.lstat()) for path in tmp_path.rglob("*"))
    assert tap(file) is None
    assert sorted((str(path), path.lstat()) for path in tmp_path.rglob("*")) == before
    (warning,) = caplog.messages
    assert str(file) in warning
