# SPDX-License-Identifier: Apache-2.0
"""A server that pat cannot serve right does not start, and says why and what to do: in the
launcher, a line for each reason and before any weight is loaded, where that is known there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit import models as kit_models

from sglang_pat.demo.server import ServerError

from .server import Config, ServingServer

REFUSES = "sglang_pat refuses to serve with --attention-backend pat: "
MLA = Config("mla", args=("--load-format", "dummy"))
REFUSED = {
    # As if no plugin had brought a platform, on a machine without a GPU.
    "before the arguments are read": (
        Config(
            "before",
            env=(
                *(("SGLANG_PAT_POLICY", "fast"), ("SGLANG_PLATFORM", "")),
                ("CUDA_VISIBLE_DEVICES", ""),
            ),
        ),
        (
            "SGLANG_PAT_POLICY=fast is not a known value; use one of ",
            "start the server with SGLANG_PLATFORM=pat_cpu, --device cpu and --attention-backend",
        ),
    ),
    "by arguments and config.json": (
        replace(
            MLA,
            args=(*MLA.args, "--enable-pdmux"),
            env=(("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1"),),
        ),
        ("the model uses MLA", "--enable-pdmux", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
    ),
    "without the hook": (
        Config("hook", env=(("PAT_TEETH_UNHOOK", "1"),), plugins=True),
        ("forward_batch_info.ForwardBatch.init_new is not installed",),
    ),
}


def _refusal(config: Config, model: Path, folder: Path) -> str:
    """The log of a server that must not start."""
    if config.name == "mla":
        model = kit_models.write_config(folder / "mla", kit_models.DEEPSEEK)
    server = ServingServer(model, config, folder)
    with pytest.raises(ServerError), server:
        pass
    return server.text()


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_the_launcher(case: str, model: Path, tmp_path: Path) -> None:
    config, messages = REFUSED[case]
    log = _refusal(config, model, tmp_path)
    lines = [line for line in log.splitlines() if line.startswith(REFUSES)]
    assert len(lines) == len(messages), log
    for message in messages:
        assert any(message in line for line in lines), (message, lines)
    assert "Traceback" not in log
    assert "Load weight" not in log


def test_the_backend_refuses_what_no_hook_has_resolved(model: Path, tmp_path: Path) -> None:
    unhooked = (("PAT_TEETH_UNHOOK_LAUNCH", "1"),)
    config = Config("unhooked", env=unhooked, plugins=True, spawn=True)  # its scheduler dies
    log = _refusal(config, model, tmp_path)
    assert "hook before sglang.srt.server_args.ServerArgs.resolve_once is not installed" in log
    assert not any(line.startswith(REFUSES) for line in log.splitlines())  # in the launcher
    assert "Load weight" in log
