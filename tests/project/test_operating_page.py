# SPDX-License-Identifier: Apache-2.0
"""docs/operating.md explains every counter, and each reason of a fallback."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_pat import stats
from sglang_pat.stats import _UNINTENDED_MODES, COUNTERS, LABELLED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def test_every_reason_of_a_fallback_is_explained() -> None:
    sources = [*(ROOT / "sglang_pat" / "srt").glob("*.py"), ROOT / "sglang_pat" / "stats.py"]
    code = "".join(source.read_text(encoding="utf-8") for source in sources)
    given = {*re.findall(r'fall_back\(\s*"([^"]+)"', code)}
    given |= {getattr(stats, name) for name in re.findall(r"fall_back\(\s*([A-Z_]+),", code)}
    assert len(given) >= 12
    table = PAGE.split("What the reasons of `fallbacks` mean")[1].split("\n\n")[1]
    explained = {
        reason
        for row in table.splitlines()[2:]
        for reason in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    assert explained == given | set(_UNINTENDED_MODES)


def test_every_counter_is_explained() -> None:
    table = PAGE.split("| counter | read it as |")[1].split("\n\n")[0]
    rows = {
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([a-z_]+)(?:\{[a-z]+\})?`", row.split("|")[1])
    }
    assert rows == {*COUNTERS, *LABELLED, "sglang_pat_serving"}
