# SPDX-License-Identifier: Apache-2.0
"""Clients that go away in mid-stream, as browsers and timeouts do."""

from __future__ import annotations

import json
import socket
import uuid

from .server import Prompt, ServingServer

_EVENT = b"data: "
TIMEOUT_S = 60.0


def quit_after(server: ServingServer, prompt: Prompt, events: int, *, new_tokens: int) -> None:
    """Ask for ``new_tokens`` tokens as a stream, read ``events`` events and close the connection.

    Raises:
        ConnectionError: the server closed it first.
    """
    parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
    body = json.dumps(
        {
            "rid": uuid.uuid4().hex,
            "input_ids": list(prompt),
            "sampling_params": parameters,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while answer.count(_EVENT) < events:
            part = connection.recv(65536)
            if not part:
                raise ConnectionError(f"closed after {answer[-300:]!r}")
            answer += part
        if b"data: [DONE]" in answer:
            raise ConnectionError(f"done before {events} events: ask for more tokens")
