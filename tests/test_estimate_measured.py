# SPDX-License-Identifier: Apache-2.0
"""The modelled times of ``sglang-pat estimate`` beside what was measured (docs/results).

``python tests/test_estimate_measured.py`` prints the table of docs/estimate.md.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest

from benchmarks.serving.workload import Workload, make_prompts
from sglang_pat import Target
from sglang_pat.estimate.batches import closed_loop
from sglang_pat.estimate.model import open_model
from sglang_pat.estimate.planning import estimate
from sglang_pat.estimate.requests import Prompts, Request
from sglang_pat.estimate.shape import heads_of_rank
from sglang_pat.estimate.step import StepModel
from sglang_pat.gpus import machine_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "estimate.md"
FILES = (
    "h200-2026-11-23-serving.json",
    "h200-2026-11-21-serving.json",
    "h200-2026-11-22-serving-1024.json",
    "h200-2026-11-21-serving-qwen3.json",
    "h200-2026-11-21-serving-tp2.json",
    "h200-2026-11-23-serving-e4m3.json",
    "h100-2026-11-22-first-runs.json",
)


@dataclass(frozen=True)
class Row:
    """Inter-token times in ms: measured (medians of all runs) and modelled."""

    file: str
    workload: str
    tp: int
    pat: float
    stock: dict[str, float]
    modelled: float
    modelled_stock: float

    @property
    def error(self) -> float:
        return self.modelled / self.pat - 1

    @property
    def error_of_stock(self) -> float:
        return self.modelled_stock / min(self.stock.values()) - 1

    @property
    def error_of_ratio(self) -> float:
        """Of the time with pat over that of the better stock backend."""
        measured = self.pat / min(self.stock.values())
        return self.modelled / self.modelled_stock / measured - 1


def rows(file: str) -> Iterator[Row]:
    document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    settings = document["settings"]
    measured: defaultdict[str, defaultdict[str, list[float]]]
    measured = defaultdict(lambda: defaultdict(list))
    for row in document["rows"]:
        measured[row["workload"]][row["backend"]].append(row["itl_p50_ms"])
    for name, backends in measured.items():
        times = {backend: median(values) for backend, values in backends.items()}
        kv_bytes = 1 if "e4m3" in file else 2
        modelled = _modelled(name, settings, kv_bytes, document["device"])
        pat = times.pop("pat")
        yield Row(file, name, settings["tp"], pat, times, *modelled)


def _modelled(
    name: str, settings: dict[str, int], kv_bytes: int, device: str
) -> tuple[float, float]:
    prompts = make_prompts(
        Workload.parse(name), new=settings["new_tokens"], vocab=100_000, seed="0"
    ).prompts
    requests = Prompts(
        [
            Request(line, np.array(prompt), len(prompt), settings["output_tokens"])
            for line, prompt in enumerate(prompts, 1)
        ]
    )
    tp = settings["tp"]
    model, q_heads, kv_heads = heads_of_rank(open_model(str(settings["model"])), None, tp)
    target = Target.gpu(
        # The table is by the vendor's rates of an H100, which only another name has.
        machine_of("h200") if "H200" in device else replace(machine_of("h100"), name="H100"),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=model.head_dim,
        max_queries=256,
        kv_bytes=kv_bytes,
    )
    batches = closed_loop(requests.queue(), len(prompts), 4)
    found = estimate(requests, batches, StepModel(model, target, tp))
    return found.packed_step_s * 1e3, found.unpacked_step_s * 1e3


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return [row for file in FILES for row in rows(file)]


def spread(errors: list[float]) -> str:
    return f"{round(100 * min(errors)):+d} to {round(100 * max(errors)):+d} %"


def table(measured: list[Row]) -> list[str]:
    """As docs/estimate.md has it."""
    lines = [
        "| file | workload | pat: measured, modelled | better stock: measured, modelled | ratio: "
        "measured, modelled |",
        "|---|---|--:|--:|--:|",
    ]
    for row in measured:
        better = min(row.stock, key=lambda backend: row.stock[backend])
        ranks = f", {row.tp} GPUs" if row.tp > 1 else ""
        stock = f"{better} {row.stock[better]:.2f}, {row.modelled_stock:.2f} ms"
        lines.append(
            f"| [{row.file[:-5]}](results/{row.file}) | {row.workload}{ranks} | {row.pat:.2f}, "
            f"{row.modelled:.2f} ms | {stock} | {row.pat / row.stock[better]:.2f}, "
            f"{row.modelled / row.modelled_stock:.2f} |"
        )
    return lines


def summary(measured: list[Row]) -> list[str]:
    """How far off the modelled times are, as docs/estimate.md has it."""
    bf16 = one_gpu(measured)
    kinds = {
        "one H200, bf16, beside fa3 and flashinfer": [r for r in bf16 if "flashinfer" in r.stock],
        "one H200, bf16, beside fa3 alone": [r for r in bf16 if "flashinfer" not in r.stock],
        "two H200s, bf16": [r for r in measured if r.tp > 1],
        "one H200, fp8_e4m3, beside fa3 alone": [r for r in measured if "e4m3" in r.file],
        "one H100, bf16, beside fa3 alone": [r for r in measured if "h100" in r.file],
    }
    lines = ["| rows | time with pat | time without | ratio |", "|---|--:|--:|--:|"]
    for name, of in kinds.items():
        errors = (
            [row.error for row in of],
            [row.error_of_stock for row in of],
            [row.error_of_ratio for row in of],
        )
        lines.append(f"| {name} | {' | '.join(map(spread, errors))} |")
    return lines


def one_gpu(measured: list[Row]) -> list[Row]:
    """Rows with K/V in bf16 on one H200, which the constant of a layer was fitted to."""
    return [
        row for row in measured if row.tp == 1 and "h200" in row.file and "e4m3" not in row.file
    ]


def test_the_time_with_pat_is_near_what_was_measured(measured: list[Row]) -> None:
    assert all(abs(row.error) < 0.08 for row in one_gpu(measured)), [
        (row.workload, row.error) for row in measured
    ]
    assert all(abs(row.error) < 0.15 for row in measured)


def test_the_time_without_is_near_the_better_of_two_stock_backends(measured: list[Row]) -> None:
    both = [row for row in one_gpu(measured) if "flashinfer" in row.stock]
    assert len(both) >= 8
    assert all(abs(row.error_of_stock) < 0.08 for row in both)


def test_no_more_gain_is_promised_than_was_measured(measured: list[Row]) -> None:
    assert all(row.error_of_ratio > -0.1 for row in one_gpu(measured))
    mean = exp(fmean(log(1 + row.error_of_ratio) for row in one_gpu(measured)))
    assert 0.95 < mean < 1.1


def test_the_page_has_the_table(measured: list[Row]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for line in [*table(measured), *summary(measured)]:
        assert line in page, "python tests/test_estimate_measured.py prints the table"


if __name__ == "__main__":
    found = [row for file in FILES for row in rows(file)]
    print("\n".join([*table(found), "", *summary(found)]))
