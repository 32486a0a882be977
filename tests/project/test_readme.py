# SPDX-License-Identifier: Apache-2.0
"""The README's library snippet does what it says, as it stands, on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.reference import attention

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_snippet_shares_and_its_output_is_attention_s() -> None:
    text, names = README.read_text(encoding="utf-8"), dict[str, Any]()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    given = "torch.randn(2, 8, 64),"
    assert snippet.count(given) == 1
    exec(compile(snippet.replace(given, f"q := {given}"), str(README), "exec"), names)
    segments = names["plan"].segments
    assert segments["kv_len"][segments["num_queries"] == 2].sum() == 512  # the prompt, read once
    lens = torch.tensor([710, 650])
    caches = (names["k_cache"], names["v_cache"], names["req_to_token"])
    truth, _ = attention(names["q"], *caches, torch.tensor([0, 1]), lens, scale=64**-0.5)
    torch.testing.assert_close(names["out"], truth, rtol=1e-4, atol=1e-5)
