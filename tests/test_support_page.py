# SPDX-License-Identifier: Apache-2.0
"""docs/support.md says what doctor says, and its links lead somewhere."""

# ruff: noqa: F401, F811 (fixtures of another module)
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kit import models as kit_models

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from test_verdict import ask, sglang_knows_pat

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"


@pytest.mark.parametrize(
    ("row", "query_heads", "flags"),
    [("Llama-3.1-8B", 32, ()), ("Llama-3.1-70B, `--tp 4`", 64, ("--tp", "4"))],
)
def test_the_requests_of_a_batch(
    row: str, query_heads: int, flags: tuple[str, ...], ask: Any
) -> None:
    shape = {"hidden_size": 4096, "head_dim": 128, "num_key_value_heads": 8}
    verdict = ask(kit_models.LLAMA, *flags, num_attention_heads=query_heads, **shape)
    most, packed = verdict.workspace.max_queries, verdict.workspace.packed_queries
    (line,) = re.findall(rf"^\| {re.escape(row)}.*$", PAGE.read_text(encoding="utf-8"), re.M)
    bound = f"{packed:,}" if packed < most else "-"
    assert line.endswith(f"| {most:,} | {bound} |")


def test_links_lead_somewhere() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", page):
        target = PAGE.parent / path if path else PAGE
        assert target.exists(), path
        heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
        names = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in names, (path, anchor)
