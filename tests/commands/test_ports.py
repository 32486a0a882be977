# SPDX-License-Identifier: Apache-2.0
"""The ports of spawned servers: ``demo.server.reserve_port``."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest

from sglang_pat.demo.server import reserve_port


def listening(port: int) -> socket.socket:
    """As a server's."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen(1)
    return found


def draw(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    monkeypatch.setattr(random, "sample", lambda population, k: list(ports))


def test_a_server_may_listen_on_it() -> None:
    port = reserve_port()
    with listening(port), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on it yet."""
    first = reserve_port()
    second = reserve_port()
    draw(monkeypatch, first, second)
    with pytest.raises(OSError, match="end servers, and try again"):
        reserve_port()


def test_nor_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    port, other = reserve_port(), reserve_port()
    code = (
        "import random; from sglang_pat.demo.server import reserve_port\n"
        f"random.sample = lambda population, k: [{port}, {other}]\n"
        "reserve_port()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 1 and "end servers, and try again" in ended.stderr


def test_not_one_on_which_a_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(0) as server:
        draw(monkeypatch, server.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            reserve_port()
