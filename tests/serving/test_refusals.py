# SPDX-License-Identifier: Apache-2.0
"""A server that pat cannot serve right does not start, and says why and what to do in the launcher,
before any weight is loaded. Each reason is in tests/srt: test_support.py, test_launch.py and
test_interface.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.configs import write_config

from sglang_pat.demo.server import ServerError

from .server import Config, ServingServer

REFUSES = "sglang_pat refuses to serve with --attention-backend pat: "


def test_all_reasons_are_given_in_the_launcher(tmp_path: Path) -> None:
    """A line for each, by arguments, environment and config.json."""
    config = Config(
        "refused",
        args=("--load-format", "dummy", "--enable-pdmux"),
        env=(("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1"),),
    )
    model = write_config(tmp_path / "mla", "DeepseekV2ForCausalLM")
    server = ServingServer(model, config, tmp_path)
    with pytest.raises(ServerError), server:
        pass
    log = server.text()
    lines = [line for line in log.splitlines() if line.startswith(REFUSES)]
    named = ("the model uses MLA", "--enable-pdmux", "SGLANG_ENABLE_METADATA_GLUE_GRAPH")
    assert len(lines) == len(named), log
    assert all(any(name in line for line in lines) for name in named), lines
    assert "Traceback" not in log and "Load weight" not in log
