# SPDX-License-Identifier: Apache-2.0
"""docs/api.md says what the docstrings say, and every public name says something."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import api_page

import sglang_pat

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_what_make_api_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == api_page.page(), "run `make api`"


@pytest.mark.parametrize("name", api_page.NAMES)
def test_every_public_name_is_described(name: str) -> None:
    value = getattr(sglang_pat, name)
    section = "\n".join(api_page._section(name))
    assert (value.__doc__ or "").strip()
    for member in vars(value):
        if isinstance(value, type) and not member.startswith("_") and hasattr(value, member):
            field = member in getattr(value, "__dataclass_fields__", {})
            assert field or f".{member}(" in section or f"`{member}`" in section, member
