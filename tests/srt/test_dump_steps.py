# SPDX-License-Identifier: Apache-2.0
"""What a server's tap writes of real steps, and what it makes of a bad file. No server."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import BackendBed
from kit.steps import OWN, QUERIES, SYSTEM, TARGET, TOOL, StepBed

import sglang_pat
from benchmarks.host.live import CACHES
from sglang_pat.config import PatConfig
from sglang_pat.dump import Batch, Dump, read_dump
from sglang_pat.planner import Plan, Planner
from sglang_pat.srt import dump
from sglang_pat.srt.dump import describe, make_tap

RUNNER = SimpleNamespace(device="cpu", kv_cache_dtype=torch.float32, page_size=1)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process's, as SGLang says them: the first."""
    found = SimpleNamespace(tp_rank=0, pp_rank=0, dp_rank=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: found)
    return found


def config(file: Path, batches: int = 1) -> PatConfig:
    return PatConfig(dump=str(file), dump_batches=batches)


class DumpBed(StepBed):
    """A step planner whose next ``batches`` plans are dumped."""

    def __init__(self, kind: str, folder: Path, *, batches: int = 1) -> None:
        super().__init__(kind)
        self.file = folder / "dump.jsonl"
        self.steps.tap = make_tap(RUNNER, config(self.file, batches), TARGET)
        assert self.steps.tap is not None

    def plan_anew(self) -> Plan:
        """The plan of the requests in another order."""
        self.reqs.reverse()
        self.batch, self.lens = self.cache.batch(self.reqs)
        return self.plan()

    def dumped(self) -> Dump:
        """The dump, which must be complete."""
        assert self.steps.tap is None
        wait_for_writers()
        return read_dump(self.file)


def wait_for_writers() -> None:
    """Until they have closed their files."""
    for thread in threading.enumerate():
        if thread.name == "sglang-pat-dump":
            thread.join(60)
            assert not thread.is_alive()


def same(batch: Batch, plan: Plan) -> bool:
    """Whether the planner makes ``plan`` of a dumped batch: its items, and what they read."""
    made = sglang_pat.plan(batch.paths, batch.seq_lens, TARGET)
    names = ("items", "item_segments", "segments", "members")
    return all(np.array_equal(getattr(made, name), getattr(plan, name)) for name in names)


@pytest.mark.parametrize("kind", CACHES)
def test_the_planner_makes_the_same_plan_of_a_dump(kind: str, tmp_path: Path) -> None:
    bed = DumpBed(kind, tmp_path, batches=3)
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
    assert len({id(plan) for plan in plans}) == 3
    for batch, plan in zip(found.batches, plans, strict=True):
        assert same(batch, plan) and plan.num_shared_items > 0
        assert batch.plan == {
            "items": plan.num_items,
            "shared_items": plan.num_shared_items,
            "kv_tokens_read": plan.kv_tokens_read(sum(batch.seq_lens)),
        }
    assert found.end == {"end": "complete", "left_out": {}}
    assert found.target == TARGET and found.header["kv_dtype"] == "float32"


@pytest.mark.parametrize("kind", CACHES)
def test_paths_and_lengths_are_those_of_the_requests(kind: str, tmp_path: Path) -> None:
    bed = DumpBed(kind, tmp_path)
    bed.plan()
    (batch,) = bed.dumped().batches
    assert batch.seq_lens == [SYSTEM + TOOL + OWN + 1] * QUERIES
    for query, path in enumerate(batch.paths):
        ends = [end for _, _, end in path]
        assert {SYSTEM, SYSTEM + TOOL} <= set(ends), "where prompts part"
        assert ends[-1] <= bed.reqs[query].kv.cache_protected_len
        assert path[0][1] == 0 and all(a[2] == b[1] for a, b in pairwise(path))
    nodes_at_tool = {path[[e for _, _, e in path].index(SYSTEM + TOOL)][0] for path in batch.paths}
    assert len(nodes_at_tool) == 2 and len({path[0][0] for path in batch.paths}) == 1


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
    bed = DumpBed("rust", tmp_path, batches=3)
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
    first, second, third = bed.dumped().batches
    assert first.paths[-2:] == [[], []] and first.seq_lens[-2:] == [7, 8] and same(first, plan)
    assert second.paths[0] == [] != second.paths[1] and same(second, without_lock)
    assert third.paths == [[]] * QUERIES and same(third, unreadable)


def test_what_cannot_be_read_costs_the_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = DumpBed("rust", tmp_path, batches=3)
    monkeypatch.setattr("sglang_pat.planner.Planner.last_paths", lambda *_: {}["no node"])
    bed.plan()
    bed.plan_anew()
    monkeypatch.undo()
    bed.plan_anew()
    found = bed.dumped()
    assert len(found.batches) == 1
    assert found.end["left_out"] == {"not readable: KeyError": 2}
    (warning,) = caplog.records
    assert "not in the dump: not readable: KeyError" in warning.getMessage()


