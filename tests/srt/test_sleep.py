# SPDX-License-Identifier: Apache-2.0
"""The executor of a server: how large it is made, and that what it holds on a GPU is allocated to
sleep with the K/V pool and is as new after the wake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat.capacity import MB
from sglang_pat.config import PatConfig
from sglang_pat.ops import Executor
from sglang_pat.planner import plan
from sglang_pat.target import Target
from sglang_pat.workspace import Workspace

pytest.importorskip("sglang", reason="the memory saver is SGLang's")

from kit.runner import LATENTS, make_runner
from sglang.srt import runtime_context, utils
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_pat.srt import factory, hook
from sglang_pat.srt.factory import make_executor

LOST = 0x5A  # what stands in memory that came back


class FakeWorkspace(Workspace):
    """On the CPU, without the kernels: ``copied`` are the plans that it was loaded with."""

    def __init__(
        self, target: Target, *_: Any, list_tokens: int, region: Any, launch: str, **__: Any
    ) -> None:
        self.device = torch.device("cpu")
        self.given_tokens, self.given_launch = list_tokens, launch
        with region():
            names = ("plan", "queue", "row_masks", "list")
            self._buffers = {name: torch.full((64,), LOST, dtype=torch.uint8) for name in names}
        self.copied: list[Any] = []
        self.plan = None

    def load(self, plan: Any, **_: Any) -> bool:
        self.copied += [] if plan is self.plan else [plan]
        self.plan = plan
        return True

    def check_rows(self, *_: Any) -> None:
        pass

    snapshot = check_rows

    def contents(self) -> dict[str, set[int]]:
        return {name: set(buffer.tolist()) for name, buffer in self._buffers.items()}


class Server:
    """Makes executors for a model runner, on a GPU that is not there, and wakes up.
    ``tags``: of SGLang's memory saver, of each region that was entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decode = SimpleNamespace(backend="full", bs=[1, 2, 4, 8, 16], max_bs=16)
        graphs = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=self))
        parallel = SimpleNamespace(attn_tp_size=1)
        properties = SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=2**37,
            memory_clock_rate=3_201_000, memory_bus_width=6144, clock_rate=1_980_000,
        )  # fmt: skip
        manager = weight_updater.SchedulerWeightUpdaterManager
        hooked = _wrap_fn(manager.resume_memory_occupation, hook.after_resume, HookType.AFTER)
        for where, name, value in (
            (runtime_context, "get_exec", lambda: graphs),
            (runtime_context, "get_parallel", lambda: parallel),
            (utils, "get_cuda_graph_max_batch_size", lambda size: size),
            (torch.cuda, "get_device_properties", lambda _: properties),
            (torch.cuda, "device", lambda _: nullcontext()),
            (torch.cuda, "synchronize", lambda _: None),
            (torch.distributed, "barrier", lambda _: None),
            (factory, "Workspace", FakeWorkspace),
            (hook, "sleepers", type(hook.sleepers)()),  # none of other tests
            # SGLang's resume of a scheduler, hooked as the registry hooks it.
            (manager, "resume_memory_occupation", hooked),
            (weight_updater, "_import_static_state", lambda *_: None),
        ):
            monkeypatch.setattr(where, name, value)
        self.tags: list[str] = []
        self.enabled = True  # SGLang's memory saver
        self.model: dict[str, Any] = {}  # changes to the model's configuration
        self.table: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(65, 4100))

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self.tags.append(tag)
        yield

    def executor(self, requests: int = 64, **options: Any) -> Executor:
        heads = {"get_num_attention_heads": lambda _: 32, "get_num_kv_heads": lambda _: 8}
        runner = make_runner(
            [],
            config=heads | {"head_dim": 128} | self.model,
            memory_saver_adapter=self,
            max_total_num_tokens=400_000,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table, size=requests),
        )
        return make_executor(runner, PatConfig(**options))

    def resume(self, tags: list[str] | None) -> None:
        """Wake up, in parts by ``tags``."""
        updater = SimpleNamespace(
            offload_tags={"kv_cache", "weights", "cuda_graph"},
            memory_saver_adapter=SimpleNamespace(resume=lambda _: None),
            scheduler=None,
            tp_cpu_group=None,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)),
            stashed_model_static_state=None,
            _assert_weight_cache_inactive=lambda _: None,
        )
        manager: Any = weight_updater.SchedulerWeightUpdaterManager
        manager.resume_memory_occupation(updater, SimpleNamespace(tags=tags))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights", "kv_cache"]])
