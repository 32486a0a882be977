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
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode, RequestHandles
from sglang.srt.plugins import load_plugins

from benchmarks.host import step as benchmark
from benchmarks.host.live import CACHES, LiveCache
from sglang_pat import doctor
from sglang_pat.srt import hook, launch
from sglang_pat.srt.radix import RECHECK_STEPS
from sglang_pat.srt.step import known

PATCH = Path(__file__).parents[3] / "patches" / "0.5.23-pat.patch"
FILES = sorted(set(re.findall(r"^\+\+\+ b/(\S+)\.py$", PATCH.read_text(), re.MULTILINE)))
TOOLS = ("one_batch", "offline_throughput", "one_batch_server")


class Stop(Exception):
    """Ends a program where its plugins would be loaded."""


def stop() -> None:
    raise Stop


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of Ray as SGLang's actor is defined with, whether Ray is installed or not."""
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, MagicMock(remote=lambda cls: cls))


@pytest.mark.parametrize("path", FILES)
def test_patched_modules_import(path: str, ray: None) -> None:
    module = import_module(path.replace("/", "."))
    assert not Path(str(module.__file__)).is_symlink()


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


def test_a_replays_view_names_the_requests_of_its_forward() -> None:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    forward = MagicMock(seq_lens_sum=10, lora_ids=None)
    names = ("bs", "raw_bs", "num_tokens", "seq_len_fill_value")
    view = build_replay_fb_view(
        forward_batch=forward,
        buffers=MagicMock(),
        capture_forward_mode=ForwardMode.DECODE,
        is_encoder_decoder=False,
        global_num_tokens_cpu=None,
        **dict.fromkeys(names, 1),
    )
    assert view.request_handles is forward.request_handles


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
def test_the_version_grows_when_an_anchor_moves(kind: str) -> None:
    cache = LiveCache(kind, slots=1000, rows=4, context=64)
    versions = [cache.tree.anchor_version]
    first = cache.admit([1, 2, 3, 4])
    versions.append(cache.tree.anchor_version)
    node, length = first.lock.node, first.kv.cache_protected_len
    key = RadixKey(first.full_untruncated_fill_ids[:2], None)
    cache.tree.match_prefix(MatchPrefixParams(key=key))  # splits the first request's node
    assert (first.lock.node, first.kv.cache_protected_len) == (node, length)
    assert cache.tree.anchor_version == versions[-1]
    cache.admit([1, 2, 9])
    versions.append(cache.tree.anchor_version)
    cache.tree.reset()
    versions.append(cache.tree.anchor_version)
    assert versions == sorted(set(versions))


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
    assert step() is plan  # read, and found as it was
    assert len(reads) == 2
    assert step() is plan
    assert len(reads) == 2


def test_the_benchmark_times_plans_that_are_kept_and_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asserts itself which plans are which."""
    monkeypatch.setattr(benchmark, "REPEATS", 3)
    medians = benchmark.measure("rust", 4)
    assert medians.keys() >= {"new_us", "young_us", "kept_us", "handover_us"}


# 3. Plugins in Ray's actor and in the benchmarks


def test_rays_actor_loads_plugins_before_anything_else(
    ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.ray.scheduler_actor import SchedulerActor

    monkeypatch.setattr("sglang.srt.plugins.load_plugins", stop)
    with pytest.raises(Stop):
        SchedulerActor(*[None] * 6)


@pytest.mark.parametrize("tool", TOOLS)
def test_benchmarks_load_plugins_before_they_parse(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"sglang.benchmark.{tool}")
    monkeypatch.setattr(module, "load_plugins", stop)
    monkeypatch.setattr(sys, "argv", [tool, "--attention-backend", "no-such-backend"])
    with pytest.raises(Stop):
        module.cli_main()


def test_the_ranks_of_a_benchmark_load_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.benchmark import one_batch

    called: list[Any] = []
    monkeypatch.setattr(one_batch, "load_plugins", lambda: called.append("plugins"))
    one_batch._run_with_plugins(lambda *args: called.append(args), 1, 2)
    assert called == ["plugins", (1, 2)]
