# SPDX-License-Identifier: Apache-2.0
"""What commands of ``sglang-pat`` find and change when they run in the tests' process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def fresh_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No options of ours in the environment, and afterwards the signal handler that was there
    before the command set its own."""
    for name in [name for name in os.environ if name.startswith("SGLANG_PAT_")]:
        monkeypatch.delenv(name)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
