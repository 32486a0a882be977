# SPDX-License-Identifier: Apache-2.0
"""The ports of spawned servers: ``demo.server.reserve_port``."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest

from sglang_pat.demo.server import reserve_port


def test_a_server_may_listen_on_a_port_that_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither again, nor to another process, nor while another server listens on it."""
    port, other = reserve_port(), reserve_port()
    code = (
        "import random; from sglang_pat.demo.server import reserve_port\n"
        f"random.sample = lambda population, k: [{port}, {other}]\n"
        "reserve_port()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 1 and "end servers, and try again" in ended.stderr
    with socket.socket() as server, socket.socket() as stranger:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen(1)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        stranger.bind(("127.0.0.1", 0))
        stranger.listen(1)
        taken = [port, other, stranger.getsockname()[1]]
        monkeypatch.setattr(random, "sample", lambda population, k: taken)
        with pytest.raises(OSError, match="all in use"):
            reserve_port()
