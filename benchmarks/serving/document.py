# SPDX-License-Identifier: Apache-2.0
"""The documents of the serving benchmark: kept run by run, shown and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.common.budget import Budget
from benchmarks.common.document import Document, conditions, heading, write
from benchmarks.serving.agents import AgentsRow, agents_table
from benchmarks.serving.rows import WorkloadRow, table
from benchmarks.serving.workload import LIMITS, LIMITS_SHAPE

ROWS: dict[str, type[Any]] = {"workloads": WorkloadRow, "agents": AgentsRow}
VERSIONS_OF = ("sglang-pat", "sglang", "torch", "sglang-kernel", "flashinfer-python")


def new(kind: str, device: str, settings: dict[str, Any]) -> Document:
    """A document without rows; ``kind``: one of ``ROWS``."""
    found = conditions(kind, "benchmarks.serving", device, VERSIONS_OF, settings)
    return found | {"rows": [], "left_out": []}


class Journal:
    """Keeps what runs give in a document and a file, and says so."""

    def __init__(self, document: Document, path: Path | None, budget: Budget) -> None:
        self._document = document
        self._path = path
        self._budget = budget

    def record(self, row: dict[str, Any]) -> None:
        self._document["rows"].append(row)
        write(self._document, self._path)
        print(f"{_line(row)}{self._budget}", flush=True)

    def leave_out(self, run: str, reason: str) -> None:
        self._document["left_out"].append(f"{run}: {reason}")
        print(f"{run}: left out, {reason}{self._budget}", flush=True)


def _line(row: dict[str, Any]) -> str:
    """A run on one line."""
    where = row.get("workload") or row["agents"]
    speed = f"ITL p50 {row['itl_p50_ms']:.2f} ms, {row['tokens_per_s']:.0f} tokens/s"
    return f"{where} {row['backend']}: {speed}"


def show(documents: Sequence[Document]) -> None:
    """Print conditions and tables; documents of the same kind, model and GPUs in one table."""
    for members in _groups(documents).values():
        rows = _rows(members)
        for document in members:
            print("\n".join(heading(document)))
        print("\n".join(_tables(members[0], rows) if rows else ["no runs"]))
        for document in members:
            for run in document["left_out"]:
                print(f"left out: {run}")


def _tables(document: Document, rows: list[Any]) -> list[str]:
    """Lines; ``rows``: of ``document`` and all that go into one table with it."""
    kind, settings = document["kind"], document["settings"]
    if kind == "agents":
        has_goals = (settings["model"], settings["tp"]) == (LIMITS_SHAPE[0], 1)
        return agents_table(rows, limits=has_goals)
    return table(rows, _limits(settings))


def _groups(documents: Sequence[Document]) -> dict[tuple[str, str, int], list[Document]]:
    found: dict[tuple[str, str, int], list[Document]] = {}
    for document in documents:
        settings = document["settings"]
        key = (document["kind"], settings["model"], settings["tp"])
        found.setdefault(key, []).append(document)
    return found


def _limits(settings: dict[str, Any]) -> Mapping[str, float]:
    """Those of the goals, where they apply."""
    shape = (settings["model"], settings.get("new_tokens"), settings.get("output_tokens"))
    return LIMITS.get(settings["tp"], {}) if shape == LIMITS_SHAPE else {}


def _rows(documents: Sequence[Document]) -> list[Any]:
    kind = ROWS[documents[0]["kind"]]
    known = {field.name for field in fields(kind)}
    return [
        kind(**{name: value for name, value in row.items() if name in known})
        for document in documents
        for row in document["rows"]
    ]
