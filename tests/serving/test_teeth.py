# SPDX-License-Identifier: Apache-2.0
"""The comparison has teeth: what would be wrong in attention shows in the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_pat.demo.server import ServerError

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config, ServingServer
from .workloads import WORKLOADS

WORK = WORKLOADS["shared"]

Sabotage = Callable[[str], ServingServer]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture
def sabotage(serve: Serve, fault_file: Path) -> Sabotage:
    """A server that commits a fault (plugins/pat_teeth.py) in every decode step from now on."""
    env = (("PAT_TEETH_FAULT", str(fault_file)),)
    config = Config("teeth", env=env, plugins=True, spawn=True)

    def commit(fault: str) -> ServingServer:
        fault_file.write_text(fault)
        return serve(config)

    return commit


def _answers(server: ServingServer) -> list[Answer]:
    return server.generate(WORK.prompts, WORK.new_tokens)


@pytest.mark.parametrize("fault", ["zero", "drop_pack", "swap_slot"])
def test_faults_show(fault: str, sabotage: Sabotage, stock: dict[str, list[Answer]]) -> None:
    assert disagreements(_answers(sabotage("")), stock["shared"]) == []
    assert disagreements(_answers(sabotage(fault)), stock["shared"]) != []
    assert disagreements(_answers(sabotage("")), stock["shared"]) == []


def test_slots_that_no_request_owns_are_not_read(
    sabotage: Sabotage, stock: dict[str, list[Answer]]
) -> None:
    assert disagreements(_answers(sabotage("poison")), stock["shared"]) == []


def test_check_mode_stops_a_server_whose_rows_disagree(sabotage: Sabotage) -> None:
    server = sabotage("")
    _answers(server)
    sabotage("corrupt_row")
    with pytest.raises((ServerError, OSError)):  # the connection breaks off
        _answers(server)
        server.check_alive()
    log = server.text()
    assert "SGLANG_PAT_CHECK: request" in log
    assert "at token 3" in log
