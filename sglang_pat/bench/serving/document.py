# SPDX-License-Identifier: Apache-2.0
"""The documents of the serving benchmark: kept run by run, shown and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_pat.bench.common.budget import Budget
from sglang_pat.bench.common.document import Document, conditions, heading, write
from sglang_pat.bench.serving import plot
from sglang_pat.bench.serving.agents import AgentsRow, agents_table
from sglang_pat.bench.serving.capacity_report import capacity_table, draw_capacity
from sglang_pat.bench.serving.curves import curve_tables, draw_curves
from sglang_pat.bench.serving.first import FirstRow
from sglang_pat.bench.serving.first import table as first_table
from sglang_pat.bench.serving.first_token import first_token_table
from sglang_pat.bench.serving.graphs import graph_table
from sglang_pat.bench.serving.probe import CapacityRow
from sglang_pat.bench.serving.router_rows import RouterRow, router_table
from sglang_pat.bench.serving.rows import TraceRow, WorkloadRow, table, trace_table
from sglang_pat.bench.serving.workload import LIMITS, LIMITS_SHAPE

ROWS: dict[str, type[Any]] = {
    "workloads": WorkloadRow,
    "traces": TraceRow,
    "first": FirstRow,
    "agents": AgentsRow,
    "capacity": CapacityRow,
    "router": RouterRow,
}
VERSIONS_OF = ("sglang-pat", "sglang", "torch", "sglang-kernel", "flashinfer-python")
# Kinds whose table shows all, so that there is no picture of them.
TABLES_ONLY = {"first": "first runs", "router": "runs behind a router"}


def new(kind: str, device: str, settings: dict[str, Any]) -> Document:
    """A document without rows; ``kind``: one of ``ROWS``."""
    packages = (*VERSIONS_OF, *(("sglang-router",) if kind == "router" else ()))
    found = conditions(kind, "sglang_pat.bench.serving", device, packages, settings)
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
    if "subject" in row:
        p99 = "-" if row["tpot_p99_ms"] is None else f"{row['tpot_p99_ms']:.2f}"
        return (
            f"{row['subject']}, {row['load']:.4g} {row['unit']}, {row['backend']}: TPOT p99 {p99} "
            f"ms of {row['requests']} requests, {row['begun']:.0%} had begun, "
            f"{row['tokens_per_s']:.0f} tokens/s"
        )
    where = row.get("workload") or row.get("agents") or f"{row['trace']} {row['rate']:g}/s"
    if "policy" in row:
        where += f" {row['policy']}"
    if "agents" in row:
        more = f"{row['tokens_per_s']:.0f} tokens/s"
    elif "tpot_ms" in row:
        more = f"TPOT {row['tpot_ms']:.2f} ms"
    else:
        more = f"all have begun after {row['ttft_max_ms']:.2f} ms"
    return f"{where} {row['backend']}: ITL p50 {row['itl_p50_ms']:.2f} ms, {more}"


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
    if kind == "traces":
        return trace_table(rows) + curve_tables(rows) + first_token_table(rows)
    if kind == "first":
        return first_table(rows)
    if kind == "router":
        return router_table(rows)
    if kind == "capacity":
        found = capacity_table(rows, settings["limits_ms"], settings["resolution"])
        return curve_tables(rows) + first_token_table(rows) + found
    if kind == "agents":
        has_goals = (settings["model"], settings["tp"]) == (LIMITS_SHAPE[0], 1)
        found = agents_table(rows, limits=has_goals) + curve_tables(rows)
        return found + first_token_table(rows)
    return table(rows, _limits(settings)) + graph_table(rows)


def draw(documents: Sequence[Document], path: Path) -> None:
    """Write a picture of documents of one kind. Raises ValueError if there are several kinds."""
    kinds = {document["kind"] for document in documents}
    if len(kinds) > 1:
        raise ValueError(f"one picture has one kind of rows, but these are {', '.join(kinds)}")
    for kind in kinds & TABLES_ONLY.keys():
        raise ValueError(f"there is no picture of {TABLES_ONLY[kind]}: their table shows all")
    groups = [(_title(found[0]), _rows(found)) for found in _groups(documents).values()]
    if not all(rows for _, rows in groups):
        raise ValueError("there is no run to draw: --budget-s may have been too short for one")
    if kinds == {"capacity"}:
        return draw_capacity(groups, documents[0]["settings"]["limits_ms"], path)
    draw_kind = plot.draw_workloads if kinds == {"workloads"} else draw_curves
    draw_kind(groups, path)


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


def _title(document: Document) -> str:
    settings = document["settings"]
    gpus = f", {settings['tp']} GPUs" if settings["tp"] > 1 else ""
    return f"{settings['model']}, {document['device']}{gpus}"


def _rows(documents: Sequence[Document]) -> list[Any]:
    kind = ROWS[documents[0]["kind"]]
    return [kind(**row) for document in documents for row in document["rows"]]
