# SPDX-License-Identifier: Apache-2.0
"""What a server's tap writes of real steps, and what it makes of a bad file. No server."""

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

from kit.steps import OWN, QUERIES, SYSTEM, TARGET, TOOL, StepBed

import sglang_pat
from benchmarks.host.live import CACHES
from sglang_pat.config import PatConfig
from sglang_pat.dump import read_dump
from sglang_pat.srt.dump import Tap, make_tap


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process's, as SGLang says them: the first."""
    found = SimpleNamespace(tp_rank=0, pp_rank=0, dp_rank=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: found)
    return found


def tap(file: Path) -> Tap | None:
    runner = SimpleNamespace(device="cpu", kv_cache_dtype=torch.float32, page_size=1)
    return make_tap(runner, PatConfig(dump=str(file)), TARGET)


@pytest.mark.parametrize("kind", CACHES)
def test_the_planner_makes_the_same_plan_of_a_dump(kind: str, tmp_path: Path) -> None:
    bed, file = StepBed(kind), tmp_path / "dump.jsonl"
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


@pytest.mark.parametrize("there", ["a file", "a FIFO", "a link", "a dangling link", "no folder"])
def test_only_a_new_file_is_written(
    there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, victim = tmp_path / "dump.jsonl", tmp_path / "victim"
    if there == "a FIFO":
        os.mkfifo(file)  # to open it would wait for a reader
    elif there == "no folder":
        file = tmp_path / "folder" / "dump.jsonl"
    elif there == "a file":
        file.write_text("mine")
    else:
        file.symlink_to(victim)
    if there == "a link":
        victim.write_text("mine")
    before = sorted((str(path), path.lstat()) for path in tmp_path.rglob("*"))
    assert tap(file) is None
    assert sorted((str(path), path.lstat()) for path in tmp_path.rglob("*")) == before
    (warning,) = caplog.messages
    assert str(file) in warning
