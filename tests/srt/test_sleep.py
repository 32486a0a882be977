# SPDX-License-Identifier: Apache-2.0
"""What is held on a GPU is allocated to sleep with the K/V pool and is as new after the wake."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat import executor
from sglang_pat.capacity import MB
from sglang_pat.config import PatConfig
from sglang_pat.executor import Executor
from sglang_pat.planner import plan
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

pytest.importorskip("sglang", reason="the memory saver is SGLang's")

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_pat.srt import hook
from sglang_pat.srt.factory import make_executor

HEADS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
LOST = 0x5A  # what stands in memory that came back


class FakeWorkspace(Workspace):
    """On the CPU, without the kernels: ``load`` notes what it copies."""

    def __init__(self, target: Target, max_context: int = 64, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.target, self.max_context = target, max_context
        shapes = {"plan": 256, "queue": 64, "row_masks": 32, "list": 64}
        self._buffers = {
            name: torch.full((size,), LOST, dtype=torch.uint8) for name, size in shapes.items()
        }
        self.copied: list[Any] = []
        self.reset()

    def load(self, plan: Any, **_: Any) -> bool:
        if plan is self.plan:
            return False
        self.copied.append(plan)
        self.plan = plan
        return True

    def lose(self) -> None:
        for buffer in self._buffers.values():
            buffer.fill_(LOST)

    def contents(self) -> dict[str, set[int]]:
        return {name: set(buffer.tolist()) for name, buffer in self._buffers.items()}


class Adapter:
    """SGLang's memory saver: notes what was allocated under which tag."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.tag = ""

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self.tag = tag
        yield
        self.tag = ""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sleepers of other tests, and no device to wait for."""
    monkeypatch.setattr(hook, "_sleepers", type(hook._sleepers)())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's resume of a scheduler, hooked as the registry hooks it."""
    manager = weight_updater.SchedulerWeightUpdaterManager
    hooked = _wrap_fn(manager.resume_memory_occupation, hook.after_resume, HookType.AFTER)
    monkeypatch.setattr(manager, "resume_memory_occupation", hooked)
    updater = SimpleNamespace(
        offload_tags={"kv_cache", "weights", "cuda_graph"},
        memory_saver_adapter=SimpleNamespace(resume=lambda _: None),
        scheduler=None,
        tp_cpu_group=None,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)),
        stashed_model_static_state=None,
        _assert_weight_cache_inactive=lambda _: None,
    )
    monkeypatch.setattr(weight_updater, "_import_static_state", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda _: None)
    return lambda tags: manager.resume_memory_occupation(updater, SimpleNamespace(tags=tags))


def executor_of(monkeypatch: pytest.MonkeyPatch) -> tuple[Executor, FakeWorkspace]:
    target = Target.cpu(threads=1, max_queries=4, **HEADS)
    made = Executor(target, PatConfig(), torch.zeros(5, 64, dtype=torch.int32))
    made._workspace = workspace = FakeWorkspace(target)
    hook.reset_on_wake(made)
    return made, workspace


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights", "kv_cache"]])
def test_after_a_wake_a_plan_is_copied_again(
    monkeypatch: pytest.MonkeyPatch, resume: Any, tags: list[str] | None
) -> None:
    held, workspace = executor_of(monkeypatch)
    made = plan([None, None], [10, 20], held.target)
    held.load(made, 2)
    held.load(made, 2)
    assert workspace.copied == [made]
    workspace.lose()
    resume(tags)
    zeroed = {"plan", "queue", "row_masks"}
    assert workspace.contents() == {name: {0} for name in zeroed} | {"list": {LOST}}
    q = torch.zeros(2, 4, 64)
    with pytest.raises(RuntimeError, match="before load"):
        held.decode(q, q, q, q, scale=1.0, logit_cap=0.0)
    held.load(made, 2)
    assert workspace.copied == [made, made]


def test_memory_that_is_not_back_yet_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, resume: Any
) -> None:
    """Trainers wake a server in parts: the weights first, to update them, then the K/V pool."""
    _held, workspace = executor_of(monkeypatch)
    workspace.lose()
    resume([GPU_MEMORY_TYPE_WEIGHTS])
    assert all(values == {LOST} for values in workspace.contents().values())
    resume([GPU_MEMORY_TYPE_KV_CACHE])
    assert workspace.contents()["plan"] == {0}


def test_what_is_gone_is_not_kept_for_the_wake(
    monkeypatch: pytest.MonkeyPatch, resume: Any
) -> None:
    held, workspace = executor_of(monkeypatch)
    del held
    gc.collect()
    workspace.lose()
    resume(None)
    assert workspace.contents()["plan"] == {LOST}


