# SPDX-License-Identifier: Apache-2.0
"""The comparison has teeth: what would be wrong in attention shows in the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pat.demo.server import ServerError

from .conftest import Serve, Stock
from .server import Config, ServingServer, disagreements
from .workloads import WORKLOADS

WORK = WORKLOADS["shared"]


@pytest.fixture
def server(serve: Serve, fault: Path) -> ServingServer:
    fault.write_text("")
    env = (("PAT_TEETH_FAULT", str(fault)),)
    return serve(Config("teeth", env=env, plugins=True, spawn=True))


@pytest.mark.parametrize("name", ["zero", "drop_pack", "swap_slot"])
def test_faults_show(name: str, server: ServingServer, fault: Path, stock: Stock) -> None:
    for made in ("", name, ""):
        fault.write_text(made)
        assert (disagreements(server.ask(WORK), stock["shared"]) != []) == bool(made)


def test_slots_that_no_request_owns_are_not_read(
    server: ServingServer, fault: Path, stock: Stock
) -> None:
    fault.write_text("poison")
    assert disagreements(server.ask(WORK), stock["shared"]) == []


def test_check_mode_stops_a_server_whose_rows_disagree(server: ServingServer, fault: Path) -> None:
    server.ask(WORK)
    fault.write_text("corrupt_row")
    with pytest.raises((ServerError, OSError)):  # the connection breaks off
        server.ask(WORK)
        server.check_alive()
    log = server.text()
    assert "SGLANG_PAT_CHECK: request" in log
    assert "at token 3" in log
