# SPDX-License-Identifier: Apache-2.0
"""A server that pat cannot serve right does not start, and says why and what to do: in the
launcher, in one line and before any weight is loaded, where that is known there."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import models as kit_models

from sglang_pat.demo.server import ServerError

from .server import Config, ServingServer

REFUSED = {
    "unknown value": (
        Config("value", env=(("SGLANG_PAT_POLICY", "fast"),)),
        "SGLANG_PAT_POLICY=fast is not a known value; use one of bytes, paper, naive",
    ),
    "unknown name": (
        Config("name", env=(("SGLANG_PAT_POLCY", "paper"),)),
        "SGLANG_PAT_POLCY=paper is not an option of sglang_pat",
    ),
    "hook missing": (
        Config("hook", env=(("PAT_TEETH_UNHOOK", "1"),), plugins=True),
        "forward_batch_info.ForwardBatch.init_new is not installed",
    ),
    "plugin filtered out": (
        Config("filter", env=(("SGLANG_PLUGINS", "others"),)),
        "invalid choice: 'pat'",
    ),
    "other K/V dtype": (
        Config("dtype", args=("--kv-cache-dtype", "bfloat16")),
        "set --kv-cache-dtype auto",
    ),
    "glue graph": (
        Config("glue", env=(("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1"),)),
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
    ),
}


REFUSES = "sglang_pat refuses to serve with --attention-backend pat: "
# As if no plugin had brought a platform, on a machine without a GPU.
NO_DEVICE = (("SGLANG_PLATFORM", ""), ("CUDA_VISIBLE_DEVICES", ""))


def _refusal(model: Path, config: Config, folder: Path) -> str:
    """The log of a server that must not start."""
    server = ServingServer(model, config, folder)
    with pytest.raises(ServerError), server:
        pass
    return server.text()


def _check_early(log: str, *messages: str) -> None:
    """One line for each message, no traceback, and nothing was loaded before."""
    lines = [line for line in log.splitlines() if line.startswith(REFUSES)]
    assert len(lines) == len(messages), log
    for line, message in zip(lines, messages, strict=True):
        assert message in line
    assert "Traceback" not in log
    assert "Load weight" not in log


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(case: str, model: Path, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    log = _refusal(model, config, tmp_path)
    if case == "plugin filtered out":  # it is SGLang that speaks
        assert message in log
    else:
        _check_early(log, message)


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    model = kit_models.write_config(tmp_path / "mla", kit_models.DEEPSEEK)
    config = Config("mla", args=("--load-format", "dummy", "--enable-pdmux"))
    _check_early(_refusal(model, config, tmp_path), "the model uses MLA", "--enable-pdmux")


def test_without_a_gpu_and_a_platform(model: Path, tmp_path: Path) -> None:
    config = Config("no device", env=NO_DEVICE)
    way_out = (
        "start the server with SGLANG_PLATFORM=pat_cpu, --device cpu and --attention-backend pat"
    )
    _check_early(_refusal(model, config, tmp_path), way_out)


def test_the_backend_refuses_what_the_launcher_let_pass(tmp_path: Path) -> None:
    model = kit_models.write_config(tmp_path / "mla", kit_models.DEEPSEEK)
    config = Config(
        "mla",
        args=("--load-format", "dummy"),
        env=(("PAT_TEETH_UNHOOK_LAUNCH", "1"),),
        plugins=True,
        spawn=True,  # its scheduler dies
    )
    log = _refusal(model, config, tmp_path)
    assert "the model uses MLA" in log
    assert REFUSES not in log
    assert "Load weight" in log
