# SPDX-License-Identifier: Apache-2.0
"""What SGLang with ``patches/0.5.23-pat.patch`` in it does, and that the plugin takes to it.

Not collected by itself: ``tests/srt/test_upstream.py`` runs it on a patched copy.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from kit.steps import StepBed, count_calls
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode, RequestHandles
from sglang.srt.plugins import load_plugins

from benchmarks.host.live import CACHES
from sglang_pat import doctor
from sglang_pat.srt import hook, launch
from sglang_pat.srt.radix import RECHECK_STEPS
from sglang_pat.srt.step import known

PATCH = Path(__file__).parents[3] / "patches" / "0.5.23-pat.patch"
FILES = sorted(set(re.findall(r"^\+\+\+ b/(\S+)\.py$", PATCH.read_text(), re.MULTILINE)))
# 1. The requests of a batch


def test_the_plugin_needs_no_hook_on_the_forward_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    assert hook.carries_requests()
    assert ATTENTION_BACKENDS["pat"] is launch.refuse_unresolved
    assert not hook.is_installed(hook.INIT_NEW, hook.after_init_new)
    assert launch.foreign_reasons() == []
    assert isinstance(hook.batches_of(SimpleNamespace()), hook.CarriedRequests)
    (finding,) = doctor._interface()
    assert finding.status == "ok" and finding.found == "as expected; batches carry their requests"
    monkeypatch.setattr(hook, "carries_requests", lambda: False)
    assert any("is not installed" in reason for reason in launch.foreign_reasons())


def forward_of(cache: Any, mode: ForwardMode = ForwardMode.DECODE, **more: Any) -> Any:
    handles = RequestHandles([], cache, torch.arange(2), mode, None)
    return SimpleNamespace(**{"forward_mode": mode, "request_handles": handles} | more)


def test_only_plain_decodes_have_requests_to_plan_for() -> None:
    batches = hook.CarriedRequests()
    cache = SimpleNamespace(anchor_version=None)
    mixed = forward_of(cache, ForwardMode.MIXED, forward_mode=ForwardMode.EXTEND)  # by the runner
    for other, mode in (
        (forward_of(cache, request_handles=None), ""),  # a warm-up
        (SimpleNamespace(forward_mode=ForwardMode.DECODE), ""),  # a view
        (forward_of(cache, actual_forward_mode=ForwardMode.IDLE), "DECODE"),
        (mixed, "MIXED"),
    ):
        assert batches.take(other) is None and batches.scheduled_mode == mode
    forward = forward_of(cache)
    live = batches.take(forward)
    assert live is not None
    assert live.reqs is forward.request_handles.reqs and live.tree_cache is cache
    assert live.rows is forward.request_handles.req_pool_indices_cpu
    assert live.others == 4 and not live.exact
    counted = batches.take(forward_of(SimpleNamespace(anchor_version=7)))
    assert counted is not None and counted.others == 7 and counted.exact


# 2. A version of the requests' anchors


@pytest.mark.parametrize("kind", CACHES)
def test_with_a_version_a_batch_is_read_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = StepBed(kind)
    batches = hook.CarriedRequests()
    reads = count_calls(monkeypatch, "read_handles")

    def step() -> Any:
        handles = RequestHandles(bed.reqs, bed.cache.tree, bed.batch.rows, ForwardMode.DECODE, None)
        forward = SimpleNamespace(forward_mode=ForwardMode.DECODE, request_handles=handles)
        live = batches.take(forward)
        assert live is not None
        return bed.steps.plan(live, known(bed.lens))

    plan = step()
    for _ in range(2 * RECHECK_STEPS):
        assert step() is plan
    assert len(reads) == 1
    bed.check(plan)
    bed.admit(0)  # the prefill of a request that is not in the batch yet
    for _ in range(2):
        assert step() is plan  # read, and found as it was
        assert len(reads) == 2


# 3. Plugins in Ray's actor and in the benchmarks


class Stop(Exception):
    """Ends a program where its plugins would be loaded."""


def stop() -> None:
    raise Stop


def test_plugins_are_loaded_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much of Ray as SGLang's actor is defined with, whether Ray is installed or not."""
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, MagicMock(remote=lambda cls: cls))
    for path in FILES:
        module = import_module(path.replace("/", "."))
        assert not Path(str(module.__file__)).is_symlink()
    actor = import_module("sglang.srt.ray.scheduler_actor").SchedulerActor
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", stop)
    with pytest.raises(Stop):
        actor(*[None] * 6)
    for tool in ("one_batch", "offline_throughput", "one_batch_server"):
        module = import_module(f"sglang.benchmark.{tool}")
        monkeypatch.setattr(module, "load_plugins", stop)
        monkeypatch.setattr(sys, "argv", [tool, "--attention-backend", "no-such-backend"])
        with pytest.raises(Stop):
            module.cli_main()
    ranks = import_module("sglang.benchmark.one_batch")  # each of which is a process
    with pytest.raises(Stop):
        ranks._run_with_plugins(print, 1, 2)
