# SPDX-License-Identifier: Apache-2.0
"""What a dump has of real steps: the paths that the planner had, and the plan that it made of them.
No server."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import BackendBed
from kit.steps import OWN, QUERIES, SYSTEM, TARGET, TOOL, StepBed

import sglang_pat
from sglang_pat.bench.host.live import CACHES
from sglang_pat.config import PatConfig
from sglang_pat.dump.records import Batch, Dump, read_dump
from sglang_pat.dump.request import DumpRequest, Mail
from sglang_pat.dump.watch import Watch
from sglang_pat.planner import Plan
from sglang_pat.srt import dump
from sglang_pat.srt.dump import Tap, describe, make_tap

RUNNER = SimpleNamespace(device="cpu", kv_cache_dtype=torch.float32, page_size=1)


class DumpBed(StepBed):
    """A step planner whose steps are dumped."""

    def __init__(self, kind: str, folder: Path, *, batches: int = 100, kept_every: int = 1) -> None:
        super().__init__(kind)
        self.mail = Mail(folder)
        self.watch = Watch(folder, describe(RUNNER, PatConfig(), TARGET))
        self.steps.tap = Tap(self.watch)
        self.request = DumpRequest.new(batches, kept_every, 600.0)
        self.mail.ask(self.request)
        self.watch.look()

    def dumped(self) -> Dump:
        self.mail.withdraw(self.request)
        self.watch.look()
        return read_dump(self.mail.answer(self.request.id))


def same(batch: Batch, plan: Plan) -> bool:
    """Whether the planner makes ``plan`` of a dumped batch: its items, and what they read."""
    made = sglang_pat.plan(batch.paths, batch.seq_lens, TARGET)
    names = ("items", "item_segments", "segments", "members")
    return all(np.array_equal(getattr(made, name), getattr(plan, name)) for name in names)


@pytest.mark.parametrize("kind", CACHES)
def test_the_planner_makes_the_same_plan_of_a_dump(kind: str, tmp_path: Path) -> None:
    bed = DumpBed(kind, tmp_path)
    plans = [bed.plan()]
    for _ in range(3):  # kept
        bed.lens += 1
        bed.plan()
    bed.reqs = [*bed.reqs[1:], bed.admit(1)]  # another batch
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    plans.append(bed.plan())
    bed.settle()
    bed.lens += 300  # outgrown, and made of the paths that were read before
    plans.append(bed.plan())
    found = bed.dumped()
    made = [batch for batch in found.batches if batch.made]
    assert len(made) == len(plans) and all(map(same, made, plans))
    assert len({id(plan) for plan in plans}) == 3
    for batch, plan in zip(made, plans, strict=True):
        assert batch.plan == {
            "items": plan.num_items,
            "shared_items": plan.num_shared_items,
            "kv_tokens_read": plan.kv_tokens_read(sum(batch.seq_lens)),
        }
        assert plan.num_shared_items > 0
    assert found.target == TARGET and found.header["kv_dtype"] == "float32"


@pytest.mark.parametrize("kind", CACHES)
def test_paths_and_lengths_are_those_of_the_requests(kind: str, tmp_path: Path) -> None:
    bed = DumpBed(kind, tmp_path)
    bed.plan()
    bed.lens += 1
    bed.plan()
    first, kept = bed.dumped().batches
    assert (first.made, first.step, kept.made, kept.step) == (True, 1, False, 2)
    assert first.seq_lens == [SYSTEM + TOOL + OWN + 1] * QUERIES
    assert kept.seq_lens == [length + 1 for length in first.seq_lens]
    assert kept.paths == first.paths
    for query, path in enumerate(first.paths):
        ends = [end for _, _, end in path]
        assert {SYSTEM, SYSTEM + TOOL} <= set(ends), "where prompts part"
        assert ends[-1] <= bed.reqs[query].kv.cache_protected_len
        assert path[0][1] == 0 and all(a[2] == b[1] for a, b in pairwise(path))
    nodes_at_tool = {path[[e for _, _, e in path].index(SYSTEM + TOOL)][0] for path in first.paths}
    assert len(nodes_at_tool) == 2 and len({path[0][0] for path in first.paths}) == 1


@pytest.mark.parametrize("kind", CACHES)
def test_paths_end_where_sharing_does(kind: str, tmp_path: Path) -> None:
    bed = DumpBed(kind, tmp_path)
    for req, limit in zip(bed.reqs, (0, 1, SYSTEM - 5, SYSTEM, SYSTEM + 7), strict=False):
        req.kv.cache_protected_len = limit
    plan = bed.plan()
    (batch,) = bed.dumped().batches
    ends = [path[-1][2] if path else 0 for path in batch.paths]
    assert ends[:5] == [0, 1, SYSTEM - 5, SYSTEM, SYSTEM + 7]
    assert same(batch, plan)


def test_rows_without_a_request_and_unreadable_ones_share_nothing(tmp_path: Path) -> None:
    bed = DumpBed("rust", tmp_path)
    bed.lens = torch.cat([bed.lens, torch.tensor([7, 8])])
    bed.batch = type(bed.batch)(
        bed.reqs, bed.cache.tree, torch.cat([bed.batch.rows, torch.zeros(2, dtype=torch.int64)])
    )
    plan = bed.plan()
    bed.reqs[0].lock = None
    bed.batch, bed.lens = bed.cache.batch(bed.reqs)
    without_lock = bed.plan()
    bed.reqs[1] = SimpleNamespace()
    bed.batch = type(bed.batch)(bed.reqs, bed.cache.tree, bed.batch.rows.clone())
    unreadable = bed.plan()
    first, second, third = (batch for batch in bed.dumped().batches if batch.made)
    assert first.paths[-2:] == [[], []] and first.seq_lens[-2:] == [7, 8] and same(first, plan)
    assert second.paths[0] == [] != second.paths[1] and same(second, without_lock)
    assert third.paths == [[]] * QUERIES and same(third, unreadable)


def test_what_cannot_be_read_costs_the_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = DumpBed("rust", tmp_path)
    monkeypatch.setattr(dump, "_paths", lambda *_: {}["no node"])
    bed.plan()
    monkeypatch.undo()
    bed.plan()
    found = bed.dumped()
    assert [batch.made for batch in found.batches] == [False]
    assert found.end["left_out"] == 1
    assert "a batch is not in the dump: KeyError('no node')" in caplog.text


def test_a_step_reads_one_attribute_while_no_dump_is_open(tmp_path: Path) -> None:
    bed = DumpBed("rust", tmp_path)
    bed.dumped()
    assert bed.watch.open is None

    class Forbidden:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    tap = bed.steps.tap
    assert tap is not None
    nothing: Any = Forbidden()
    tap.step(nothing, nothing, nothing, nothing, made=True)


def test_only_the_first_rank_has_a_tap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = SimpleNamespace(tp_rank=0, pp_rank=0, dp_rank=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: ranks)
    started: list[None] = []
    monkeypatch.setattr(Watch, "start", lambda self: started.append(None))
    folder = tmp_path / "a" / "b"
    config = PatConfig(dump=str(folder))
    assert make_tap(RUNNER, PatConfig(), TARGET) is None and not folder.exists()
    for name in ("tp_rank", "pp_rank", "dp_rank"):
        monkeypatch.setattr(ranks, name, 1)
        assert make_tap(RUNNER, config, TARGET) is None
        monkeypatch.setattr(ranks, name, 0)
    assert not started and not folder.exists()
    assert make_tap(RUNNER, config, TARGET) is not None
    assert len(started) == 1 and folder.stat().st_mode & 0o777 == 0o700
    file = tmp_path / "file"
    file.write_text("")
    assert make_tap(RUNNER, PatConfig(dump=str(file)), TARGET) is None
    assert "no dumps, as SGLANG_PAT_DUMP is of no use" in caplog.text


def test_a_backend_has_no_tap_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BackendBed(monkeypatch).backend._steps.tap is None


def test_a_header_names_the_server_and_no_text() -> None:
    header = describe(RUNNER, PatConfig(), TARGET)
    assert header["target"] == asdict(TARGET)
    assert (header["device"], header["page_size"], header["draft_tokens"]) == ("cpu", 1, 1)
    assert set(header["versions"]) == {"sglang-pat", "sglang", "torch"}