@pytest.mark.parametrize("kind", CACHES)
def test_large_batches_are_left_out_and_counted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DumpBed(kind, tmp_path)
    first.plan()
    (batch,) = first.dumped().batches
    nodes = sum(map(len, batch.paths))
    first.file.unlink()
    bed = DumpBed(kind, tmp_path, batches=2)
    monkeypatch.setattr(dump, "MAX_NODES", nodes)
    bed.plan()
    monkeypatch.setattr(dump, "MAX_NODES", nodes - 1)
    bed.plan_anew()
    found = bed.dumped()
    assert len(found.batches) == 1
    assert found.end["left_out"] == {f"more than {nodes - 1:,} nodes": 1}


def test_nothing_is_read_for_a_dump_that_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = DumpBed("rust", tmp_path, batches=2)
    bed.plan()
    bed.plan_anew()
    bed.dumped()
    before = bed.file.read_bytes()
    reads: list[None] = []
    monkeypatch.setattr(Planner, "last_paths", lambda _: reads.append(None))
    bed.plan_anew()
    assert not reads
    assert bed.file.read_bytes() == before


class Disk:
    """A file that takes lines when it may, or none. ``path``: where they go to."""

    def __init__(self, path: Path, *, full: bool = False) -> None:
        self.may_go_on, self._full = threading.Event(), full
        self._file = path.open("wb")

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: bytes) -> None:
        if self._full:
            raise OSError(28, "No space left on device")
        assert self.may_go_on.wait(60)
        self._file.write(line)

    def flush(self) -> None:
        self._file.flush()


def test_a_slow_disk_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "there")
    monkeypatch.setattr(dump.os, "fdopen", lambda *_: disk)
    bed = DumpBed("rust", tmp_path, batches=6)
    monkeypatch.undo()
    monkeypatch.setattr(dump, "MAX_WAITING", 2200)  # the header and a batch or two
    bed.plan()
    for _ in range(5):
        bed.plan_anew()
    assert bed.steps.tap is None
    disk.may_go_on.set()
    bed.file = tmp_path / "there"
    found = bed.dumped()
    assert 0 < len(found.batches) < 6
    assert found.end["left_out"] == {"the disk was too slow": 6 - len(found.batches)}


def test_a_full_disk_ends_the_dump_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path / "there", full=True)
    monkeypatch.setattr(dump.os, "fdopen", lambda *_: disk)
    bed = DumpBed("rust", tmp_path, batches=100)
    monkeypatch.undo()
    wait_for_writers()
    assert bed.plan().num_shared_items and bed.steps.tap is None
    (warning,) = caplog.records
    assert "No space left on device" in warning.getMessage()


@pytest.mark.parametrize(
    "there", ["a file", "a FIFO", "a link", "a dangling link", "no folder", "another's folder"]
)
def test_only_a_new_file_is_written(
    there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file, victim = folder / "dump.jsonl", tmp_path / "victim"
    if there == "a file":
        file.write_text("mine")
    elif there == "a FIFO":
        os.mkfifo(file)  # to open it would wait for a reader
    elif there in ("a link", "a dangling link"):
        file.symlink_to(victim)
        if there == "a link":
            victim.write_text("mine")
    elif there == "no folder":
        folder.rmdir()
    before = sorted((str(path), path.lstat()) for path in tmp_path.rglob("*"))
    if there == "another's folder":
        folder.chmod(0o555)
        with_rights = os.geteuid()
        if with_rights == 0:  # root may write anywhere
            os.seteuid(65534)
        assert make_tap(RUNNER, config(file), TARGET) is None
        os.seteuid(with_rights)
        assert not list(folder.iterdir())
    else:
        assert make_tap(RUNNER, config(file), TARGET) is None
        assert sorted((str(path), path.lstat()) for path in tmp_path.rglob("*")) == before
    (warning,) = caplog.records
    assert str(file) in warning.getMessage()


def test_the_first_rank_alone_writes_for_its_user_alone(
    tmp_path: Path, ranks: SimpleNamespace
) -> None:
    file = tmp_path / "dump.jsonl"
    assert make_tap(RUNNER, PatConfig(), TARGET) is None
    for name in ("tp_rank", "pp_rank", "dp_rank"):
        setattr(ranks, name, 1)
        assert make_tap(RUNNER, config(file), TARGET) is None
        setattr(ranks, name, 0)
    assert not file.exists()
    tap = make_tap(RUNNER, config(file), TARGET)
    assert tap is not None and file.stat().st_mode & 0o777 == 0o600
    tap._lines.finish(b"")  # and so its thread


def test_a_backend_has_no_tap_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BackendBed(monkeypatch).backend._steps.tap is None


def test_a_header_names_the_server_and_no_text() -> None:
    header = describe(RUNNER, PatConfig(), TARGET)
    assert header["target"] == asdict(TARGET)
    assert (header["device"], header["page_size"], header["draft_tokens"]) == ("cpu", 1, 1)
    assert set(header["versions"]) == {"sglang-pat", "sglang", "torch"}
