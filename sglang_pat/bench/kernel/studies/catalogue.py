# SPDX-License-Identifier: Apache-2.0
"""All studies by name."""

from __future__ import annotations

import argparse

from sglang_pat.bench.kernel.studies import (
    chunk,
    drift,
    neighbours,
    packinfer,
    paged,
    persistent,
    plans,
)
from sglang_pat.bench.kernel.studies.engine import Case, Study

STUDIES: dict[str, Study] = {
    "neighbours": neighbours.STUDY,
    "chunk": chunk.STUDY,
    "paged": paged.STUDY,
    "persistent": persistent.STUDY,
    "packinfer": packinfer.STUDY,
    "drift": drift.STUDY,
    "plans": plans.STUDY,
}


def cases_of(options: argparse.Namespace) -> list[Case]:
    """What ``--study`` and the options beside it ask for. Raises ValueError as ``Study.cases``."""
    return STUDIES[options.study].cases(options.heads or (), options.quick, options.only)
