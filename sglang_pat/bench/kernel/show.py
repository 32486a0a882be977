# SPDX-License-Identifier: Apache-2.0
"""How the documents of the kernel benchmark are printed and drawn."""

from __future__ import annotations

from pathlib import Path

from sglang_pat.bench.common import document as documents
from sglang_pat.bench.common.document import Document
from sglang_pat.bench.kernel import ablation, drafts, e4m3, plot, ragged, tiles, timeline, traffic
from sglang_pat.bench.kernel.report import TreeRow, complaints, summary, table
from sglang_pat.bench.kernel.studies import report as studies
from sglang_pat.bench.kernel.timeline import Timeline

# The kinds of documents that this benchmark writes.
KINDS = (
    "trees",
    "sweep",
    "drafts",
    "ragged",
    "batches",
    "ablation",
    "study",
    "tiles",
    "timelines",
    "traffic",
)

# What is said of rows of equal heads, by the kind of their document; of others ``report.summary``.
SUMMARIES = {
    "ragged": ragged.summary,
    "batches": ragged.summary,
    "drafts": drafts.summary,
}


def about(document: Document) -> list[str]:
    """Where and how a document was measured, as lines."""
    lines = documents.heading(document)
    if server := document.get("server"):
        versions = ", ".join(f"{name} {found}" for name, found in server["versions"].items())
        lines.append(f"batches of {server['date']}, {server['device']}, {versions}")
    if document["kind"] in ("timelines", "traffic"):
        return lines
    lines.append(
        f"ceilings: {document['bytes_per_s'] / 1e12:.2f} TB/s read, "
        f"{document['flops_per_s'] / 1e12:.0f} TFLOP/s bf16; an empty captured kernel: "
        f"{document['empty_us']:.1f} us"
    )
    return lines + [f"without {name}: {why}" for name, why in document.get("absent", {}).items()]


def show(document: Document, picture: Path | None) -> int:
    """Print the rows of a document and draw them; exit status 1 if an output is wrong."""
    if document["kind"] == "traffic":
        return traffic.show(document, picture)
    if document["kind"] == "tiles":
        return tiles.show(document, picture)
    if document["kind"] == "timelines":
        lines = [Timeline.from_json(row) for row in document["rows"]]
        print("\n".join(text for line in lines for text in timeline.summary(line)))
        if picture:
            timeline.draw(lines, picture)
        return 0
    if document["kind"] == "study":
        return studies.show(document, picture)
    if document["kind"] == "ablation":
        return _show_ablation(document, picture)
    rows = [TreeRow(**row) for row in document["rows"]]
    print("\n".join(tree_lines(document, rows)))
    for line in e4m3.summary(rows):
        print(line)
    if picture:
        plot.draw(document["kind"], rows, picture)
    for line in complaints(rows):
        print(line)
    return 0 if all(row.is_sound for row in rows) else 1


def tree_lines(document: Document, rows: list[TreeRow]) -> list[str]:
    """The rows of trees or forests as text, with summaries by heads and what was left out."""
    lines = table(rows, SUMMARIES.get(document["kind"], summary))
    return lines + [f"left out: {each}" for each in document.get("left_out", [])]


def _show_ablation(document: Document, picture: Path | None) -> int:
    rows = [ablation.AblationRow(**row) for row in document["rows"]]
    print("\n".join(ablation.table(rows)))
    if picture:
        ablation.draw(rows, picture)
    for line in ablation.complaints(rows):
        print(line)
    return 1 if any(row.wrong for row in rows) else 0
