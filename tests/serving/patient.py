# SPDX-License-Identifier: Apache-2.0
"""Long answers, beside which something else happens to the server."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .server import Answer, ServingServer
from .workloads import WORKLOADS

PATIENT = WORKLOADS["patient"]


def start_patient(
    pool: ThreadPoolExecutor, server: ServingServer, **options: Any
) -> Future[list[Answer]]:
    """Send the long answers' prompts, with ``options`` of ``generate``, and return once they are
    being generated."""
    before = len(server.text())
    future = pool.submit(server.generate, PATIENT.prompts, PATIENT.new_tokens, **options)
    wait_until_decoded(server, before, len(PATIENT.prompts), future)
    return future


def wait_until_decoded(
    server: ServingServer, before: int, requests: int, future: Future[list[Answer]]
) -> None:
    """Return once the log behind its first ``before`` characters has a step of ``requests``, whose
    answers ``future`` will have. SGLang logs every 40th step."""
    deadline = time.monotonic() + 60
    while f"Decode batch, #running-req: {requests}," not in (log := server.text()[before:]):
        assert not future.done() and time.monotonic() < deadline, log
        time.sleep(0.02)
