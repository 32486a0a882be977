# SPDX-License-Identifier: Apache-2.0
"""What commands of ``sglang-pat`` find when they run in the tests' process."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def fresh_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No options of ours in the environment."""
    for name in [name for name in os.environ if name.startswith("SGLANG_PAT_")]:
        monkeypatch.delenv(name)