def test_after_a_wake_a_plan_is_copied_again(server: Server, tags: list[str] | None) -> None:
    """Not before the K/V pool's memory is back: trainers wake the weights first."""
    gone: Any = server.executor()._workspace
    held = server.executor()
    assert server.tags == [GPU_MEMORY_TYPE_KV_CACHE] * 2
    workspace: Any = held._workspace
    made = plan([None, None], [10, 20], held.target)
    for _ in range(2):
        held.load(made, 2)
        held.snapshot(torch.zeros(2), torch.zeros(2))
    assert workspace.copied == [made]
    server.resume([GPU_MEMORY_TYPE_WEIGHTS])
    assert set.union(*workspace.contents().values()) == {LOST}
    server.resume(tags)
    zeroed = {"plan", "queue", "row_masks"}
    assert workspace.contents() == {name: {0} for name in zeroed} | {"list": {LOST}}
    assert gone.contents()["plan"] == {LOST}  # nothing is kept for the wake
    q = torch.zeros(2, 32, 128)
    with pytest.raises(RuntimeError, match="before load"):
        held.decode(q, q, q, q, scale=1.0, logit_cap=0.0)
    held.load(made, 2)
    assert workspace.copied == [made, made]


def test_without_the_hook_a_server_that_may_sleep_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by an SGLang that does not have the function at all."""
    monkeypatch.undo()
    runner = SimpleNamespace(memory_saver_adapter=server)
    for target in (hook.RESUME, hook.RESUME + "_of_old", "sglang.srt.nothing.resume"):
        monkeypatch.setattr(hook, "RESUME", target)
        with pytest.raises(RuntimeError, match=r"hook after .*resume.* is not installed"):
            hook.kv_cache_region(runner)
    server.enabled = False
    hook.kv_cache_region(runner)


def test_the_server_gives_the_workspace_its_size(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    held = server.executor(64)
    workspace: Any = held._workspace
    assert held.target.max_queries == 64
    assert workspace.given_tokens > 400_000  # so that the pool's tokens fit, and tails
    # Every batch of the pool is served; the budget only bounds the partial results.
    cut = server.executor(4096, workspace_mb=128).target
    assert cut.max_queries == 4096 and cut.max_partials > 2048
    assert cut.max_partials * 32 * 128 * 4 < 128 * MB
    assert not caplog.messages  # within its budget
    assert server.executor(4096, workspace_mb=1).target.max_queries == 4096
    (warning,) = caplog.messages
    assert "more than SGLANG_PAT_WORKSPACE_MB=1" in warning
    server.model = LATENTS  # it is for the outputs of heads
    target = server.executor(4096, workspace_mb=256).target
    assert (target.num_kv_heads, target.head_dim, target.v_head_dim) == (1, 576, 512)
    assert target.max_partials * 32 * 512 * 4 < 256 * MB < target.max_partials * 32 * 576 * 4
    # There is none on a CPU.
    server.table = torch.zeros(5000, 100, dtype=torch.int32)
    assert server.executor(4096, workspace_mb=1).target.max_queries == 4096
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("policy", "launch"), [("default", "queue"), ("pat", "streams")])
def test_the_policy_of_the_server_reaches_the_target(
    server: Server, policy: str, launch: str
) -> None:
    for server.model, given in (({}, launch), (LATENTS, "queue")):
        held: Any = server.executor(policy=policy)
        assert (held.target.policy, held.target.partial_bytes) == (policy, 4)
        assert held._workspace.given_launch == given
