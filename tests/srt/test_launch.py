# SPDX-License-Identifier: Apache-2.0
"""What the launcher refuses before anything is loaded, and whom it leaves alone. No server."""

from __future__ import annotations

import inspect
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import make_pool, make_runner
from models.configs import write_config
from sglang.srt import platforms
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sglang_pat.srt import hook, launch, stock

DEEPSEEK = "DeepseekV2ForCausalLM"  # MLA
BY_COMMAND = "--model-path M --attention-backend pat"


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two hooks in their place, put there by SGLang itself, on a CPU that it serves."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    # So that they are taken away again.
    monkeypatch.setattr(ServerArgs, "resolve_once", ServerArgs.__dict__["resolve_once"])
    HookRegistry.register(launch.RESOLVE, launch.before_resolve, HookType.BEFORE)
    HookRegistry.register(launch.RESOLVE, launch.after_resolve, HookType.AFTER)
    HookRegistry.apply_hooks()
    monkeypatch.setattr(platforms, "_current_platform", CpuSRTPlatform())
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    # In this process no plugin is loaded.
    monkeypatch.setattr(hook, "carries_requests", lambda: True)
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        yield


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(
        architecture: str = "LlamaForCausalLM", command: str | None = BY_COMMAND, **fields: Any
    ) -> ServerArgs:
        values = {"device": "cpu", "attention_backend": "pat", "dtype": "float32"} | fields
        folder = write_config(tmp_path / architecture, architecture)
        args = ServerArgs(**{"model_path": str(folder)} | values)
        args._launch_command = command
        return args

    return make


PAT = "sglang_pat refuses to serve with --attention-backend pat: "
NO_GPU = (
    "no GPU was found and SGLANG_PLATFORM is not set: start the server with "
    "SGLANG_PLATFORM=pat_cpu, --device cpu and --attention-backend pat"
)


def test_what_is_served_passes_is_checked_once_and_never_hears_of_pat(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    args.resolve_once()
    monkeypatch.setenv("SGLANG_PAT_POLICY", "fast")  # a check would find it
    again = pickle.loads(pickle.dumps(args))  # as its other processes get it
    for each in (args, again):
        each.resolve_once()
        assert attention_backends_of(resolving_view(each)) == ("torch_native", "torch_native")
        assert stock.asks_for_pat(each)
    for path in ({}, {"model_path": "no/such/model"}):  # before the model is looked at
        with pytest.raises(SystemExit, match="SGLANG_PAT_POLICY=fast is not a known value"):
            arguments(**path).resolve_once()
    # Who does not ask for pat is left alone.
    monkeypatch.setattr(platforms, "_current_platform", SRTPlatform())
    arguments(attention_backend="torch_native", enable_pdmux=True).resolve_once()


def test_a_name_that_was_resolved_before_the_hooks_were_there_is_refused(arguments: Any) -> None:
    args = arguments()
    inspect.unwrap(ServerArgs.resolve_once)(args)
    said = r"the hook before .*ServerArgs.resolve_once is not installed: look for"
    for _ in range(2):  # nothing is added to what was resolved
        with pytest.raises(SystemExit, match=said):
            args.resolve_once()
    assert resolving_view(args).attention_backend == "pat"


def test_a_command_ends_with_one_line_for_each_reason_and_a_program_gets_an_exception(
    arguments: Any,
) -> None:
    for command, error in (
        (BY_COMMAND, SystemExit),
        (None, launch.LaunchRefused),
        ("Engine(model_path='M', attention_backend='pat')", launch.LaunchRefused),
    ):
        options = {"enable_pdmux": True, "kv_cache_dtype": "bf16"}
        with pytest.raises(error) as refused:
            arguments(DEEPSEEK, command=command, **options).resolve_once()
        named = ("uses MLA", "--kv-cache-dtype", "--enable-pdmux")
        for line, name in zip(str(refused.value).split("\n"), named, strict=True):
            assert line.startswith(PAT) and name in line


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_no_gpu_and_no_platform(
    device: str | None, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "_current_platform", SRTPlatform())
    with pytest.raises(SystemExit) as refused:
        arguments(device=device).resolve_once()
    assert str(refused.value) == PAT + NO_GPU


def test_when_the_backend_is_made_all_reasons_are_given_at_once(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But of a foreign interface nothing else is read."""
    args = {"enable_pdmux": True, "device": "xpu"}
    runner = make_runner([], args=args, token_to_kv_pool=make_pool(1))
    with pytest.raises(RuntimeError) as refusal:
        launch.refuse_unsafe(runner)
    first, device, mode = str(refusal.value).split("\n  - ")
    assert f"{first} " == PAT and "on cpu, cuda, not on 'xpu'" in device
    assert mode.startswith("--enable-pdmux")
    launch.refuse_unsafe(make_runner([], token_to_kv_pool=make_pool(1)))
    monkeypatch.setattr(launch, "foreign_reasons", lambda: ["a class is gone"])
    with pytest.raises(SystemExit, match=r"pat: a class is gone$"):
        arguments(DEEPSEEK).resolve_once()
    with pytest.raises(RuntimeError, match="a class is gone"):
        launch.refuse_unsafe(None)  # not AttributeError: there is no runner
