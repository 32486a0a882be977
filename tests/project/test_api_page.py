# SPDX-License-Identifier: Apache-2.0
"""docs/api.md says what the docstrings say, and every public name says something."""

from __future__ import annotations

from pathlib import Path

from kit import api_page

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_what_make_api_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == api_page.page(), "run `make api`"