def test_without_the_hook_a_server_that_may_sleep_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by an SGLang that does not have the function at all."""
    for target in (hook.RESUME, hook.RESUME + "_of_old", "sglang.srt.nothing.resume"):
        monkeypatch.setattr(hook, "RESUME", target)
        with pytest.raises(RuntimeError, match=r"hook after .*resume.* is not installed"):
            hook.kv_cache_region(SimpleNamespace(memory_saver_adapter=Adapter()))
    hook.kv_cache_region(SimpleNamespace(memory_saver_adapter=Adapter(enabled=False)))


class Made:
    """``make_executor`` for a model runner of stubs, on a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt import runtime_context, utils

        self.decode = SimpleNamespace(backend="full", bs=[1, 2, 4, 8, 16], max_bs=16)
        graphs = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=self))
        monkeypatch.setattr(runtime_context, "get_exec", lambda: graphs)
        parallel = SimpleNamespace(attn_tp_size=1)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
        monkeypatch.setattr(utils, "get_cuda_graph_max_batch_size", lambda size: size)
        properties = SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=2**37,
            memory_clock_rate=3_201_000, memory_bus_width=6144, clock_rate=1_980_000,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(executor, "Workspace", self._workspace)
        self.adapter = Adapter()
        self.tags: list[str] = []
        self.list_tokens = 0  # of the workspace made last
        self.table = SimpleNamespace(device=torch.device("cuda", 0), shape=(65, 4100))

    def _workspace(
        self, target: Target, *_: Any, list_tokens: int, region: Any, **__: Any
    ) -> FakeWorkspace:
        with region():
            self.tags.append(self.adapter.tag)
        self.list_tokens = list_tokens
        return FakeWorkspace(target)

    def executor(self, requests: int, **options: Any) -> Executor:
        runner: Any = SimpleNamespace(
            memory_saver_adapter=self.adapter,
            kv_cache_dtype=torch.bfloat16,
            server_args=SimpleNamespace(speculative_algorithm=None),
            max_total_num_tokens=400_000,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table, size=requests),
            model_config=SimpleNamespace(
                num_attention_heads=32, head_dim=128, get_num_kv_heads=lambda _: 8
            ),
        )
        return make_executor(runner, PatConfig(**options))


def test_the_workspace_sleeps_with_the_pool(monkeypatch: pytest.MonkeyPatch, resume: Any) -> None:
    made = Made(monkeypatch)
    held = made.executor(64)
    assert made.tags == [GPU_MEMORY_TYPE_KV_CACHE] and made.adapter.tag == ""
    workspace: Any = held._workspace
    workspace.lose()
    resume(None)
    assert workspace.contents()["plan"] == {0}


def test_the_server_gives_the_workspace_its_size(
    monkeypatch: pytest.MonkeyPatch, resume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = Made(monkeypatch)

    def said() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "workspace" in record.message]

    held = made.executor(64)
    assert held.target.max_queries == 64 and held.target.max_partials == 8 * 64 + 2048
    assert said()[-1].message.endswith("for batches of up to 64 requests")
    assert made.list_tokens == 400_000 * 5 // 4 + 128 * 64
    # Every batch of the pool is served; the budget only bounds the partial results.
    cut = made.executor(4096, workspace_mb=128).target
    assert cut.max_queries == 4096
    assert 2048 < cut.max_partials < 8 * 4096 + 2048
    assert cut.max_partials * 32 * 128 * 4 < 128 * MB
    assert "workspace: 128 MB on the GPU" in said()[-1].message
    assert "raise" not in caplog.text.replace("is raised", "")  # within its budget
    assert made.executor(4096, workspace_mb=1).target.max_queries == 4096
    assert said()[-2].levelname == "WARNING"
    assert "more than SGLANG_PAT_WORKSPACE_MB=1" in said()[-2].message


def test_the_options_of_the_server_reach_the_target(
    monkeypatch: pytest.MonkeyPatch, resume: Any
) -> None:
    made = Made(monkeypatch)
    target = made.executor(64).target
    assert (target.policy, target.partial_bytes) == ("default", 4)
    target = made.executor(64, policy="pat", partial="bf16").target
    assert (target.policy, target.partial_bytes) == ("pat", 2)


def test_there_is_no_budget_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    made.table = torch.zeros(5000, 100, dtype=torch.int32)
    assert made.executor(4096, workspace_mb=1).target.max_queries == 4096
    assert made.tags == []
