# SPDX-License-Identifier: Apache-2.0
"""Pages name commands that exist, link to pages that do, and say what the docstrings say; README's
library snippet does what it says, as it stands, on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import api_page

from benchmarks.common.reference import attention
from sglang_pat import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "examples/README.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
)


def test_the_api_page_is_what_make_api_writes() -> None:
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == api_page.page(), "run `make api`"


@pytest.mark.parametrize("name", ["README.md", "docs/estimate.md"])
def test_the_commands_of_the_page_are_understood(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    commands = re.findall(r"^(?:\$ )?sglang-pat (.*?)(?: +#.*)?$", page, re.M)
    assert commands
    for command in commands:
        words = re.sub(r"\[.*?\]", "", command).replace("'", "").split()
        assert cli.make_parser().parse_args(words).command == words[0]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    for path, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page):
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), path
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            names = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in names, (path, anchor)


def test_the_snippet_shares_and_its_output_is_attention_s() -> None:
    text, names = (ROOT / "README.md").read_text(encoding="utf-8"), dict[str, Any]()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    given = "torch.randn(2, 8, 64),"
    assert snippet.count(given) == 1
    exec(compile(snippet.replace(given, f"q := {given}"), "README.md", "exec"), names)
    segments = names["plan"].segments
    assert segments["kv_len"][segments["num_queries"] == 2].sum() == 512  # the prompt, read once
    lens = torch.tensor([710, 650])
    caches = (names["k_cache"], names["v_cache"], names["req_to_token"])
    truth, _ = attention(names["q"], *caches, torch.tensor([0, 1]), lens, scale=64**-0.5)
    torch.testing.assert_close(names["out"], truth, rtol=1e-4, atol=1e-5)
