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
    """Not again to another process, nor while another server listens on it."""
    port = reserve_port()
    code = (
        "import random; from sglang_pat.demo.server import reserve_port\n"
        f"random.sample = lambda population, k: [{port}]\n"
        "reserve_port()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 1 and "end servers, and try again" in ended.stderr
    with socket.create_server(("127.0.0.1", port)) as server:  # sets SO_REUSEADDR
        socket.create_connection(server.getsockname(), timeout=5).close()
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            taken = [port, stranger.getsockname()[1]]
            monkeypatch.setattr(random, "sample", lambda population, k: taken)
            with pytest.raises(OSError, match="all in use"):
                reserve_port()
